"""Attention from a cache and an allocator, which know the tables and the scales."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._attention.options import known_int
from jaxpaged._attention.public import AttentionKeywords, paged_attention, whole_attention
from jaxpaged._cache.kv_cache import KVCache, check_cache
from jaxpaged._cache.layers import CacheLayer, pools_of
from jaxpaged._debug import check_tables


@overload
def attend(
    q: ArrayLike,
    cache: KVCache | CacheLayer,
    allocator: BlockAllocator,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionKeywords],
) -> jax.Array: ...


@overload
def attend(
    q: ArrayLike,
    cache: KVCache | CacheLayer,
    allocator: BlockAllocator,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionKeywords],
) -> tuple[jax.Array, jax.Array]: ...


def attend(
    q: ArrayLike,
    cache: KVCache | CacheLayer,
    allocator: BlockAllocator,
    *,
    return_lse: bool = False,
    **options: Unpack[AttentionKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`paged_attention` of `q` over a cache, with the cache's scales and the allocator's block tables and lengths.

    Args:
        q: `[seqs, heads, head_dim]`, `[seqs, q_len, heads, head_dim]`, or packed, with `query_starts`,
            `[tokens, heads, head_dim]`.
        cache: one layer's cache, or `CacheLayer(stack, i)`, after the write of q's tokens.
        allocator: after the `append` that made room for them; with several groups `allocator.group(i)`, the layer's.
        return_lse: also return the lse.
        options: the others of `paged_attention`, except `k_scale`, `v_scale` and `latent_values`.

    Returns:
        As `paged_attention`.

    Raises:
        ValueError: as `paged_attention`; a cache with other blocks than the allocator's; all of several groups, or a
            `sliding_window` wider than the group's.
        NotImplementedError: as `paged_attention`.

    Example:
        >>> import jax.numpy as jnp, jaxpaged
        >>> cache = jaxpaged.KVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=64, dtype="int8")
        >>> allocator = jaxpaged.BlockAllocator.create(num_blocks=8, block_size=16, num_seqs=1, max_blocks_per_seq=4)
        >>> allocator, slots, ok = allocator.append(jnp.array([1]))
        >>> cache = jaxpaged.write_kv(cache, jnp.ones((1, 2, 64)), jnp.ones((1, 2, 64)), slots[:, 0])
        >>> jaxpaged.attend(jnp.ones((1, 4, 64), jnp.bfloat16), cache, allocator).shape
        (1, 4, 64)
    """
    _check_blocks(pools_of(cache), allocator)
    _check_group(allocator, options.get("sliding_window"))
    if options.get("query_starts") is None and jnp.ndim(q) == 4 and jnp.shape(q)[1] > 1:
        allocator = _without_passed(allocator)
    if isinstance(cache, CacheLayer):
        _check_layer(cache, q, allocator, options)
    pool, block_tables = _pool_and_tables(cache, allocator)
    options |= dict(k_scale=pool.k_scale, v_scale=pool.v_scale, latent_values=pool.latent_values)
    arrays = q, pool.k, pool.v, block_tables, allocator.lengths
    return paged_attention(*arrays, return_lse=True, **options) if return_lse else paged_attention(*arrays, **options)


def attend_to_history(
    q: jax.Array, cache: KVCache | CacheLayer, allocator: BlockAllocator, lengths: jax.Array, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """`attend` of queries that all see the first `lengths`, int32 `[seqs]`, tokens of their sequence, and its lse."""
    _check_blocks(pools_of(cache), allocator)
    _check_group(allocator, None)
    pool, block_tables = _pool_and_tables(cache, allocator)
    options |= dict(k_scale=pool.k_scale, latent_values=pool.latent_values, return_lse=True)
    return whole_attention(q, pool.k, pool.v, block_tables, lengths, **options)


def _pool_and_tables(cache: KVCache | CacheLayer, allocator: BlockAllocator) -> tuple[KVCache, jax.Array]:
    if isinstance(cache, CacheLayer):
        return cache.pool, cache.block_tables(allocator.block_tables)
    return cache, allocator.block_tables


def _without_passed(allocator: BlockAllocator) -> BlockAllocator:
    """The allocator with the null block in place of blocks that the window has passed.

    Padding rows before new tokens read them. Another sequence may own them, whose NaN a product with the values spreads
    to all rows.
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
            "the cache must have the allocator's block_size, and its num_blocks at least; got a cache with "
            f"{num_blocks=}, {block_size=}, and {allocator.num_blocks=}, {allocator.block_size=}."
        )


def _check_group(allocator: BlockAllocator, window: ArrayLike | None) -> None:
    if allocator.num_groups > 1:
        raise ValueError(
            f"the allocator has {allocator.num_groups} groups; pass allocator.group(i), the group of the layer."
        )
    passed = allocator.windows[0]
    if passed is not None and (window is None or (known_int(window) or 0) > passed):
        raise ValueError(
            f"the layer's group has a window of {passed} tokens, and blocks behind it are given back: pass "
            f"sliding_window={passed} or less; got {window}."
        )


def _check_layer(cache: CacheLayer, q: ArrayLike, allocator: BlockAllocator, options: AttentionKeywords) -> None:
    """For `debug_checks`: `paged_attention` gets the ids in the stack, and cannot tell the ids of other layers."""
    starts, window = options.get("query_starts"), options.get("sliding_window")
    num_new = jnp.diff(jnp.asarray(starts)) if starts is not None else jnp.shape(q)[1] if jnp.ndim(q) == 4 else 1
    window = None if window is None else jnp.asarray(window, jnp.int32)
    check_tables(cache.stack.k, allocator.block_tables, allocator.lengths, num_new, window)
