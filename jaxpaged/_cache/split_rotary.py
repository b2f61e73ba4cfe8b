"""Stores each rotary number of an 8-bit latent cache as two numbers, for more precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._cache.kv_cache import LARGEST, KVCache, check_cache
from jaxpaged._cache.layers import CacheLayer, pools_of
from jaxpaged._cache.quantise import kv_scale, quantise
from jaxpaged._one_program import one_program

# The divisor d of a rotary number and the factor g of its rounding error. In int8 all steps are equal. A divisor of 64
# keeps rotary numbers up to 64 times as large as the latent numbers from making the steps coarser. The rounding error
# is at most half a step, and times 250 it fills the range. float8 rounds to 1/16 or 1/8 of a number. The stored error
# must not become the largest number of its token, which sets the scale. [cpu/latent_forms of benchmarks/results/]
_FACTORS = {
    jnp.dtype(jnp.int8): (64.0, 250.0),
    jnp.dtype(jnp.float8_e4m3fn): (1.0, 8.0),
    jnp.dtype(jnp.float8_e5m2): (1.0, 4.0),
}


def split_rotary(cache: KVCache | CacheLayer, q: ArrayLike, k: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Splits the rotary numbers of queries and keys in two, for an 8-bit latent cache with more precision.

        k = [c, r]  ->  [c, r / d, g (r / d - stored(r / d))]
        q = [a, b]  ->  [a, d b, d b / g],    d and g depend on the cache's dtype

    The cache stores each rotary number rounded, together with its rounding error, which gives about twice the bits. The
    products of the results equal those of q and k. The cache has `value_dim + 2 * rotary` numbers per token: 512 + 64
    numbers become 640, or 644 bytes with the scale. If the scale is per head or tensor, calibrate it with keys that
    this function returned.

    Args:
        cache: the cache to which k will be written.
        q: absorbed queries `[..., heads, value_dim + rotary]`, already rotated.
        k: latent vectors and rotary keys `[..., 1, value_dim + rotary]`, already rotated.

    Returns:
        q `[..., heads, value_dim + 2 * rotary]` for `attend`, and k `[..., 1, value_dim + 2 * rotary]` for `write_kv`.

    Raises:
        ValueError: the cache is not latent or not 8-bit, or its width does not match q and k.

    Example:
        >>> import jax.numpy as jnp, jaxpaged
        >>> sizes = dict(num_kv_heads=1, head_dim=640, value_dim=512, is_latent=True)
        >>> cache = jaxpaged.KVCache.create(num_blocks=4, block_size=64, dtype="int8", **sizes)
        >>> q, k = jaxpaged.ops.split_rotary(cache, jnp.ones((1, 16, 576)), jnp.ones((1, 1, 576)))
        >>> cache = jaxpaged.ops.write_kv(cache, k, None, jnp.array([64]))
        >>> q.shape, k.shape
        ((1, 16, 640), (1, 1, 640))
    """
    q, k = jnp.asarray(q), jnp.asarray(k)
    pool = pools_of(cache)
    check_cache(pool)
    if pool.value_dim is None or pool.k.dtype not in LARGEST:
        raise ValueError(
            f"the cache must be latent and 8-bit; got value_dim={pool.value_dim}, dtype={pool.k.dtype}. "
            "Other caches store rotary numbers at full precision, and need no split_rotary."
        )
    stored, values = pool.k.shape[-1], pool.value_dim
    if not q.shape[-1] == k.shape[-1] == (stored + values) / 2:
        raise ValueError(
            f"q and k must have {values} latent numbers and half of the cache's {stored - values} rotary numbers; got "
            f"{q.shape=}, {k.shape=}."
        )
    return split_query(pool, q), split_key(cache, k)


def split_query(pool: KVCache, q: jax.Array) -> jax.Array:
    latent, rotary = jnp.split(q, [pool.value_dim or 0], axis=-1)
    divisor, gain = (jnp.asarray(factor, q.dtype) for factor in _FACTORS[pool.k.dtype])
    rotary = rotary * divisor
    return jnp.concatenate([latent, rotary, rotary / gain], axis=-1)


@one_program()
def split_key(cache: KVCache | CacheLayer, k: jax.Array) -> jax.Array:
    pool = cache.pool if isinstance(cache, CacheLayer) else cache
    dtype, start = pool.k.dtype, pool.value_dim or 0
    divisor, gain = _FACTORS[dtype]
    latent, rotary = jnp.split(k, [start], axis=-1)
    first = jnp.concatenate([latent, rotary / jnp.asarray(divisor, k.dtype)], axis=-1)
    scale = pool.k_scale
    if scale is None or scale.ndim == 3:  # the scale that `write_kv` will compute
        scale = kv_scale(first, dtype, "token_head")
    stored = quantise(first, scale, dtype).astype(jnp.float32) * jnp.broadcast_to(scale, first.shape[:-1])[..., None]
    rest = (first.astype(jnp.float32) - stored)[..., start:] * gain
    return jnp.concatenate([first, rest.astype(k.dtype)], axis=-1)
