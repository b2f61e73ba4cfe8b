"""Quantised caches: what writing stores, how far it is from what was given, and that attention sees nothing else."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import BlockAllocator, CacheLayer, KVCache, paged_attention
from jaxpaged.ops import kv_scale, widen_kv, write_kv
from tests.cases import OPTIONS, Case, assert_lse, assert_within_budget, jitted_attention, within_budget
from tests.compiled import (
    BLOCK_SIZE,
    HEAD_DIM,
    KV_HEADS,
    MAX_BLOCKS,
    NUM_BLOCKS,
    SEQS,
    cache_sized_copies,
)

# Half the distance between two neighbours: relative to the number, 1 / (1 + 2^(mantissa bits + 1)), and, in steps of
# the scale, where numbers are too small for that (subnormal) or the steps are even (int8).
ROUNDING = {jnp.float8_e4m3fn: (1 / 17, 2.0**-10), jnp.float8_e5m2: (1 / 9, 2.0**-17), jnp.int8: (0.0, 0.5)}
LARGEST = {jnp.float8_e4m3fn: 448.0, jnp.float8_e5m2: 57344.0, jnp.int8: 127.0}
GRANULARITIES = ("tensor", "head", "token_head")
DTYPES = pytest.mark.parametrize("dtype", ROUNDING, ids=lambda dtype: jnp.dtype(dtype).name)
EVERY_SCALE = pytest.mark.parametrize("scale", GRANULARITIES)

pool_of = jax.jit(lambda layer: layer.pool)


def drawn(shape, seed=0):
    """Numbers of many sizes, some rows a thousand times as large as others."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-2, 1, (*shape[:-1], 1))
    return jnp.asarray(rng.normal(size=shape) * sizes, jnp.float32)


def created(k, v, dtype, scale, *, num_blocks=8, block_size=4, **changes):
    """An empty cache, calibrated on k and v where it has to be."""
    given = {}
    if scale != "token_head":
        given = {"k_scale": kv_scale(k, dtype, scale), "v_scale": kv_scale(v, dtype, scale)}
    sizes = dict(num_blocks=num_blocks, block_size=block_size, num_kv_heads=k.shape[-2], head_dim=k.shape[-1])
    return KVCache.create(**sizes, dtype=dtype, scale_per=scale, **given | changes)


