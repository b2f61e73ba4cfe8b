"""`rotate_and_write_kv` against rotations of complex numbers, and against `write_kv` alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, rotary_attention_factor, rotary_frequencies
from jaxpaged.ops import rotate_and_write_kv, write_kv

FREQUENCIES = rotary_frequencies(8)
CACHES = {
    "float32": dict(dtype="float32"),
    "bfloat16": dict(dtype="bfloat16"),
    "int8, token_head": dict(dtype="int8"),
    "float8_e4m3fn, head": dict(dtype="float8_e4m3fn", scale_per="head", k_scale=[0.01, 0.02], v_scale=[0.02, 0.01]),
}


def create(**changes):
    return KVCache.create(**dict(num_blocks=4, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32") | changes)


def new_tokens(dtype=jnp.float32):
    """q, k, v, slots and positions of two sequences of three tokens; the last slot is padding."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 3, heads, 8)), dtype) for heads in (6, 2, 2))
    slots = jnp.asarray([[4, 5, 6], [9, 10, 16]], jnp.int32)
    return q, k, v, slots, jnp.asarray([[0, 1, 2], [1000, 1001, 131_071]], jnp.int32)


def rotated(x, positions, pairs):
    """Each pair of dimensions as a complex number, times exp(i p f)."""
    rotated = np.array(x, np.float64)
    for (i, j), frequency in zip(pairs, rotary_frequencies(2 * len(pairs)), strict=True):
        number = (rotated[..., i] + 1j * rotated[..., j]) * np.exp(1j * np.asarray(positions)[..., None] * frequency)
        rotated[..., i], rotated[..., j] = number.real, number.imag
    return rotated


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("num_pairs", [2, 4])
def test_rotation(num_pairs, interleaved, traced):
    frequencies = rotary_frequencies(2 * num_pairs)
    function, arguments = functools.partial(rotate_and_write_kv, interleaved=interleaved), (create(), *new_tokens())
    if traced:
        function, frequencies = jax.jit(function), jnp.asarray(frequencies, jnp.float32)
    cache, new_q = function(*arguments, frequencies)
    _, q, k, v, _, positions = arguments
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + num_pairs) for i in range(num_pairs)]
    expected_q, expected_k = (rotated(x, positions, pairs) for x in (q, k))
    # An angle of 131,071 in float32 is up to 2^-8 off, and so is the rotated number.
    np.testing.assert_allclose(new_q, expected_q, atol=2e-2)
    np.testing.assert_allclose(new_q[0], expected_q[0], atol=1e-6)
    assert not np.allclose(new_q[0], q[0])
    flat = np.asarray(cache.k).reshape(16, 2, 8)
    np.testing.assert_allclose(flat[[4, 5, 6]], expected_k[0], atol=1e-6)
    np.testing.assert_array_equal(cache.v.reshape(16, 2, 8)[jnp.asarray([4, 5, 6, 9, 10])], v.reshape(6, 2, 8)[:5])
    assert not flat[[0, 1, 2, 3, 7, 8, 11, 12, 13, 14, 15]].any()


