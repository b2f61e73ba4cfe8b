"""Attention over a cache and an allocator, which provide the block tables, lengths and scales."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._attention.call import known_int
from jaxpaged._attention.public import planned_attention, whole_attention
from jaxpaged._cache.kv_cache import KVCache, check_cache
from jaxpaged._cache.layers import CacheLayer, pools_of
from jaxpaged._debug import check_tables


def attend(q: jax.Array, cache: KVCache | CacheLayer, allocator: BlockAllocator, **options: Any) -> jax.Array:
    """`planned_attention` of `q` over a cache, with the cache's scales and the allocator's block tables and lengths."""
    _check_blocks(pools_of(cache), allocator)
    _check_group(allocator, options.get("sliding_window"))
    if options.get("query_starts") is None and jnp.ndim(q) == 4 and jnp.shape(q)[1] > 1:
        allocator = _without_passed(allocator)
    if isinstance(cache, CacheLayer):
        _check_layer(cache, q, allocator, options)
    pool, block_tables = _pool_and_tables(cache, allocator)
    options |= dict(k_scale=pool.k_scale, v_scale=pool.v_scale, value_dim=pool.value_dim)
    return planned_attention(q, pool.k, pool.v, block_tables, allocator.lengths, **options)


def attend_to_history(
    q: jax.Array, cache: KVCache | CacheLayer, allocator: BlockAllocator, lengths: jax.Array, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """Attention of queries that all see the first `lengths` (int32 `[seqs]`) tokens of their sequence. Returns the
    output and the lse."""
    _check_blocks(pools_of(cache), allocator)
    _check_group(allocator, None)
    pool, block_tables = _pool_and_tables(cache, allocator)
    options |= dict(k_scale=pool.k_scale, value_dim=pool.value_dim, return_lse=True)
    return whole_attention(q, pool.k, pool.v, block_tables, lengths, **options)


def _pool_and_tables(cache: KVCache | CacheLayer, allocator: BlockAllocator) -> tuple[KVCache, jax.Array]:
    if isinstance(cache, CacheLayer):
        return cache.pool, cache.block_tables(allocator.block_tables)
    return cache, allocator.block_tables


def _without_passed(allocator: BlockAllocator) -> BlockAllocator:
    """The allocator with the null block in place of blocks that the window has passed.

    Padding rows read these blocks. Another sequence may own them now, and a NaN in its values would spread to all rows
    in a product.
    """
    if allocator.num_passed is None:
        return allocator
    entries = jnp.arange(allocator.block_tables.shape[1], dtype=jnp.int32)[None]
    tables = jnp.where(entries >= allocator.num_passed[0][:, None], allocator.block_tables, 0)
    return dataclasses.replace(allocator, block_tables=tables)


def _check_blocks(cache: KVCache, allocator: BlockAllocator) -> None:
    check_cache(cache)
    num_blocks, block_size = cache.k.shape[-4:-2]
    if block_size != allocator.block_size or num_blocks < allocator.num_blocks:
        raise ValueError(
            "the cache must have the allocator's block_size and at least its num_blocks; got a cache with "
            f"{num_blocks=}, {block_size=}, and {allocator.num_blocks=}, {allocator.block_size=}."
        )


def _check_group(allocator: BlockAllocator, window: ArrayLike | None) -> None:
    passed = allocator.windows[0]
    if passed is not None and (window is None or (known_int(window) or 0) > passed):
        raise ValueError(
            f"the layer's group has a window of {passed} tokens and frees the blocks before it: pass "
            f"sliding_window={passed} or less; got {window}."
        )


def _check_layer(cache: CacheLayer, q: ArrayLike, allocator: BlockAllocator, options: Any) -> None:
    """Checks the layer's own block ids, for `debug_checks`: `paged_attention` gets ids in the whole stack and cannot
    recognise the ids of another layer."""
    starts, window = options.get("query_starts"), options.get("sliding_window")
    num_new = jnp.diff(jnp.asarray(starts)) if starts is not None else jnp.shape(q)[1] if jnp.ndim(q) == 4 else 1
    window = None if window is None else jnp.asarray(window, jnp.int32)
    check_tables(cache.stack.k, allocator.block_tables, allocator.lengths, num_new, window)
