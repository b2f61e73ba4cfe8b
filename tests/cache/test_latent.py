"""Latent caches, one array whose first numbers are the values, and values that differ in width from keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged
from jaxpaged import KVCache
from jaxpaged.ops import rotate_and_write_kv, write_kv
from tests.transfers import block_leaves, same_bits

SIZES = dict(num_kv_heads=1, head_dim=12, value_dim=8)
KINDS = pytest.mark.parametrize("is_latent", [True, False])
DTYPES = pytest.mark.parametrize("dtype", ["float32", "int8"])


def filled(is_latent: bool, dtype: str = "float32", num_layers: int | None = None) -> KVCache:
    """Blocks 1 and 2 of 4 hold tokens."""
    cache = KVCache.create(num_blocks=4, block_size=2, is_latent=is_latent, dtype=dtype, num_layers=num_layers, **SIZES)
    k, v = tokens()
    if num_layers is None:
        return write_kv(cache, k, None if is_latent else v, jnp.arange(2, 6))
    for i in range(num_layers):
        cache = write_kv(jaxpaged.CacheLayer(cache, i), k + i, None if is_latent else v, jnp.arange(2, 6)).stack
    return cache


def tokens() -> tuple[jax.Array, jax.Array]:
    k = jax.random.normal(jax.random.key(0), (4, 1, 12))
    return k, k[..., :8] + 1


@KINDS
@DTYPES
def test_tokens_are_where_they_were_written(is_latent, dtype):
    cache = jaxpaged.ops.widen_kv(filled(is_latent, dtype))
    k, v = tokens()
    tolerance = 0.02 if dtype == "int8" else 0
    np.testing.assert_allclose(cache.k[1:3].reshape(4, 1, 12), k, atol=tolerance)
    assert not cache.k[0].any()
    if is_latent:
        assert cache.v is None
        assert cache.value_dim == 8
    else:
        np.testing.assert_allclose(cache.v[1:3].reshape(4, 1, 8), v, atol=2 * tolerance)


@KINDS
@DTYPES
@pytest.mark.parametrize("num_layers", [None, 2])
def test_blocks_move_with_every_bit(is_latent, dtype, num_layers):
    cache = filled(is_latent, dtype, num_layers)
    ids, others = jnp.asarray([1, 2]), jnp.asarray([2, 3])
    copied = jax.jit(jaxpaged.ops.copy_blocks)(cache, ids, others)
    tables, lengths = jnp.asarray([[2, 3]]), jnp.asarray([4])
    contiguous = jaxpaged.ops.gather_kv(copied, tables, lengths)
    for pool, tokens in zip(block_leaves(cache), block_leaves(contiguous), strict=True):
        assert (tokens.reshape(len(pool), 2, -1) == pool[:, [1, 2]]).all()
    assert same_bits(jaxpaged.ops.scatter_kv(cache, contiguous, tables, lengths), copied)


def test_rotation_begins_after_the_values():
    k, _ = tokens()
    q, positions = jnp.tile(k, (1, 3, 1)), jnp.arange(4)
    frequencies = jaxpaged.rotary_frequencies(4)
    cache, turned = rotate_and_write_kv(filled(True), q, k, None, jnp.arange(2, 6), positions, frequencies)
    assert (turned[..., :8] == q[..., :8]).all()
    plain, expected = rotate_and_write_kv(
        KVCache.create(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=4, dtype="float32"),
        *(x[..., 8:] for x in (q, k, k)),
        jnp.arange(2, 6),
        positions,
        frequencies,
    )
    assert (turned[..., 8:] == expected).all()
    assert (cache.k[..., 8:] == plain.k).all()
    assert (cache.k[1:3].reshape(4, 1, 12)[..., :8] == k[..., :8]).all()
    with pytest.raises(ValueError, match="pair of the 4 dimensions; got 3"):
        rotate_and_write_kv(cache, q, k, None, jnp.arange(2, 6), positions, (1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("dtype", "scale_per", "gain"),
    [("int8", "token_head", 12), ("float8_e4m3fn", "tensor", 8), ("float8_e5m2", "head", 4)],
)
@pytest.mark.parametrize("is_layer", [False, True])
def test_rotary_numbers_in_two_parts(dtype, scale_per, gain, is_layer):
    """The error of products with queries is `gain` times smaller, and latent numbers have no larger error."""
    k, slots = tokens()[0] * jnp.asarray([1.0] * 8 + [9.0] * 4)[None, None], jnp.arange(2, 6)
    q = jax.random.normal(jax.random.key(1), (4, 3, 12)).at[..., :8].set(0)
    kind = dict(num_kv_heads=1, value_dim=8, is_latent=True, dtype=dtype, scale_per=scale_per)
    if scale_per != "token_head":
        kind["k_scale"] = 0.1

    def errors(width):
        """The errors of products of rotary numbers, and of latent numbers."""
        cache = KVCache.create(num_blocks=4, block_size=2, head_dim=width, num_layers=2 if is_layer else None, **kind)
        cache = jaxpaged.CacheLayer(cache, 1) if is_layer else cache
        split = jaxpaged.ops.split_rotary(cache, q, k) if width == 16 else (q, k)
        cache = write_kv(cache, split[1], None, slots)
        stored = jaxpaged.ops.widen_kv(cache.pool if is_layer else cache).k.reshape(-1, 1, width)[-6:-2]
        products = (jnp.einsum("thd,txd->th", each, keys) for each, keys in ((q, k), (split[0], stored)))
        return jnp.abs(jnp.subtract(*products)).max(), jnp.abs(stored - split[1])[..., :8].max()

    (of_one, latent), (of_two, latent_of_two) = errors(12), errors(16)
    assert 0 < of_two < of_one / gain
    assert 0 < latent_of_two <= latent


def test_errors_of_rotary_numbers_in_two_parts():
    k, _ = tokens()
    for cache, message in (
        (filled(False, "int8"), "must be latent and 8-bit; got value_dim=None"),
        (filled(True), "dtype=float32"),
        (filled(True, "int8"), "8 latent numbers and half of the cache's 4 rotary numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            jaxpaged.ops.split_rotary(cache, k, k)
