"""The fetching warpgroup: copies blocks of K and V from GMEM into rings of tiles in SMEM, item after item.

Each of its four warps makes every fourth copy of a tile. A copy is a block, or a quarter of the tile if that is
smaller. All functions are traced inside the kernel.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.fetch import WARPS, Ids, Ring, block_at, rows_of_copy
from pallas_kernels.common.sizes import div, rem
from pallas_kernels.prefill.config import Config
from pallas_kernels.prefill.item import Item, Items
from pallas_kernels.prefill.scales import Scales


@dataclasses.dataclass(frozen=True)
class Fetcher:
    items: Items
    keys: Ring
    values: Ring
    tables: Any  # GMEM, int32 [seqs, max_blocks]
    scales: Scales
    config: Config

    def run(self) -> None:
        plgpu.warp_map(self._run_warp)

    def _run_warp(self, warp: jax.Array) -> None:
        def fetch_item(i: jax.Array, turn: jax.Array) -> jax.Array:
            item = self.items.item(self.items.read(i))

            def fetch_tile(tile: jax.Array, carry: tuple[jax.Array, Ids]) -> tuple[jax.Array, Ids]:
                turn, ids = carry
                next_ids = self._ids(item, jnp.minimum(tile + 1, item.end - 1), warp)
                self._copy(item, tile, turn, ids, warp)
                return turn + 1, next_ids

            return lax.fori_loop(item.begin, item.end, fetch_tile, (turn, self._ids(item, item.begin, warp)))[0]

        turn = lax.fori_loop(0, self.items.count(), fetch_item, jnp.int32(0))
        self.scales.announce_last(turn)
        # No warp may exit before every barrier that it waits on has completed its last phase.
        for stage in range(self.config.num_fetched_stages):

            @pl.when(turn > stage)
            def _drain(stage: int = stage) -> None:
                for ring in (self.keys, self.values):
                    plgpu.barrier_wait(ring.free.at[stage])

    def _copies(self, warp: jax.Array) -> tuple[int, list[jax.Array]]:
        """The number of tokens per copy, and for each copy of this warp the row of the tile where it starts."""
        count = rows_of_copy(self.keys.source.shape[1], self.config.tile_tokens)
        return count, [(warp + WARPS * i) * count for i in range(self.config.tile_tokens // count // WARPS)]

    def _ids(self, item: Item, tile: jax.Array, warp: jax.Array) -> Ids:
        num_blocks, block_size = self.keys.source.shape[:2]
        entries, rows = item.entries_to_follow(), self._copies(warp)[1]
        numbers = (div(tile * self.config.tile_tokens + row, block_size) for row in rows)
        return tuple(block_at(self.tables, item.seq, entry, entries, num_blocks) for entry in numbers)

    def _copy(self, item: Item, tile: jax.Array, turn: jax.Array, ids: Ids, warp: jax.Array) -> None:
        count, rows = self._copies(warp)
        block_size, head_dim = self.keys.source.shape[1], self.keys.source.shape[3]
        width, stages = self.keys.target.shape[2], self.config.num_fetched_stages
        stage = rem(turn, stages)
        # A copy is as wide as its buffer in SMEM. If the head is narrower, the copy engine writes zeros past its end.
        # The start must look dynamic to Pallas, which refuses a static slice past the end.
        columns = pl.ds(0 if head_dim == width else turn - turn, width)
        starts = [rem(tile * self.config.tile_tokens + row, block_size) if block_size > count else 0 for row in rows]
        for ring in (self.keys, self.values):

            @pl.when(turn >= stages)
            def _wait(ring: Ring = ring) -> None:
                plgpu.barrier_wait(ring.free.at[stage])

            for block_id, start, row in zip(ids, starts, rows, strict=True):
                plgpu.copy_gmem_to_smem(
                    ring.source.at[block_id, pl.ds(start, count), item.kv_head, columns],
                    ring.target.at[stage, pl.ds(row, count)],
                    ring.full.at[stage],
                )
        for block_id, start, row in zip(ids, starts, rows, strict=True):
            self.scales.fetch(block_id, start, item.kv_head, turn, row, count)
        self.scales.announce(turn)
