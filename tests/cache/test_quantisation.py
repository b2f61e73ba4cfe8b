"""Quantised caches: stored numbers, their error, and that attention reads exactly the stored numbers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import CacheLayer, KVCache
from jaxpaged.ops import kv_scale, widen_kv, write_kv
from tests.cases import assert_within_budget, jitted_attention, make_case, within_budget
from tests.compiled import HEAD_DIM, KV_HEADS, NUM_BLOCKS, SEQS, cache_sized_copies, decode_step, inputs

# Half the distance between two neighbours: relative to the number, 1 / (1 + 2^(mantissa bits + 1)), and in steps of the
# scale for subnormal numbers and for int8.
ROUNDING = {jnp.float8_e4m3fn: (1 / 17, 2.0**-10), jnp.float8_e5m2: (1 / 9, 2.0**-17), jnp.int8: (0.0, 0.5)}
LARGEST = {jnp.float8_e4m3fn: 448.0, jnp.float8_e5m2: 57344.0, jnp.int8: 127.0}
DTYPES = pytest.mark.parametrize("dtype", ROUNDING, ids=lambda dtype: jnp.dtype(dtype).name)
EVERY_SCALE = pytest.mark.parametrize("scale", ["tensor", "head", "token_head"])

pool_of = jax.jit(lambda layer: layer.pool)


def drawn(shape, seed=0):
    """Numbers of many sizes. Some rows are a thousand times as large as others."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-2, 1, (*shape[:-1], 1))
    return jnp.asarray(rng.normal(size=shape) * sizes, jnp.float32)


def calibrated(k, v, dtype, scale):
    """The scales that `KVCache.create` needs for these numbers."""
    if scale in (None, "token_head"):
        return {}
    return {"k_scale": kv_scale(k, dtype, scale), "v_scale": kv_scale(v, dtype, scale)}


def created(k, v, dtype, scale, **changes):
    """An empty cache, calibrated on k and v if its dtype needs it."""
    sizes = dict(num_blocks=8, block_size=4, num_kv_heads=k.shape[-2], head_dim=k.shape[-1])
    return KVCache.create(**sizes | dict(dtype=dtype, scale_per=scale) | calibrated(k, v, dtype, scale) | changes)