@pytest.mark.parametrize("name", CACHES)
def test_writes_the_same_as_write_kv(name):
    empty = create(**CACHES[name])
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
        (dict(q=jnp.zeros((2, 3, 6, 16))), r"only in the number of heads; got q.shape=\(2, 3, 6, 16\)"),
        (dict(q=jnp.zeros((3, 6, 8))), r"q and k may differ only in the number of heads"),
        (dict(q=jnp.zeros((2, 3, 6, 8), jnp.int8)), r"q must be floating point; got q.dtype=int8"),
        (dict(q=jnp.zeros((2, 3, 6, 8), jnp.complex64)), r"q must be floating point; got q.dtype=complex64"),
        (dict(positions=jnp.zeros(3, jnp.int32)), r"positions must be int32 \[2, 3\], one a token; got int32 \[3\]"),
        (dict(positions=jnp.zeros((2, 3))), r"positions must be int32 \[2, 3\], one a token; got float32"),
        (dict(frequencies=(1.0,) * 5), r"frequencies must hold 1 to 4 numbers, .* the 8 dimensions; got 5. Make them"),
        (dict(frequencies=None, interleaved=True), r"rotates nothing without frequencies; got frequencies=None. Pass"),
        (dict(slots=jnp.zeros(3, jnp.int32)), r"[kv] must be \[..., kv_heads, head_dim\] with slots"),
    ],
)
def test_errors(change, message):
    names = ("q", "k", "v", "slots", "positions", "frequencies")
    arguments = dict(zip(names, (*new_tokens(), FREQUENCIES), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        rotate_and_write_kv(create(), **arguments)


LLAMA = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32_768)  # Qwen2.5


GPT_OSS = dict(rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096)
DYNAMIC = dict(rope_type="dynamic", factor=2.0, original_max_position_embeddings=4096)
LONGROPE = dict(
    rope_type="longrope",
    factor=32.0,
    long_factor=[1.0 + 0.5 * i for i in range(8)],
    short_factor=[1.0 + 0.125 * i for i in range(8)],
    original_max_position_embeddings=4096,
)


def test_fields_of_the_scaling():
    assert rotary_frequencies(4, scaling={"type": "linear", "factor": 2}) == (0.5, 0.005)
    assert rotary_frequencies(4, scaling={}) == rotary_frequencies(4)
    fields = dict(rope_type="default", partial_rotary_factor=0.25, rope_theta=500.0)
    assert rotary_frequencies(16, scaling=fields) == rotary_frequencies(4, 500.0)
    assert rotary_frequencies(16, 500, fields) == rotary_frequencies(4, 500.0)
    yarn = rotary_frequencies(256, scaling=YARN | dict(partial_rotary_factor=0.5, rope_theta=1e6))
    assert yarn == rotary_frequencies(128, 1e6, YARN)


def test_the_attention_factor():
    assert rotary_attention_factor(None) == rotary_attention_factor(LLAMA) == 1.0
    np.testing.assert_allclose(rotary_attention_factor(YARN), 0.1 * np.log(4.0) + 1.0)
    assert rotary_attention_factor(YARN | dict(attention_factor=0.7)) == 0.7
    np.testing.assert_allclose(rotary_attention_factor(GPT_OSS), 1.3465735902799727)  # both values from transformers
    np.testing.assert_allclose(rotary_attention_factor(LONGROPE), 1.1902380714238083)
    factor = rotary_attention_factor(YARN | dict(factor=40.0, mscale=0.707, mscale_all_dim=1.0))  # DeepSeek's fields
    np.testing.assert_allclose(factor, (0.0707 * np.log(40.0) + 1) / (0.1 * np.log(40.0) + 1))


# Values of transformers 5.23 in float32, from tools/transformers_values.py
TRANSFORMERS = [
    (
        LLAMA,
        500_000.0,
        None,
        [1, 0.1939228, 0.03760603, 0.007292665, 0.000524846, 3.428102e-5, 6.64787e-6, 1.289173e-6],
    ),
    (YARN, 1e6, None, [1, 0.1778279, 0.03162278, 0.00421756, 0.0005, 4.445699e-5, 7.905694e-6, 1.405853e-6]),
    (
        GPT_OSS,
        150_000.0,
        None,
        [1, 0.225418, 0.05081327, 0.006794959, 4.564839e-4, 1.818834e-5, 4.099978e-6, 9.24209e-7],
    ),
    (DYNAMIC, 1e4, 100, [1, 0.3162278, 0.1, 0.03162278, 0.01, 0.003162278, 0.001, 3.162278e-4]),
    (DYNAMIC, 1e4, 4096, [1, 0.3162278, 0.1, 0.03162278, 0.01, 0.003162278, 0.001, 3.162278e-4]),
    (DYNAMIC, 1e4, 16_384, [1, 0.2394814, 0.05735132, 0.01373457, 0.003289174, 7.876959e-4, 1.886385e-4, 4.517539e-5]),
    (LONGROPE, 1e4, 4096, [1, 0.2810914, 0.08, 0.02299838, 0.006666667, 0.001946017, 5.714286e-4, 1.686548e-4]),
    (LONGROPE, 1e4, 4097, [1, 0.2108185, 0.05, 0.01264911, 0.003333333, 9.035079e-4, 2.5e-4, 7.027284e-5]),
]


@pytest.mark.parametrize(("scaling", "theta", "max_length", "expected"), TRANSFORMERS)
def test_frequencies_of_transformers(scaling, theta, max_length, expected):
    found = rotary_frequencies(16, theta, scaling, max_length=max_length)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (dict(rope_type="axial"), "one of default, linear, llama3, yarn, dynamic, longrope; got 'axial'"),
        (DYNAMIC, "type 'dynamic' depends on the length of sequences; pass max_length"),
        (LONGROPE, "type 'longrope' depends on the length of sequences; pass max_length"),
        (dict(type="linear"), "needs factor, a number above 0; got None"),
        (YARN | dict(factor=-1.0), "needs factor, a number above 0; got -1.0"),
        (LLAMA | dict(original_max_position_embeddings="8192"), "needs original_max_position_embeddings.*'8192'"),
        (
            dict(rope_theta=500.0),
            "must be rope_theta of the rotary scaling, or None; got theta=10000.0 and rope_theta=500",
        ),
        (dict(partial_rotary_factor=1.5), "up to head_dim; got head_dim=64 and partial_rotary_factor=1.5"),
        (dict(partial_rotary_factor=0.05), "an even number of dimensions"),
        (
            dict(full_attention={}, sliding_attention={}),
            "of one type of layers: full_attention or sliding",
        ),
        (LLAMA | dict(low_freq_factor=4.0), "low_freq_factor must be below high_freq_factor; got 4.0 and 4.0"),
    ],
)
def test_unknown_scalings_are_refused(scaling, message):
    with pytest.raises(ValueError, match=message):
        rotary_frequencies(64, 10_000.0, scaling)


def test_no_rotation():
    q, k, v, slots, positions = new_tokens()
    empty = create()
    cache, new_q = rotate_and_write_kv(empty, q, k, v, slots, positions, None)
    assert (new_q == q).all()
    assert (cache.k == write_kv(empty, k, v, slots).k).all()
