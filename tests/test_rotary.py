"""`rotate_and_write_kv`: against turns of complex numbers, and against `write_kv` by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, rotary_frequencies, rotate_and_write_kv, write_kv

FREQUENCIES = rotary_frequencies(8)
CACHES = {
    "float32": {},
    "bfloat16": dict(dtype="bfloat16"),
    "int8, token_head": dict(dtype="int8"),
    "float8_e4m3fn, head": dict(dtype="float8_e4m3fn", scale_per="head", k_scale=[0.01, 0.02], v_scale=[0.02, 0.01]),
}


def new_tokens(dtype=jnp.float32):
    """q, k, v, slots and positions of two sequences of three tokens; the last slot is padding."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 3, heads, 8)), dtype) for heads in (6, 2, 2))
    slots = jnp.asarray([[4, 5, 6], [9, 10, 16]], jnp.int32)
    return q, k, v, slots, jnp.asarray([[0, 1, 2], [1000, 1001, 131_071]], jnp.int32)


def turned(x, positions):
    """Dimensions i and i + 4 as a complex number, times exp(i p f)."""
    x = np.asarray(x, np.float64)
    angles = np.asarray(positions)[..., None, None] * np.asarray(FREQUENCIES)
    numbers = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)
    return np.concatenate([numbers.real, numbers.imag], axis=-1)


@pytest.mark.parametrize("jitted", [False, True])
def test_turns(jitted):
    function = jax.jit(rotate_and_write_kv, static_argnums=6) if jitted else rotate_and_write_kv
    q, k, v, slots, positions = new_tokens()
    cache, new_q = function(
        KVCache.create(num_blocks=4, block_size=4, num_kv_heads=2, head_dim=8), q, k, v, slots, positions, FREQUENCIES
    )
    # An angle of 131,071 is a float32, up to 2^-8 off: what that turns a number by.
    np.testing.assert_allclose(new_q, turned(q, positions), atol=2e-2)
    np.testing.assert_allclose(new_q[0], turned(q, positions)[0], atol=1e-6)
    flat = np.asarray(cache.k).reshape(16, 2, 8)
    np.testing.assert_allclose(flat[[4, 5, 6]], turned(k, positions)[0], atol=1e-6)
    np.testing.assert_array_equal(cache.v.reshape(16, 2, 8)[jnp.asarray([4, 5, 6, 9, 10])], v.reshape(6, 2, 8)[:5])
    assert not flat[[0, 1, 2, 3, 7, 8, 11, 12, 13, 14, 15]].any()


@pytest.mark.parametrize("name", CACHES)
def test_writes_what_write_kv_writes(name):
    empty = KVCache.create(num_blocks=4, block_size=4, num_kv_heads=2, head_dim=8, **CACHES[name])
    q, k, v, slots, positions = new_tokens(jnp.bfloat16)
    cache, new_q = rotate_and_write_kv(empty, q, k, v, slots, positions, FREQUENCIES)
    _, new_k = rotate_and_write_kv(empty, k, k, v, slots, positions, FREQUENCIES)
    assert new_q.dtype == new_k.dtype == jnp.bfloat16
    expected = write_kv(empty, new_k, v, slots)
    for found, wanted in zip(jax.tree.leaves(cache), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))
    assert np.asarray(cache.k, np.float32).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=jnp.zeros((2, 3, 6, 16))), r"q and k must differ in their heads alone; got q.shape=\(2, 3, 6, 16\)"),
        (dict(q=jnp.zeros((3, 6, 8))), r"q and k must differ in their heads alone"),
        (dict(positions=jnp.zeros(3, jnp.int32)), r"positions must be int32 \[2, 3\], one a token; got int32 \[3\]"),
        (dict(positions=jnp.zeros((2, 3))), r"positions must be int32 \[2, 3\], one a token; got float32"),
        (dict(frequencies=(1.0,)), r"frequencies must be head_dim // 2 numbers; got 1 for head_dim=8"),
        (dict(slots=jnp.zeros(3, jnp.int32)), r"k and v must be \[..., kv_heads, head_dim\] with slots"),
    ],
)
def test_errors(change, message):
    names = ("q", "k", "v", "slots", "positions", "frequencies")
    arguments = dict(zip(names, (*new_tokens(), FREQUENCIES), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        rotate_and_write_kv(KVCache.create(num_blocks=4, block_size=4, num_kv_heads=2, head_dim=8), **arguments)
