"""The warpgroup that widens an 8-bit cache: tiles of K and V from the rings in which they are fetched, as float16, to
the rings that the products read.

The tensor cores read keys and values from SMEM only, both of q's width. One warpgroup widens for the two that compute.
Its budget on an H100, for 64 tokens of head_dim 128: the products of a tile, 128 rows, need some 1700 clocks at their
best. For K and V, 2 x 8192 numbers, a thread makes 16 loads of 8 numbers, 64 conversions to two numbers each, and 16
stores, about 500 instructions of four warps: 130 clocks of each scheduler. Their 16 KB read and 32 KB written are 400
clocks of SMEM's bandwidth; the products need 800 and the copies 130. The conversion straight to float16 is
one instruction for two numbers; bfloat16 would need four, by way of float32. Measured, over the time with a bfloat16
cache: 1.10, with a warpgroup that only passes the barriers on 1.04, with a conversion by five instructions 1.37.
[prefill_widen_h100 of benchmarks/results/decisions/]

So the products are of float16 numbers: `pallas_kernels.common.widen` says what that means for Q.

Everything here is traced inside the kernel.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels.common.fetch import Ring
from pallas_kernels.common.interpret import interpreted_by
from pallas_kernels.common.mlir import make_array
from pallas_kernels.common.rows import ROWS, ROWS_FIRST
from pallas_kernels.common.sizes import COLUMNS, rem
from pallas_kernels.common.widen import from_words, halves, power_of_two, split_words
from pallas_kernels.prefill.config import Config
from pallas_kernels.prefill.item import Items


def _eights(columns: int) -> Any:
    """[rows, 64 or 128]: 8 neighbouring numbers a thread, which are 16 bytes of float16, and whole rows of a tile a
    warp, so that neither reads nor writes conflict."""
    rows = 256 // columns  # per warp
    tiling = fragmented_array.Tiling(((4 * rows, columns), (rows, columns), (8,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


@dataclasses.dataclass(frozen=True)
class Widener:
    items: Items
    fetched: tuple[Ring, Ring]  # K and V, 8 bits
    widened: tuple[Ring, Ring]  # K and V, float16
    config: Config

    def run(self) -> None:
        count = self.items.count()

        def widen_item(i: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            turn, numbers = carry
            item = self.items.item(numbers)
            next_numbers = self.items.read(jnp.minimum(i + 1, count - 1))
            return lax.fori_loop(item.begin, item.end, lambda _, turn: self._widen_tile(turn), turn), next_numbers

        @pl.when(count > 0)
        def _widen_items() -> None:
            turn, _ = lax.fori_loop(0, count, widen_item, (jnp.int32(0), self.items.read(jnp.int32(0))))
            # No thread may exit while a barrier that it waited on still completes a phase.
            for stage in range(self.config.num_stages):

                @pl.when(turn > stage)
                def _drain(stage: int = stage) -> None:
                    for ring in self.widened:
                        plgpu.barrier_wait(ring.free.at[stage])

    def _widen_tile(self, turn: jax.Array) -> jax.Array:
        source = rem(turn, self.config.num_fetched_stages)
        target = rem(turn, self.config.num_stages)
        for fetched, widened in zip(self.fetched, self.widened, strict=True):
            plgpu.barrier_wait(fetched.full.at[source])

            @pl.when(turn >= self.config.num_stages)
            def _wait(ring: Ring = widened) -> None:
                plgpu.barrier_wait(ring.free.at[target])

            width = widened.target.shape[-1]
            widen(fetched.target.at[source], widened.target.at[target], 128 if width % 128 == 0 else 64)
            plgpu.commit_smem()
            plgpu.barrier_arrive(widened.full.at[target])
            plgpu.barrier_arrive(fetched.free.at[source])
        return turn + 1


def widen(narrow: Any, wide: Any, at_once: int = COLUMNS) -> None:
    """SMEM [tile, width] of 8-bit numbers into float16 [tile, width], by a warpgroup, 64 or 128 columns at once: 64 if
    they are tiled."""
    for start in range(0, narrow.shape[1], at_once):
        columns = pl.ds(start, at_once)
        wide[:, columns] = _float16(narrow.at[:, columns])


def _as_float16(narrow: Any) -> jax.Array:
    return narrow[...].astype(jnp.float16)


@interpreted_by(_as_float16)
def _float16(narrow: Any) -> jax.Array:
    """From SMEM [rows, 64 or 128] of 8-bit numbers."""

    def convert(_: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        wide = np.empty_like(x.registers)
        for index, register in np.ndenumerate(x.registers):
            words = split_words(register)
            pairs = [pair for word in words for pair in halves(word, narrow.dtype, transposed=False)]
            words = [word for pair in pairs for word in split_words(pair)]
            wide[index] = from_words(words, ir.VectorType.get((8,), ir.F16Type.get()))
        return make_array(wide.flat, x.layout, x.shape)

    layout = _eights(narrow.shape[1])
    result = plgpu.ShapeDtypeStruct(narrow.shape, jnp.dtype(jnp.float16), layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(convert)(plgpu.load(narrow, layout=layout))


def q_as_float16(q: Any, target: Any, commit: Callable[[], None]) -> jax.Array:
    """Q, SMEM bfloat16 [rows, width], to `target`, float16, which may be another view of it; and the factor of the
    products with each row, f32 [rows]."""
    parts = [pl.ds(start, COLUMNS) for start in range(0, q.shape[1], COLUMNS)]

    def load(columns: Any) -> jax.Array:
        return plgpu.load(q.at[:, columns], layout=ROWS).astype(jnp.float32)

    largest = ROWS_FIRST.full(q.shape[0], 0.0)
    for columns in parts:
        largest = jnp.maximum(largest, jnp.abs(load(columns)).max(axis=1))
    factor = power_of_two(largest)
    for columns in parts:
        x = load(columns)
        target[:, columns] = (x * ROWS_FIRST.over(1.0 / factor, x.shape)).astype(jnp.float16)
    commit()
    return factor