@DTYPES
@EVERY_SCALE
@pytest.mark.parametrize("given", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_round_trip_error_is_what_the_mantissa_gives(dtype, scale, given):
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
        # The bound is none too wide: some number comes near it.
        assert (np.abs(stored - x) > 0.9 * bound).any()


@DTYPES
def test_a_token_fills_the_dtype_whatever_its_size(dtype):
    k = jnp.asarray([1e-20, 1e-3, 1.0, 1e3, 1e20], jnp.float32)[:, None, None] * drawn((1, 2, 64))
    cache = write_kv(created(k, k, dtype, "token_head"), k, k, jnp.arange(5, dtype=jnp.int32))
    stored = np.abs(np.asarray(cache.k, np.float32)).reshape(32, 2, 64)[:5]
    assert (stored.max(axis=-1) == LARGEST[dtype]).all()


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
        np.testing.assert_allclose(stored[1:], 1.0, rtol=1e-6)  # the others of the token are as they were


@DTYPES
def test_zeros_and_the_smallest_numbers_are_stored_as_numbers(dtype):
    k = jnp.asarray([0.0, 1e-38, 1e-45], jnp.float32)[:, None, None] * jnp.ones((3, 1, 8))
    cache = write_kv(created(k, k, dtype, "token_head"), k, k, jnp.arange(3, dtype=jnp.int32))
    assert (np.asarray(widen_kv(cache).k) <= 1e-38).all()
    assert (np.asarray(cache.k_scale)[0, :3] >= 1e-30).all()


@DTYPES
@EVERY_SCALE
def test_nan_is_not_hidden_where_the_dtype_can_say_it(dtype, scale):
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


@DTYPES
@EVERY_SCALE
def test_a_layer_of_a_stack_is_that_cache_by_itself(dtype, scale):
    k, v = drawn((3, 5, 2, 8)), drawn((3, 5, 2, 8), 1)
    # Not vmap: XLA may round the division of a batch otherwise, by one unit in the last place.
    k_scale, v_scale = (jnp.stack([kv_scale(layer, dtype, scale) for layer in x]) for x in (k, v))
    given = {} if scale == "token_head" else dict(k_scale=k_scale, v_scale=v_scale)
    slots = jnp.asarray([3, 9, 31, -1, 4], jnp.int32)
    stack = KVCache.create(
        num_blocks=8, block_size=4, num_kv_heads=2, head_dim=8, dtype=dtype, scale_per=scale, num_layers=3, **given
    )
    alone = [created(k[i], v[i], dtype, scale) for i in range(3)]
    q, tables, lengths = drawn((2, 6, 8)), jnp.asarray([[2, 1], [7, 0]], jnp.int32), jnp.asarray([6, 4], jnp.int32)
    for i in range(3):
        stack = write_kv(CacheLayer(stack, i), k[i], v[i], slots).stack
        alone[i] = write_kv(alone[i], k[i], v[i], slots)
    for i in range(3):
        assert (stack.k[i] == alone[i].k).all()
        assert (np.asarray(widen_kv(stack).v[i]) == np.asarray(widen_kv(alone[i]).v)).all()
        layer = CacheLayer(stack, jnp.int32(i))
        pool = pool_of(layer)
        expected = jitted_attention(
            q, alone[i].k, alone[i].v, tables, lengths, k_scale=alone[i].k_scale, v_scale=alone[i].v_scale
        )
        shifted = layer.block_tables(tables)
        out = jitted_attention(q, pool.k, pool.v, shifted, lengths, k_scale=pool.k_scale, v_scale=pool.v_scale)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@functools.cache
def written(dtype, scale) -> tuple[KVCache, BlockAllocator]:
    """A cache that `write_kv` has written, with NaN in every slot and every scale that it has not."""
    lengths, block_size, max_blocks = (0, 1, 15, 16, 17, 80, 35), 16, 5
    allocator = BlockAllocator.create(
        num_blocks=40, block_size=block_size, num_seqs=len(lengths), max_blocks_per_seq=max_blocks
    )
    allocator, slots, ok = allocator.append(jnp.asarray(lengths, jnp.int32), q_len=80)
    assert ok.all()
    k, v = jax.random.normal(jax.random.key(3), (2, len(lengths), 80, 2, 64))
    cache = created(k, v, dtype, scale, num_blocks=40, block_size=block_size)
    if dtype == jnp.int8:
        poison = jnp.full_like(cache.k, 127)
    else:
        poison = jnp.full(cache.k.shape, jnp.nan, jnp.float32).astype(dtype)
    cache = dataclasses.replace(cache, k=poison, v=poison)
    if scale == "token_head":
        nan = jnp.full_like(cache.k_scale, jnp.nan)
        cache = dataclasses.replace(cache, k_scale=nan, v_scale=nan)
    return jax.jit(write_kv)(cache, k, v, slots), allocator


def written_case(dtype, scale, *, options=None, q_len=None, q_dtype=jnp.float32) -> Case:
    cache, allocator = written(dtype, scale)
    seqs = len(allocator.lengths)
    q_shape = (seqs, 6, 64) if q_len is None else (seqs, q_len, 6, 64)
    return Case(
        q=jax.random.normal(jax.random.key(4), q_shape).astype(q_dtype),
        k_cache=cache.k,
        v_cache=cache.v,
        block_tables=allocator.block_tables,
        lengths=allocator.lengths,
        options=dict(options or {}) | {"k_scale": cache.k_scale, "v_scale": cache.v_scale},
    )


def attend(case, **static):
    return jitted_attention(*case.arrays, **case.options, **static, return_lse=True)


@DTYPES
@EVERY_SCALE
def test_attention_over_what_was_written(dtype, scale):
    case = written_case(dtype, scale, options=OPTIONS["all"], q_len=3, q_dtype=jnp.bfloat16)
    out, lse = attend(case, num_partitions=2)
    assert_within_budget(case, out)
    assert_lse(case, lse)


@EVERY_SCALE
def test_mistakes_that_must_be_seen(scale):
    case = written_case(jnp.int8, scale)
    wide = widen_kv(KVCache(case.k_cache, case.v_cache, case.options["k_scale"], case.options["v_scale"]))
    # The oracle over the widened cache is the oracle over the quantised one.
    same = case.replace(k_cache=wide.k, v_cache=wide.v, options={})
    assert_within_budget(same, attend(case)[0])
    rows = np.asarray(case.lengths) > 1
    swapped = {"k_scale": case.options["v_scale"], "v_scale": case.options["k_scale"]}
    left_out = case.options | {"v_scale": jnp.float32(1.0)}
    doubled = {**case.options, "k_scale": 2 * case.options["k_scale"]}
    for options in (left_out, doubled) + ((swapped,) if scale == "token_head" else ()):
        out, _ = attend(case.replace(options=options))
        assert not within_budget(case, out)[rows].any(axis=-1).all()


def test_scales_of_the_next_token_are_a_mistake_that_is_seen():
    case = written_case(jnp.float8_e4m3fn, "token_head")
    rolled = {name: jnp.roll(scale, 1, axis=1) for name, scale in case.options.items()}
    out, _ = attend(case.replace(options=rolled))
    assert not within_budget(case, out)[np.asarray(case.lengths) > 1].all()


@DTYPES
@EVERY_SCALE
def test_a_donated_decode_step_widens_tiles_not_the_cache(dtype, scale):
    def step(cache, allocator, q, k):
        allocator, slots, _ = allocator.append(jnp.ones(SEQS, jnp.int32))
        cache = write_kv(cache, k, k, slots)
        tables, lengths = allocator.block_tables, allocator.lengths
        scales = dict(k_scale=cache.k_scale, v_scale=cache.v_scale)
        return cache, allocator, paged_attention(q, cache.k, cache.v, tables, lengths, **scales)

    k = jnp.ones((SEQS, KV_HEADS, HEAD_DIM))
    cache = created(k, k, dtype, scale, num_blocks=4 * NUM_BLOCKS, block_size=BLOCK_SIZE)  # large beside a tile
    allocator = BlockAllocator.create(
        num_blocks=4 * NUM_BLOCKS, block_size=BLOCK_SIZE, num_seqs=SEQS, max_blocks_per_seq=MAX_BLOCKS
    )
    q = jnp.ones((SEQS, 6, HEAD_DIM))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(cache, allocator, q, k).compile()
    assert cache_sized_copies(compiled.as_text()) == []
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * cache.k.nbytes
    # One wider pool set aside would take twice a pool's bytes. A CPU writes float8 in a pass over the pool, for which
    # XLA may set aside its bytes once (docs/cache.md).
    allowed = 0.5 if dtype == jnp.int8 else 1.5
    assert compiled.memory_analysis().temp_size_in_bytes < allowed * cache.k.nbytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(scale_per="token_head"), r"a bfloat16 cache is not quantised: leave scale_per out"),
        (dict(k_scale=1.0), r"a bfloat16 cache is not quantised: leave k_scale out"),
        (dict(dtype=jnp.int8, scale_per="block"), r'scale_per must be "tensor", "head", .* got scale_per=\'block\''),
        (
            dict(dtype=jnp.int8, scale_per="head"),
            r"an int8 cache with scale_per='head' needs k_scale",
        ),
        (dict(dtype=jnp.int8, k_scale=1.0), r'k_scale goes with scale_per="tensor" or "head"'),
        (dict(dtype=jnp.float8_e5m2, scale_per="head", v_scale=jnp.ones(3)), r"v_scale .* must be \[2\]; got \[3\]"),
        (dict(dtype=jnp.float8_e5m2, scale_per="tensor", k_scale=jnp.ones(3)), r"k_scale .* must be \[\]; got \[3\]"),
        (
            dict(dtype=jnp.float8_e5m2, scale_per="head", num_layers=3, k_scale=jnp.ones((2, 2))),
            r"k_scale .* must be \[3, 2\]; got \[2, 2\]",
        ),
        (dict(dtype=jnp.float8_e5m2, scale_per="head", k_scale=jnp.ones(2, jnp.int32)), r"must be float32; got int32"),
    ],
)
def test_create_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        KVCache.create(num_blocks=4, block_size=2, num_kv_heads=2, head_dim=8, **changes)


