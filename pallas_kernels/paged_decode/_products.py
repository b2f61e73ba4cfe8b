"""The two matrix products of a tile of a 16-bit cache and up to 32 rows, all operands in SMEM.

    S^T [tile, rows]  = K [tile, head_dim]  Q^T [head_dim, rows]
    O^T [chunk, rows] = V^T [chunk, tile]   P^T [tile, rows]

Everything here is traced inside the decode kernel.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._fetch import Ring
from pallas_kernels._rows import COLUMNS, ROWS


@dataclasses.dataclass(frozen=True)
class Products:
    keys: Ring
    values: Ring
    q: Any  # SMEM [rows, width]
    p: Any  # SMEM [rows, tile]
    num_parts: int  # of a head
    parts_of: Callable[[Any], list[Any]]  # of a stage
    chunk: int  # rows of O^T

    def of_keys(self, stage: jax.Array) -> jax.Array:
        """S^T, f32 [tile, rows]."""

        def product(ref: Any) -> jax.Array:
            self._start_keys(ref, stage)
            return ref[...]

        return pl.run_scoped(product, self._scores)

    def of_keys_if(self, is_there: jax.Array, stage: jax.Array) -> jax.Array:
        """S^T of a tile, once its keys have come, and frees them; numbers without meaning if there is no such tile."""
        self.keys.wait_if(is_there, stage)
        scores = self.of_keys(stage)
        self.keys.free_if(is_there, stage)
        return scores

    def of_values(self, stage: jax.Array, c: int) -> jax.Array:
        """The c-th chunk of O^T, f32 [chunk, rows]."""

        def product(ref: Any) -> jax.Array:
            self._start_values(ref, stage, c)
            return ref[...]

        return pl.run_scoped(product, self._output)

    def of_values_and_next_keys(
        self, stage: jax.Array, is_next: jax.Array, next_stage: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """O^T, of one chunk, and S^T of the next tile side by side, as `of_keys_if`; frees the values too."""

        def products(output_ref: Any, scores_ref: Any) -> tuple[jax.Array, jax.Array]:
            self._start_values(output_ref, stage, 0)
            self.keys.wait_if(is_next, next_stage)
            self._start_keys(scores_ref, next_stage)
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(self.values.free.at[stage])
            scores = scores_ref[...]
            self.keys.free_if(is_next, next_stage)
            return output_ref[...], scores

        return pl.run_scoped(products, self._output, self._scores)

    @property
    def _scores(self) -> Any:
        rows, tile = self.p.shape
        return plgpu.ACC((tile, rows), jnp.float32)

    @property
    def _output(self) -> Any:
        return plgpu.ACC((self.chunk, self.p.shape[0]), jnp.float32)

    def _start_keys(self, ref: Any, stage: jax.Array) -> None:
        for part, place in enumerate(self.parts_of(stage)):
            q = self.q if self.num_parts == 1 else self.q.at[:, pl.ds(part * COLUMNS, COLUMNS)]
            plgpu.wgmma(ref, self.keys.target.at[place], q.T)

    def _start_values(self, ref: Any, stage: jax.Array, c: int) -> None:
        if self.num_parts > 1 or self.chunk == self.q.shape[1]:  # of several parts each is a chunk
            values = self.values.target.at[self.parts_of(stage)[c]]
        else:
            values = self.values.target.at[stage, :, pl.ds(c * self.chunk, self.chunk)]
        plgpu.wgmma(ref, values.T, self.p.T)


def zero_unseen(ring: Ring, places: list[Any], seen: Callable[..., jax.Array]) -> None:
    """Makes the values at `places` of the ring zero in the slots that no query may see; `seen` as `Walk.seen`."""
    for place in places:
        values = ring.target.at[place]
        for c in range(values.shape[-1] // COLUMNS):
            part = values.at[:, pl.ds(c * COLUMNS, COLUMNS)]
            visible = seen(part.shape, 0, ROWS)
            v = plgpu.load(part, layout=ROWS)
            part[...] = jnp.where(visible, v, jnp.zeros_like(v))
