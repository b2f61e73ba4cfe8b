"""Quantised keys and values: the scale that fits them, to the 8-bit dtype and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxpaged._cache.kv_cache import LARGEST, Granularity, KVCache, check_cache
from jaxpaged._dtypes import checked_dtype

# A vector of zeros, or of numbers that no one can tell from zero, must not divide by zero, and its scale must stay a
# normal float32, which GPUs do not flush to zero.
LEAST_SCALE = 1e-30
# An infinity counts as this, so that its scale times the dtype's largest number is finite again.
MOST = 3.4e38


def kv_scale(x: ArrayLike, dtype: DTypeLike, scale_per: Granularity) -> jax.Array:
    """The scale with which keys or values fill an 8-bit dtype.

        max |x| / (largest number of dtype),    over everything, over all but the heads, or over head_dim only

    For calibration: run some text through the model with a float32 or bfloat16 cache, get its keys and values with
    `gather_kv`, and give their scales to `KVCache.create`. Larger numbers are clipped. A margin (`1.2 * kv_scale(...)`)
    trades resolution for room: it costs a float8 dtype little, and int8 a sixth of its steps.

    Args:
        x: `[..., kv_heads, head_dim]`.
        dtype: float8_e4m3fn, float8_e5m2 or int8.
        scale_per: "tensor", "head" or "token_head".

    Returns:
        f32 `[]`, `[kv_heads]` or `[..., kv_heads]`; at least 1e-30. Infinities count as 3.4e38, NaN gives NaN.

    Raises:
        ValueError: another dtype or granularity, or numbers that are not floating point.

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
    """x `[..., kv_heads, head_dim]` over its scale (of `x.shape[:-1]`, or fewer axes), rounded to the nearest number.

    Saturates: a number beyond the dtype's largest one becomes that, infinities too. NaN stays NaN in float8; int8
    has none, and gets 0 (with a scale a token and head, the scale is NaN then).
    """
    largest = LARGEST[jnp.dtype(dtype)]
    scale = jnp.broadcast_to(scale, x.shape[:-1])
    steps = jnp.clip(x.astype(jnp.float32) / scale[..., None], -largest, largest)
    if dtype == jnp.int8:
        steps = jnp.round(jnp.where(jnp.isnan(steps), 0.0, steps))
    return steps.astype(dtype)


def widen_kv(cache: KVCache, dtype: DTypeLike = jnp.float32) -> KVCache:
    """The numbers that a cache represents, `stored * scale`, as a cache without scales. It widens the whole cache: use
    it for tests, export and the result of `gather_kv`, not in a decode step.

    Bytes moved: the bytes of the cache, and its numbers once more in `dtype`.

    Raises:
        ValueError: arrays of the cache that do not fit together, or no dtype.

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
        if scale.ndim == 2:  # [layers, 1 or kv_heads], of a stack
            scale = scale[:, None, None]
        return (pool.astype(jnp.float32) * jnp.broadcast_to(scale, pool.shape[:-1])[..., None]).astype(dtype)

    v = None if cache.v is None else widen(cache.v, cache.v_scale)
    return KVCache(k=widen(cache.k, cache.k_scale), v=v, value_dim=cache.value_dim)