@pytest.mark.parametrize("num_layers", [None, 3])
@EVERY_SCALE
def test_scales_that_create_makes(scale, num_layers):
    layers = () if num_layers is None else (3,)
    shapes = {"tensor": (3, 1) if layers else (), "head": (*layers, 2), "token_head": (*layers, 4, 2, 2)}
    cache = KVCache.create(
        num_blocks=4,
        block_size=2,
        num_kv_heads=2,
        head_dim=8,
        dtype="float8_e4m3fn",
        scale_per=scale,
        num_layers=num_layers,
    )
    assert cache.k_scale.shape == cache.v_scale.shape == shapes[scale]
    assert cache.k_scale.dtype == jnp.float32
    assert (
        KVCache.create(
            num_blocks=4, block_size=2, num_kv_heads=2, head_dim=8, dtype="int8", num_layers=num_layers
        ).k_scale.shape
        == shapes["token_head"]
    )


@pytest.mark.parametrize(
    "k_scale", [None, jnp.ones(3), jnp.ones((3, 2)), jnp.ones((4, 2)).T, jnp.ones((4, 2, 1)), jnp.ones((2, 2, 2))]
)
def test_scales_that_do_not_fit_a_cache(k_scale):
    cache = dataclasses.replace(
        KVCache.create(num_blocks=4, block_size=2, num_kv_heads=2, head_dim=8, dtype="int8"), k_scale=k_scale
    )
    with pytest.raises(ValueError, match=r"k_scale (missing|must be)"):
        write_kv(cache, jnp.ones((1, 2, 8)), jnp.ones((1, 2, 8)), jnp.zeros(1, jnp.int32))


def test_kv_scale_errors():
    with pytest.raises(ValueError, match=r"dtype must be one of float8_e4m3fn, .* got dtype=bfloat16"):
        kv_scale(jnp.ones((2, 8)), jnp.bfloat16, "head")
    with pytest.raises(ValueError, match=r"got x.shape=\(2, 8\), scale_per='token'"):
        kv_scale(jnp.ones((2, 8)), jnp.int8, "token")
