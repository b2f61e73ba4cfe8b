"""Block lookup, and copies of K and V blocks into rings of tiles in SMEM."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.sizes import div, rem

WARPS = 4  # warps of a warpgroup; all of them copy
Ids = tuple[jax.Array, ...]  # block ids of a tile


@dataclasses.dataclass(frozen=True)
class Ring:
    """A ring of K or V tiles."""

    source: Any  # GMEM [blocks, block_size, kv_heads, head_dim]
    target: Any  # SMEM [stages, tile, width]
    full: Any  # barriers [stages]; None: arrivals are counted in groups of cp.async
    free: Any = None  # barriers [stages], if the warps that fetch are not those that compute


def rows_of_copy(block_size: int, tile_tokens: int) -> int:
    """Tokens of a cache block that one copy moves."""
    return min(block_size, tile_tokens // WARPS)


def block_at(
    tables: Any,  # int32 [seqs, max_blocks]
    seq: jax.Array,
    entry: jax.Array,
    entries: tuple[jax.Array, jax.Array],  # entries with a token that some query sees: the first, and one past the last
    num_blocks: int,
) -> jax.Array:
    """The block id at `entry`, clamped to the pool. Outside `entries` it is block 0, whose tokens are masked."""
    block_id = tables[seq, jnp.minimum(entry, tables.shape[1] - 1)]
    follow = jnp.logical_and(entry >= entries[0], entry < entries[1])
    return jnp.where(follow, jnp.clip(block_id, 0, num_blocks - 1), 0)


def blocks_of_tile(
    tables: Any,  # int32 [seqs, max_blocks]
    seq: jax.Array,
    start: jax.Array,  # first token of the tile, in the sequence
    tile_tokens: int,
    entries: tuple[jax.Array, jax.Array],  # as in `block_at`
    cache: Any,  # [blocks, block_size, ...]
) -> Ids:
    """Block ids of a tile; block 0 for entries outside `entries`."""
    num_blocks, block_size = cache.shape[:2]
    first = div(start, block_size)
    numbers = (first + j for j in range(max(1, tile_tokens // block_size)))
    return tuple(block_at(tables, seq, entry, entries, num_blocks) for entry in numbers)


def copy_tile(
    copy: Callable[[jax.Array, Any, Any], None],  # starts the copy of (block_id, tokens of the block, rows of the tile)
    ids: Ids,
    offset: jax.Array,  # slot of its first token in the first block
    block_size: int,
    tile_tokens: int,
) -> None:
    """Calls `copy` for each piece of a tile. The pieces are dealt to the four warps of the warpgroup."""
    count = rows_of_copy(block_size, tile_tokens)
    copies_of_id = tile_tokens // len(ids) // count
    plgpu.commit_smem()  # orders all warps' reads of this stage before the copy engine's writes

    @plgpu.warp_map
    def _copy(warp: jax.Array) -> None:
        for first in range(0, tile_tokens // count, WARPS):
            block_id = ids[first // copies_of_id]
            for i in range(1, WARPS):
                block_id = jnp.where(warp >= i, ids[(first + i) // copies_of_id], block_id)
            row = (first + warp) * count
            start = offset + rem(row, min(block_size, tile_tokens))
            copy(block_id, pl.ds(start, count), pl.ds(row, count))
