"""Blocks of K and V, and the rings of tiles in SMEM that they are copied into."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.sizes import div, rem

WARPS = 4  # that copy, of a warpgroup
Ids = tuple[jax.Array, ...]  # the blocks of a tile


@dataclasses.dataclass(frozen=True)
class Ring:
    """A ring of tiles of K, or of V."""

    source: Any  # GMEM [blocks, block_size, kv_heads, head_dim]
    target: Any  # SMEM [stages, tile, width]
    full: Any  # barriers [stages]; None: the copies are counted in groups
    free: Any = None  # barriers [stages], if other warps fetch than compute


def rows_of_copy(block_size: int, tile_tokens: int) -> int:
    """Tokens of a cache block in one copy."""
    return min(block_size, tile_tokens // WARPS)


def block_at(
    tables: Any,  # int32 [seqs, max_blocks]
    seq: jax.Array,
    entry: jax.Array,
    entries: tuple[jax.Array, jax.Array],  # with a token that some query sees: the first, and one past the last
    num_blocks: int,
) -> jax.Array:
    """The block at an entry of a table row that may be followed, clamped to the pool; else block 0, which is masked."""
    block_id = tables[seq, jnp.minimum(entry, tables.shape[1] - 1)]
    follow = jnp.logical_and(entry >= entries[0], entry < entries[1])
    return jnp.where(follow, jnp.clip(block_id, 0, num_blocks - 1), 0)


def blocks_of_tile(
    tables: Any,  # int32 [seqs, max_blocks]
    seq: jax.Array,
    start: jax.Array,  # first token of the tile, in the sequence
    tile_tokens: int,
    entries: tuple[jax.Array, jax.Array],  # as of `block_at`
    cache: Any,  # [blocks, block_size, ...]
) -> Ids:
    """The null block where nothing may be read."""
    num_blocks, block_size = cache.shape[:2]
    first = div(start, block_size)
    numbers = (first + j for j in range(max(1, tile_tokens // block_size)))
    return tuple(block_at(tables, seq, entry, entries, num_blocks) for entry in numbers)


def copy_tile(
    copy: Callable[[jax.Array, Any, Any], None],  # asks the copy engine for tokens of a block, for rows of the tile
    ids: Ids,
    offset: jax.Array,  # slot of its first token in the first block
    block_size: int,
    tile_tokens: int,
) -> None:
    """Calls `copy` for the pieces of a tile of the computing warpgroup: each warp for every fourth."""
    count = rows_of_copy(block_size, tile_tokens)
    copies_of_id = tile_tokens // len(ids) // count
    plgpu.commit_smem()  # all warps' reads of this place come before the copy engine's writes

    @plgpu.warp_map
    def _copy(warp: jax.Array) -> None:
        for first in range(0, tile_tokens // count, WARPS):
            block_id = ids[first // copies_of_id]
            for i in range(1, WARPS):
                block_id = jnp.where(warp >= i, ids[(first + i) // copies_of_id], block_id)
            row = (first + warp) * count
            start = offset + rem(row, min(block_size, tile_tokens))
            copy(block_id, pl.ds(start, count), pl.ds(row, count))
