"""Writes new tokens to the cache: quantisation and a scatter."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._cache.kv_cache import KVCache, check_cache
from jaxpaged._cache.layers import CacheLayer, pools_of
from jaxpaged._cache.pool_rows import put_rows
from jaxpaged._cache.quantise import kv_scale, quantise
from jaxpaged._debug import check_write
from jaxpaged._integers import as_int32
from jaxpaged._on_shards import on_shards
from jaxpaged._one_program import one_program


@on_shards
def write_kv[C: (KVCache, CacheLayer)](cache: C, k: ArrayLike, v: ArrayLike | None, slots: ArrayLike) -> C:
    """Writes the keys and values of new tokens to their slots; in place if the cache is donated.

    A quantised cache stores `round(k / k_scale)`, clipped to the range of its dtype, so that no number overflows to NaN
    or infinity. If the cache has a scale per token and head, it is computed from the token,
    `max |k| / (largest number of the dtype)`, and stored with it. A write does not change scales per head or tensor.

    Args:
        cache: one layer's `KVCache`, or a `CacheLayer`.
        k: `[..., kv_heads, head_dim]`, floating point; cast or quantised to the cache's dtype.
        v: `[..., kv_heads, value_dim]`, floating point. None for a latent cache, whose values are part of k.
        slots: int32 `[...]`, slot of each token, as from `BlockAllocator.append`. Tokens with a slot outside the pool
            (padding) are dropped. All other slots must be distinct; in a slot that is given twice, each number may come
            from either token.

    Returns:
        The new cache, of the type that was passed.

    Raises:
        ValueError: shapes or dtypes do not match.

    Bytes moved: reads and writes of the tokens, `2 * tokens * kv_heads * head_dim * (itemsize of k + itemsize of the
    cache)`, plus the slots, plus `2 * tokens * kv_heads * 4` for scales per token and head. On a CPU, XLA has no
    float8, and a write to a float8 cache passes over the whole cache.

    Example:
        >>> import jax.numpy as jnp, jaxpaged
        >>> cache = jaxpaged.KVCache.create(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=8)
        >>> cache = jaxpaged.ops.write_kv(cache, jnp.ones((3, 1, 8)), jnp.ones((3, 1, 8)), jnp.array([2, 3, 99]))
        >>> [int(x) for x in cache.k[:, :, 0, 0].ravel()]
        [0, 0, 1, 1, 0, 0, 0, 0]
    """
    new_k, new_v, slots = jnp.asarray(k), None if v is None else jnp.asarray(v), as_int32(slots)
    if slots.dtype != jnp.int32:
        raise ValueError(f"slots must be int32; got {slots.dtype=!s}. Cast with .astype(jnp.int32).")
    check_cache(pools_of(cache))
    if isinstance(cache, CacheLayer):
        layer = cache.with_pool(_write_pool(cache.pool, new_k, new_v, cache.slots(slots)))
        check_write(layer.stack.k, slots)
        return layer
    if cache.k.ndim != 4:
        raise ValueError(
            f"write_kv needs one layer's cache; got {cache.k.shape=}. For a layer of a stack pass "
            "jaxpaged.CacheLayer(stack, layer)."
        )
    pool = _write_pool(cache, new_k, new_v, slots)
    check_write(pool.k, slots)
    return pool


@one_program()
def _write_pool(cache: KVCache, k: jax.Array, v: jax.Array | None, slots: jax.Array) -> KVCache:
    if (v is None) != (cache.v is None):
        raise ValueError(
            "v must be None for a latent cache and an array for any other; got "
            f"{'None' if v is None else 'an array'} for {'a latent' if cache.v is None else 'another'} cache."
        )
    k_pool, k_scale = _write("k", cache.k, cache.k_scale, k, slots)
    if v is None or cache.v is None:
        return dataclasses.replace(cache, k=k_pool, k_scale=k_scale)
    v_pool, v_scale = _write("v", cache.v, cache.v_scale, v, slots)
    return KVCache(k=k_pool, v=v_pool, k_scale=k_scale, v_scale=v_scale)


def _write(
    name: str, pool: jax.Array, pool_scale: jax.Array | None, tokens: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The pool with the new tokens [..., kv_heads, head_dim], and its scales, which change if they are per token."""
    token_shape = pool.shape[2:]
    if tokens.shape != (*slots.shape, *token_shape):
        raise ValueError(
            f"{name} must be [..., kv_heads, head_dim] with slots [...] and the cache's {list(token_shape)}; "
            f"got {name}.shape={tokens.shape}, {slots.shape=}."
        )
    if not jnp.issubdtype(tokens.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating point; got {name}.dtype={tokens.dtype}.")
    tokens, slots = tokens.reshape(-1, *token_shape), slots.ravel()
    if pool_scale is None:
        return scatter_slots(pool, tokens.astype(pool.dtype), slots), None
    scale = stored = pool_scale
    if pool_scale.ndim == 3:
        scale = kv_scale(tokens, pool.dtype, "token_head")
        stored = scatter_slots(pool_scale, scale, slots)
    return scatter_slots(pool, quantise(tokens, scale, pool.dtype), slots), stored


def scatter_slots(pool: jax.Array, tokens: jax.Array, slots: jax.Array) -> jax.Array:
    """Writes tokens [tokens, ...] to their slots in a pool [blocks, block_size, ...]. Tokens with a slot outside are
    dropped. The pool may be a stack, whose slots are numbered through all layers."""
    num_slots = math.prod(pool.shape[: pool.ndim - tokens.ndim + 1])
    # Padding gets distinct negative slots: past the end of a large pool there may be no int32 numbers left.
    dropped = -1 - jnp.arange(slots.size, dtype=jnp.int32)
    slots = jnp.where((slots >= 0) & (slots < num_slots), slots, dropped)
    return put_rows(pool, slots, tokens)
