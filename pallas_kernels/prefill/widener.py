"""The widening warpgroup: reads the fetched 8-bit tiles of K and V and writes float16 tiles for the products.

Hopper's matrix instructions read keys and values only from SMEM, and only in numbers as wide as Q's. One warpgroup
widens K and V for the two warpgroups that compute. Its budget on an H100, for 64 tokens of head_dim 128: the products
of a tile with 128 rows need at least some 1700 clocks. For K and V, 2 x 8192 numbers, a thread makes 16 loads of 8
numbers, 64 conversions to two numbers each, and 16 stores. With four warps that is about 500 instructions, 130 clocks
of each scheduler. Reading 16 KB and writing 32 KB needs 400 clocks of SMEM's bandwidth; the products need 800 and the
copies 130. A conversion to float16 is one instruction for two numbers; bfloat16 would need four, through float32.
Measured times relative to a bfloat16 cache: 1.10; 1.04 with a warpgroup that only forwards the barriers; 1.37 with a
conversion of five instructions. [prefill_widen_h100 of benchmarks/results/decisions/]

So the products are in float16: `pallas_kernels.common.widen` explains the effect on Q.

All functions are traced inside the kernel.
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
    """Layout of [rows, 64 or 128]: a thread has 8 neighbouring numbers (16 bytes of float16) and a warp has whole rows
    of a tile, so that neither reads nor writes have bank conflicts."""
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
            # No thread may exit before every barrier that it waits on has completed its last phase.
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
    """Widens 8-bit SMEM [tile, width] into float16 [tile, width], by a warpgroup, `at_once` columns at a time: 64 or
    128, and 64 if they are tiled."""
    for start in range(0, narrow.shape[1], at_once):
        columns = pl.ds(start, at_once)
        wide[:, columns] = _float16(narrow.at[:, columns])


def _as_float16(narrow: Any) -> jax.Array:
    return narrow[...].astype(jnp.float16)


@interpreted_by(_as_float16)
def _float16(narrow: Any) -> jax.Array:
    """Loads 8-bit SMEM [rows, 64 or 128] as float16."""

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
    """Converts Q, bfloat16 SMEM [rows, width], to float16 in `target`, which may be another view of q. Returns the
    factor of each row's products, f32 [rows]."""
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
