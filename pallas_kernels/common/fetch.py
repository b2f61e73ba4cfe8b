"""Blocks of K and V, and the rings of tiles in SMEM that they are copied into."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

WARPS = 4  # that copy, of a warpgroup


@dataclasses.dataclass(frozen=True)
class Ring:
    """Of K, or of V."""

    source: Any  # GMEM [blocks, block_size, kv_heads, head_dim]
    target: Any  # SMEM [stages, tile, width]
    full: Any  # barriers [stages]; None: the copies are counted in groups
    free: Any = None  # barriers [stages], if other warps fetch than compute


def copy_rows(block_size: int, tile_tokens: int) -> int:
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
