"""How K and V are fetched, tile by tile.

The i-th tile of an item lies in stage i % stages of two rings. Its keys are asked for when those of tile i - stages
have been used, its values half a step earlier than the keys that follow: Q K0 V0 K1 V1 ... are groups of copies, empty
ones past the last tile, so that the same number of groups is on its way at each wait.

Everything here is traced inside the kernel.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import cp_async
from pallas_kernels.common.fetch import block_at
from pallas_kernels.common.interpret import interpreted
from pallas_kernels.prefill.item import Item
from pallas_kernels.prefill.portable.config import Config

Ids = tuple[jax.Array, ...]  # of the blocks of a tile


@dataclasses.dataclass(frozen=True)
class Tiles:
    refs: Any
    item: Item
    config: Config
    transforms: tuple[Any, ...]  # of a matrix in SMEM

    def read_ids(self, tile: jax.Array) -> Ids:
        """The blocks of a tile of the sequence; the null block where nothing may be read."""
        tables, (num_blocks, block_size) = self.refs.block_tables, self.refs.k_cache.shape[:2]
        start = lax.div(tile * self.config.tile_tokens, jnp.int32(block_size))
        entries = self.item.entries_to_follow()
        numbers = (start + j for j in range(max(1, self.config.tile_tokens // block_size)))
        return tuple(block_at(tables, self.item.seq, entry, entries, num_blocks) for entry in numbers)

    def start_keys(self, tile: jax.Array, ids: Ids) -> None:
        self._start(self.refs.k_cache, self.refs.k_smem, tile, ids)

    def start_values(self, tile: jax.Array, ids: Ids) -> None:
        self._start(self.refs.v_cache, self.refs.v_smem, tile, ids)

    def wait(self) -> None:
        """For the keys, or the values, that are used next. All warps are done with what was used before."""
        if not interpreted():
            cp_async.wait(2 * self.config.num_stages - 2)

    def stage(self, tile: jax.Array) -> jax.Array:
        return lax.rem(tile - self.item.begin, jnp.int32(self.config.num_stages))

    def _start(self, source: Any, ring: Any, tile: jax.Array, ids: Ids) -> None:
        @pl.when(tile < self.item.end)
        def _copy() -> None:
            target, first = ring.at[self.stage(tile)], tile * self.config.tile_tokens
            slot = lax.rem(first, jnp.int32(source.shape[1]))  # of the first block, where the tile begins
            seen = self.item.first_visible - first, self.item.length - first
            if interpreted():
                self._copy_at_once(source, target, ids, slot, seen)
            else:
                cp_async.copy_tile(source, target, self.transforms, ids, slot, self.item.kv_head, seen)

        if not interpreted():
            cp_async.commit()

    def _copy_at_once(self, source: Any, target: Any, ids: Ids, slot: jax.Array, seen: tuple[Any, Any]) -> None:
        count, width = self.config.tile_tokens // len(ids), target.shape[1]
        for j, block_id in enumerate(ids):
            rows = source[block_id, pl.ds(slot, count), self.item.kv_head, :]
            rows = jnp.concatenate([rows, jnp.zeros((count, width - rows.shape[1]), rows.dtype)], axis=1)
            row = lax.broadcasted_iota(jnp.int32, rows.shape, 0) + j * count
            ours = jnp.logical_and(row >= seen[0], row < seen[1])
            target[pl.ds(j * count, count)] = jnp.where(ours, rows, jnp.zeros_like(rows))
