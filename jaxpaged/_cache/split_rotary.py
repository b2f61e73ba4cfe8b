"""The rotary numbers of an 8-bit latent cache, in two stored numbers each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._cache.kv_cache import LARGEST, KVCache, check_cache
from jaxpaged._cache.layers import CacheLayer, pools_of
from jaxpaged._cache.quantise import kv_scale, quantise
from jaxpaged._one_program import one_program

# The divisor of a rotary number, and the factor of its rest. The steps of int8 are equal: a rotary number may be 64
# times as large as the latent ones before it makes their steps coarser, and its rest, half a step at most, is one of
# 250 steps. float8 rounds to 1/16 or 1/8 of a number. A rest must not become the largest number of its token, which
# sets the scale. [cpu/latent_forms of benchmarks/results/]
_FACTORS = {
    jnp.dtype(jnp.int8): (64.0, 250.0),
    jnp.dtype(jnp.float8_e4m3fn): (1.0, 8.0),
    jnp.dtype(jnp.float8_e5m2): (1.0, 4.0),
}


def split_rotary(cache: KVCache | CacheLayer, q: ArrayLike, k: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Queries and keys of an 8-bit latent cache that stores each rotary number as two: rounded, and what is then left.

        k = [c, r]  ->  [c, r / d, g (r / d - stored(r / d))]
        q = [a, b]  ->  [a, d b, d b / g],    d and g depend on the cache's dtype

    Their products equal those of q and k, and the rotary part is stored with about twice the bits. The cache has
    `value_dim + 2 * rotary` numbers a token: 512 + 64 become 640, with the scale 644 bytes. Calibrate the scale
    of a head or tensor with keys that this function returned.

    Args:
        cache: where k will be written.
        q: absorbed queries `[..., heads, value_dim + rotary]`, rotated.
        k: latent vectors and keys `[..., 1, value_dim + rotary]`, rotated.

    Returns:
        q and k, each `[..., value_dim + 2 * rotary]`: k for `write_kv`, and q for `attend`.

    Raises:
        ValueError: a cache that is not latent or not of 8 bits, or of another width.

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
            f"the cache must be a latent one of 8 bits; got value_dim={pool.value_dim}, dtype={pool.k.dtype}. "
            "Others store rotary numbers with all their bits."
        )
    stored, values = pool.k.shape[-1], pool.value_dim
    if not q.shape[-1] == k.shape[-1] == (stored + values) / 2:
        raise ValueError(
            f"q and k must have the cache's {values} values and half as many rotary numbers as are stored behind them, "
            f"{stored - values}; got {q.shape=}, {k.shape=}."
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
    if scale is None or scale.ndim == 3:  # the one that `write_kv` will find
        scale = kv_scale(first, dtype, "token_head")
    stored = quantise(first, scale, dtype).astype(jnp.float32) * jnp.broadcast_to(scale, first.shape[:-1])[..., None]
    rest = (first.astype(jnp.float32) - stored)[..., start:] * gain
    return jnp.concatenate([first, rest.astype(k.dtype)], axis=-1)
