"""Copies of K and V, tile by tile, and the widening of 8-bit tiles.

The i-th tile of an item is in stage i % stages of two rings. The copy of its keys starts when the keys of tile
i - stages have been used, and the copy of its values half a step before the next keys. Q K0 V0 K1 V1 ... are groups of
copies. Past the last tile the groups are empty, so that each wait has the same number of groups in flight. Per-token
scales are copied with the keys.

All functions are traced inside the kernel.
"""

import dataclasses
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels.common import cp_async, scales
from pallas_kernels.common.fetch import Ids, blocks_of_tile
from pallas_kernels.common.rows import ROWS_FIRST, matrix
from pallas_kernels.common.sizes import COLUMNS, rem
from pallas_kernels.prefill.item import Item
from pallas_kernels.prefill.portable.config import Config
from pallas_kernels.prefill.widener import widen


@dataclasses.dataclass(frozen=True)
class Tiles:
    refs: Any
    item: Item
    config: Config

    def read_ids(self, tile: jax.Array) -> Ids:
        refs, item, size = self.refs, self.item, self.config.tile_tokens
        start, entries = tile * size, item.entries_to_follow()
        return blocks_of_tile(refs.block_tables, item.seq, start, size, entries, refs.k_cache)

    def start_keys(self, tile: jax.Array, ids: Ids) -> None:
        self._start(self.refs.k_cache, self.refs.k_smem, tile, ids, scales.rings(self.refs))

    def start_values(self, tile: jax.Array, ids: Ids) -> None:
        self._start(self.refs.v_cache, self.refs.v_smem, tile, ids, [])

    def wait_query(self) -> None:  # in flight: the first tiles, without the values of the last
        cp_async.wait(2 * self.config.num_stages - 1)

    def keys(self, tile: jax.Array) -> Any:
        """Waits for K, SMEM [tile, width]. All warps have then finished with the previous values."""
        return self._arrived(self.refs.k_smem, tile)

    def values(self, tile: jax.Array) -> Any:
        """Waits for V, SMEM [tile, width]. All warps have then finished with the keys."""
        return self._arrived(self.refs.v_smem, tile)

    def scales(self, tile: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
        """The per-token scales of K and of V, f32 [tile] or None."""
        rings = self.refs.k_scales_smem, self.refs.v_scales_smem
        k, v = (scales.load_of_tile(ring, self._stage(tile), ROWS_FIRST) for ring in rings)
        return k, v

    def _stage(self, tile: jax.Array) -> jax.Array:
        return rem(tile - self.item.begin, self.config.num_stages)

    def _arrived(self, ring: Any, tile: jax.Array) -> Any:
        cp_async.wait(2 * self.config.num_stages - 2)
        fetched, wide = ring.at[self._stage(tile)], self.refs.wide_smem
        if wide is None:
            return fetched
        widen(fetched, wide)
        cp_async.barrier()
        return wide

    def _start(self, source: Any, ring: Any, tile: jax.Array, ids: Ids, scale_rings: list[tuple[Any, Any]]) -> None:
        @pl.when(tile < self.item.end)
        def _copy() -> None:
            stage, first, kv_head = self._stage(tile), tile * self.config.tile_tokens, self.item.kv_head
            slot = rem(first, source.shape[1])  # the tile's first slot in its first block
            seen = self.item.first_visible - first, self.item.length - first
            cp_async.copy_tile(source, ring.at[stage], matrix(COLUMNS, source.dtype.itemsize), ids, slot, kv_head, seen)
            for of_tokens, target in scale_rings:
                cp_async.copy_scales(of_tokens, target.at[stage], ids, slot, kv_head)

        cp_async.commit()
