"""Hygiene: blocks that were given back are overwritten with zeros."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxpaged._cache.kv_cache import KVCache, check_cache, map_blocks
from jaxpaged._cache.transfer import checked_ids, holds_tokens, put_blocks
from jaxpaged._on_shards import on_shards
from jaxpaged._one_program import one_program

ZEROED_AT_ONCE = 64  # blocks; what a step without any costs is the test that there are none


@on_shards
def zero_blocks(cache: KVCache, block_ids: ArrayLike) -> KVCache:
    """Overwrites blocks with zeros, in every layer of a stack, tokens' scales included; in place if donated.

    Attention never shows a block's new owner its old tokens, zeroed or not. Use this to remove tokens from memory as
    soon as their blocks are given back:

        before, allocator = allocator, allocator.free(ended)
        cache = zero_blocks(cache, allocator.freed_since(before))

    Args:
        cache: one layer's cache, or a stack of layers.
        block_ids: int32 `[ids]`. The null block 0, or an id outside the pool, is padding.

    Returns:
        The new cache.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Bytes moved: the blocks, written once; padding costs nothing but a prefix sum over the ids.
    """
    check_cache(cache)
    block_ids = checked_ids("block_ids", block_ids)
    if block_ids.size == 0:
        return cache
    return _zero(cache, block_ids)


@one_program()
def _zero(cache: KVCache, block_ids: jax.Array) -> KVCache:
    legal = holds_tokens(block_ids, cache.k.shape[-4])
    rank = jnp.cumsum(legal, dtype=jnp.int32)
    # The ids closed up, then a few at a time for as long as there are some: a scatter of all of them, padding
    # included, would take its time over every number of every block even if it writes none.
    targets = jnp.where(legal, rank - 1, block_ids.size)
    num_rounds = -(-block_ids.size // ZEROED_AT_ONCE)
    ids = jnp.full(num_rounds * ZEROED_AT_ONCE, -1, jnp.int32).at[targets].set(block_ids, mode="drop")
    layer_axes = cache.k.ndim - 4

    def zero(i: jax.Array, cache: KVCache) -> KVCache:
        some = lax.dynamic_slice_in_dim(ids, i * ZEROED_AT_ONCE, ZEROED_AT_ONCE)

        def overwrite(pool: jax.Array) -> jax.Array:
            shape = (*pool.shape[:layer_axes], ZEROED_AT_ONCE, *pool.shape[layer_axes + 1 :])
            return put_blocks(pool, jnp.zeros(shape, pool.dtype), some, cache)

        return map_blocks(overwrite, cache)

    return lax.fori_loop(0, -(-rank[-1] // ZEROED_AT_ONCE), zero, cache)
