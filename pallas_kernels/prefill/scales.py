"""The rings of per-token scales of an 8-bit cache in the prefill kernel.

The warp that fetches a piece of a tile also copies the scales of its tokens, one per lane. All functions are traced
inside the kernel.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import cp_async
from pallas_kernels.common.rows import ROWS_FIRST
from pallas_kernels.common.scales import load_of_tile, rings
from pallas_kernels.common.sizes import rem
from pallas_kernels.prefill.refs import Refs

LANES = 32


@dataclasses.dataclass(frozen=True)
class Scales:
    refs: Refs
    stages: int  # per ring; K and V share one barrier per stage

    def stage(self, turn: jax.Array) -> jax.Array:
        return rem(turn, self.stages)

    def of_tile(self, turn: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
        """The scales of K and of V, f32 [tile] or None, for the `turn`-th fetched tile."""
        refs, stage = self.refs, self.stage(turn)
        if refs.scales_full is not None:
            plgpu.barrier_wait(refs.scales_full.at[stage])
        k, v = (load_of_tile(ring, stage, ROWS_FIRST) for ring in (refs.k_scales_smem, refs.v_scales_smem))
        return k, v

    @property
    def lag(self) -> int:
        """Number of later tiles that a warp fetches before it waits for a tile's scales and announces them."""
        return self.stages // 2

    def fetch(
        self,
        block_id: jax.Array,
        offset: jax.Array | int,
        kv_head: jax.Array,
        turn: jax.Array,
        row: jax.Array,
        size: int,
    ) -> None:
        """Called by one warp: starts copying the scales of `size` tokens, from slot `offset` of a block to row `row` of
        a tile."""
        for scales, ring in rings(self.refs):
            target = ring.at[self.stage(turn), pl.ds(row, size)]
            cp_async.copy_scales(scales, target, (block_id,), jnp.int32(offset), kv_head, threads=LANES)

    def announce(self, turn: jax.Array) -> None:
        """Called by one warp after it has started its copies of the `turn`-th fetched tile."""
        if self.refs.scales_full is None:
            return
        cp_async.commit()
        cp_async.wait_own(self.lag)
        self._arrive(turn - self.lag)

    def announce_last(self, num_tiles: jax.Array) -> None:
        """Called by one warp after it has started its copies of all tiles."""
        if self.refs.scales_full is None:
            return
        cp_async.wait_own(0)
        for back in range(1, self.lag + 1):
            self._arrive(num_tiles - back)

    def _arrive(self, turn: jax.Array) -> None:
        @pl.when(turn >= 0)
        def _announce() -> None:
            plgpu.barrier_arrive(self.refs.scales_full.at[self.stage(turn)])
