"""Quantisation of keys and values to 8-bit dtypes: scales, quantising and widening."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxpaged._cache.kv_cache import LARGEST, Granularity, KVCache, check_cache
from jaxpaged._dtypes import checked_dtype

# The smallest scale, for vectors of zeros or nearly zeros. It avoids a division by zero, and is a normal float32, which
# GPUs do not flush to zero.
LEAST_SCALE = 1e-30
# Replaces infinities, so that the scale times the dtype's largest number is finite.
MOST = 3.4e38


def kv_scale(x: ArrayLike, dtype: DTypeLike, scale_per: Granularity) -> jax.Array:
    """The scale with which keys or values use the full range of an 8-bit dtype.

        max |x| / (largest number of dtype)

    To calibrate a cache, run sample text through the model with a float32 or bfloat16 cache, read the keys and values
    with `gather_kv`, and pass their scales to `KVCache.create`. `write_kv` clips larger numbers. A margin, such as
    `1.2 * kv_scale(...)`, leaves room for them at lower resolution: it costs float8 little, and int8 a sixth of its
    steps.

    Args:
        x: keys or values `[..., kv_heads, head_dim]`, floating point.
        dtype: float8_e4m3fn, float8_e5m2 or int8.
        scale_per: the maximum is over everything ("tensor"), over all axes except the heads ("head"), or over head_dim
            only ("token_head").

    Returns:
        f32 `[]`, `[kv_heads]` or `[..., kv_heads]`, at least 1e-30. Infinity counts as 3.4e38, and NaN gives NaN.

    Raises:
        ValueError: `dtype` or `scale_per` is not one of these, or x is not floating point or has fewer than two axes.

    Example:
        >>> import jax.numpy as jnp, jaxpaged
        >>> jaxpaged.ops.kv_scale(jnp.array([[[-254.0, 3.0], [127.0, 0.0]]]), jnp.int8, "head").tolist()
        [2.0, 1.0]
    """
    x = jnp.asarray(x)
    dtype = checked_dtype("dtype", dtype, LARGEST)
    axes = {"tensor": tuple(range(x.ndim)), "head": (*range(x.ndim - 2), x.ndim - 1), "token_head": (x.ndim - 1,)}
    if scale_per not in axes or x.ndim < 2:
        raise ValueError(
            'x must be [..., kv_heads, head_dim] and scale_per "tensor", "head" or "token_head"; '
            f"got {x.shape=}, {scale_per=}."
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must be floating point, keys or values as they are before quantisation; got {x.dtype=!s}.")
    largest = jnp.abs(x).max(axis=axes[scale_per]).astype(jnp.float32)
    largest = jnp.minimum(largest, MOST)
    return jnp.maximum(largest / LARGEST[dtype], LEAST_SCALE)


def quantise(x: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """x `[..., kv_heads, head_dim]` divided by its scale, rounded to the nearest number of the dtype.

    The scale has the shape `x.shape[:-1]`, or one that broadcasts to it. Numbers outside the dtype's range saturate,
    including infinities. NaN stays NaN in float8 and becomes 0 in int8 (with one scale per token and head, the scale is
    then NaN).
    """
    largest = LARGEST[jnp.dtype(dtype)]
    scale = jnp.broadcast_to(scale, x.shape[:-1])
    steps = jnp.clip(x.astype(jnp.float32) / scale[..., None], -largest, largest)
    if dtype == jnp.int8:
        steps = jnp.round(jnp.where(jnp.isnan(steps), 0.0, steps))
    return steps.astype(dtype)


def widen_kv(cache: KVCache, dtype: DTypeLike = jnp.float32) -> KVCache:
    """Widens a quantised cache: `stored * scale`, as a cache without scales.

    It widens the whole cache. Use it for tests, for export and on the result of `gather_kv`, not in a decode step.

    Args:
        cache: one layer's cache, or a stack of layers. A cache without scales is only cast.
        dtype: dtype of the result.

    Returns:
        The widened cache.

    Bytes moved: reads the cache, and writes its numbers in `dtype`.

    Raises:
        ValueError: the cache's arrays do not match, or the dtype is invalid.

    Example:
        >>> import jax.numpy as jnp, jaxpaged
        >>> cache = jaxpaged.KVCache.create(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=8, dtype="int8")
        >>> cache = jaxpaged.ops.write_kv(cache, jnp.full((1, 1, 8), 3.0), jnp.ones((1, 1, 8)), jnp.array([2]))
        >>> float(jaxpaged.ops.widen_kv(cache).k[1, 0, 0, 0])
        3.0
    """
    check_cache(cache)
    dtype = checked_dtype("dtype", dtype)

    def widen(pool: jax.Array, scale: jax.Array | None) -> jax.Array:
        if scale is None:
            return pool.astype(dtype)
        if scale.ndim == 2:  # [layers, 1 or kv_heads] in a stack
            scale = scale[:, None, None]
        return (pool.astype(jnp.float32) * jnp.broadcast_to(scale, pool.shape[:-1])[..., None]).astype(dtype)

    v = None if cache.v is None else widen(cache.v, cache.v_scale)
    return KVCache(k=widen(cache.k, cache.k_scale), v=v, value_dim=cache.value_dim)