@DTYPES
@EVERY_SCALE
@pytest.mark.parametrize("given", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_round_trip_error_follows_the_mantissa(dtype, scale, given):
    k, v = drawn((12, 3, 64)).astype(given), drawn((12, 3, 64), 1).astype(given)
    slots = jnp.asarray(np.random.default_rng(2).permutation(32)[:12], jnp.int32)
    cache = write_kv(created(k, v, dtype, scale), k, v, slots)
    relative, absolute = ROUNDING[dtype]
    wide = widen_kv(cache)
    for x, stored, steps in ((k, wide.k, cache.k_scale), (v, wide.v, cache.v_scale)):
        x, stored = np.asarray(x, np.float32), np.asarray(stored).reshape(32, 3, 64)[np.asarray(slots)]
        steps = np.asarray(steps).reshape(32, 3)[np.asarray(slots)] if scale == "token_head" else np.asarray(steps)
        bound = np.maximum(relative * np.abs(x), absolute * np.broadcast_to(steps, x.shape[:-1])[..., None])
        assert (np.abs(stored - x) <= bound * (1 + 1e-5)).all()  # the scale itself is rounded to float32
        # The bound is tight: some number comes near it.
        assert (np.abs(stored - x) > 0.9 * bound).any()


@DTYPES
@EVERY_SCALE
@pytest.mark.parametrize("value", [3.4e38, np.inf, -np.inf, 1e5])
def test_writing_saturates(dtype, scale, value):
    calm = jnp.ones((1, 1, 8))
    k = calm.at[0, 0, 0].set(value)
    cache = write_kv(created(calm, calm, dtype, scale), k, k, jnp.asarray([1], jnp.int32))
    stored = np.asarray(widen_kv(cache).k)[0, 1, 0]
    assert np.isfinite(stored).all()
    assert np.sign(stored[0]) == np.sign(value)
    assert abs(float(cache.k[0, 1, 0, 0].astype(jnp.float32))) == LARGEST[dtype]
    if scale != "token_head":
        np.testing.assert_allclose(stored[1:], 1.0, rtol=1e-6)  # other heads of the token do not change


@DTYPES
def test_zeros_and_the_smallest_numbers_are_stored_as_numbers(dtype):
    k = jnp.asarray([0.0, 1e-38, 1e-45], jnp.float32)[:, None, None] * jnp.ones((3, 1, 8))
    cache = write_kv(created(k, k, dtype, "token_head"), k, k, jnp.arange(3, dtype=jnp.int32))
    assert (np.asarray(widen_kv(cache).k) <= 1e-38).all()
    assert (np.asarray(cache.k_scale)[0, :3] >= 1e-30).all()


@DTYPES
@EVERY_SCALE
def test_nan_is_kept_if_the_dtype_has_it(dtype, scale):
    calm = jnp.ones((2, 2, 8))
    k = calm.at[0, 0, 3].set(jnp.nan)
    wide = widen_kv(write_kv(created(calm, calm, dtype, scale), k, k, jnp.asarray([1, 2], jnp.int32)))
    if dtype == jnp.int8 and scale != "token_head":
        assert wide.k[0, 1, 0, 3] == 0  # int8 has none
    else:
        assert jnp.isnan(wide.k[0, 1, 0, 3])
    assert jnp.isfinite(wide.k[0, 1, 1]).all()
    assert jnp.isfinite(wide.k[0, 2]).all()


def test_calibration_as_literal_numbers():
    x = jnp.asarray([[[-254.0, 3.0], [127.0, 0.0]], [[12.7, 1.0], [508.0, 508.0]]])
    assert kv_scale(x, jnp.int8, "tensor").tolist() == 4.0
    assert kv_scale(x, jnp.int8, "head").tolist() == [2.0, 4.0]
    np.testing.assert_allclose(kv_scale(x, jnp.int8, "token_head"), [[2.0, 1.0], [0.1, 4.0]], rtol=1e-6)
    assert kv_scale(x * 448, jnp.float8_e4m3fn, "tensor").tolist() == 508.0
    assert kv_scale(jnp.full((1, 8), jnp.inf), jnp.int8, "tensor") < jnp.inf


@DTYPES
@EVERY_SCALE
def test_padding_writes_neither_numbers_nor_scales(dtype, scale):
    k = drawn((4, 2, 8))
    before = created(k, k, dtype, scale)
    before = write_kv(before, 0.5 * k, 0.5 * k, jnp.arange(4, dtype=jnp.int32))
    after = write_kv(before, k, k, jnp.asarray([-1, 32, 2**31 - 1, -(2**31)], jnp.int32))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


@pytest.mark.parametrize(
    ("dtype", "scale"), [(jnp.float32, None), *itertools.product(ROUNDING, ["tensor", "head", "token_head"])]
)
def test_a_layer_of_a_stack_equals_a_single_cache(dtype, scale):
    k, v = drawn((3, 5, 2, 8)), drawn((3, 5, 2, 8), 1)
    # No vmap: XLA may round the division of a batch differently, by one unit in the last place.
    scales = jax.tree.map(lambda *x: jnp.stack(x), *(calibrated(k[i], v[i], dtype, scale) for i in range(3)))
    slots = jnp.asarray([3, 9, 31, -1, 4], jnp.int32)
    stack = created(k, v, dtype, scale, num_layers=3, **scales)
    alone = [write_kv(created(k[i], v[i], dtype, scale), k[i], v[i], slots) for i in range(3)]
    for i in range(3):
        stack = write_kv(CacheLayer(stack, i), k[i], v[i], slots).stack
    q, tables, lengths = drawn((2, 6, 8)), jnp.asarray([[2, 1], [7, 0]], jnp.int32), jnp.asarray([6, 4], jnp.int32)
    for i in range(3):
        assert (stack.k[i] == alone[i].k).all()
        assert (np.asarray(widen_kv(stack).v[i]) == np.asarray(widen_kv(alone[i]).v)).all()
        layer = CacheLayer(stack, jnp.int32(i))
        out, expected = (
            jitted_attention(q, pool.k, pool.v, ids, lengths, k_scale=pool.k_scale, v_scale=pool.v_scale)
            for pool, ids in ((pool_of(layer), layer.block_tables(tables)), (alone[i], tables))
        )
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@EVERY_SCALE
def test_attention_reads_the_numbers_of_a_widened_cache(scale):
    case = make_case(cache_dtype=jnp.int8, scale_shape=scale)
    out, scales = jitted_attention(*case.arrays, **case.options), case.options
    wide = widen_kv(KVCache(case.k_cache, case.v_cache, **scales))
    assert_within_budget(case.replace(k_cache=wide.k, v_cache=wide.v, options={}), out)
    # Each of these mistakes changes the result.
    mistakes = [dict(v_scale=jnp.float32(1.0)), dict(k_scale=2 * scales["k_scale"])]
    if scale == "token_head":
        mistakes += [dict(k_scale=scales["v_scale"]), dict(k_scale=jnp.roll(scales["k_scale"], 1, axis=1))]
    for mistake in mistakes:
        good = within_budget(case, jitted_attention(*case.arrays, **scales | mistake))
        assert not good[np.asarray(case.lengths) > 1].any(axis=-1).all()


@DTYPES
@EVERY_SCALE
def test_a_donated_decode_step_widens_tiles_not_the_cache(dtype, scale):
    k = jnp.ones((SEQS, KV_HEADS, HEAD_DIM))
    # The cache is large compared to a tile.
    arguments = inputs(4 * NUM_BLOCKS, dtype=dtype, scale_per=scale, **calibrated(k, k, dtype, scale))
    compiled, cache = jax.jit(decode_step, donate_argnums=(0, 1)).lower(*arguments).compile(), arguments[0]
    assert cache_sized_copies(compiled.as_text()) == []
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * cache.k.nbytes
    # A wider copy of the pool would need twice the pool's bytes. A CPU writes float8 in a pass over the pool, where
    # XLA may allocate its bytes once (docs/cache.md).
    allowed = 0.5 if dtype == jnp.int8 else 1.5
    assert compiled.memory_analysis().temp_size_in_bytes < allowed * cache.k.nbytes


@pytest.mark.parametrize("num_layers", [None, 3])
@EVERY_SCALE
def test_scales_of_create(scale, num_layers):
    layers, shapes = ((), {"tensor": ()}) if num_layers is None else ((3,), {"tensor": (3, 1)})
    shapes |= {"head": (*layers, 2), "token_head": (*layers, 8, 4, 2)}
    k = jnp.ones((2, 8))
    cache = created(k, k, "float8_e4m3fn", scale, num_layers=num_layers, k_scale=None, v_scale=None)
    assert cache.k_scale.shape == cache.v_scale.shape == shapes[scale]
    assert cache.k_scale.dtype == jnp.float32
    default = created(k, k, "int8", None, num_layers=num_layers)
    assert default.k_scale.shape == shapes["token_head"]


def test_kv_scale_errors():
    with pytest.raises(ValueError, match=r"dtype must be one of float8_e4m3fn, .* got dtype=bfloat16"):
        kv_scale(jnp.ones((2, 8)), jnp.bfloat16, "head")
    with pytest.raises(ValueError, match=r"got x.shape=\(2, 8\), scale_per='token'"):
        kv_scale(jnp.ones((2, 8)), jnp.int8, "token")
    for wrong in (jnp.complex64, jnp.int8):
        with pytest.raises(ValueError, match=r"x must be floating point.*; got x.dtype="):
            kv_scale(jnp.ones((2, 8), wrong), jnp.int8, "tensor")
