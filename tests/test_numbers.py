"""Numbers beyond int32 or float32, and numbers of the wrong kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import (
    AttentionStep,
    BlockAllocator,
    CacheLayer,
    KVCache,
    paged_attention,
    paged_attention_reference,
    rotary_frequencies,
)
from jaxpaged._attention.plan import make_plan
from jaxpaged._attention.public import planned_attention
from jaxpaged.ops import copy_blocks, gather_kv, rotate_and_write_kv, write_kv
from tests.cases import make_case

CASE = make_case(lengths=(1, 20, 0), max_blocks=4)
FUNCTIONS = [paged_attention, paged_attention_reference]
WRAPS = 2**32  # a cast to int32 drops it from a sum
CACHE = KVCache.create(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=8, dtype="float32")
FULL = KVCache(jnp.ones_like(CACHE.k), jnp.ones_like(CACHE.v))
STACK = KVCache.create(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=8, num_layers=2, dtype="float32")
TOKEN = jnp.ones((1, 1, 8))


SIZES = dict(num_blocks=9, block_size=4, num_seqs=2, max_blocks_per_seq=3)


def allocator():
    return BlockAllocator.create(**SIZES)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_numpy_lengths_and_ids_beyond_int32_are_clamped(function):
    q, k_cache, v_cache, tables, _ = CASE.arrays
    far = np.array([WRAPS + 1, 20, -WRAPS + 5])
    largest = jnp.array([2**31 - 1, 20, 0], jnp.int32)
    k_cache, v_cache = jnp.nan_to_num(k_cache), jnp.nan_to_num(v_cache)
    tables = np.asarray(tables, np.int64)
    tables[1, 0] += WRAPS
    clamped = jnp.asarray(np.clip(tables, 0, k_cache.shape[0] - 1), jnp.int32)
    got, wanted = function(q, k_cache, v_cache, tables, far), function(q, k_cache, v_cache, clamped, largest)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_numpy_slots_and_ids_beyond_int32_are_padding():
    far = np.array([WRAPS + 3])
    assert (write_kv(CACHE, TOKEN, TOKEN, far).k == 0).all()
    turned, _ = rotate_and_write_kv(CACHE, TOKEN, TOKEN, TOKEN, far, np.array([0]), rotary_frequencies(8))
    assert (turned.k == 0).all()
    assert (copy_blocks(write_kv(FULL, 2 * TOKEN, TOKEN, [2]), np.array([1]), far).k[3] == 1).all()
    assert (gather_kv(FULL, np.array([[1]]), np.array([-WRAPS + 2])).k == 0).all()
    assert CacheLayer(STACK, 1).slots(far).tolist() == [-1]


def test_the_allocator_refuses_numpy_counts_beyond_int32():
    with pytest.raises(ValueError, match=f"q_len=4, the width of the slots; got {WRAPS + 1} for sequence 0"):
        allocator().append(np.array([WRAPS + 1, 4]), q_len=4)
    full, _, ok = allocator().append(np.array([-WRAPS + 1, 4]), q_len=4)
    assert ok.tolist() == [False, True]
    assert full.fork(np.array([WRAPS + 1, 1]))[2].tolist() == [False, True]
    assert full.rollback(np.array([0, WRAPS + 2]))[2].tolist() == [True, False]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_windows_beyond_int32_equal_none(function):
    wanted = function(*CASE.arrays)
    with jax.enable_x64(True):
        windows = [jnp.uint32(2**31), jnp.int64(2**63 - 1), jnp.int64(2**32 + 1), np.uint64(2**63)]
    for window in windows:
        with jax.enable_x64(True):
            got = function(*CASE.arrays, sliding_window=window)
        jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("cap", [1e29, 1e38, np.inf])
def test_a_large_soft_cap_equals_none(function, cap):
    wanted = function(*CASE.arrays)
    got = function(*CASE.arrays, logits_soft_cap=jnp.float32(cap))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), got, wanted)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_int8_cache_needs_its_scales(function):
    cache = jnp.ones((9, 16, 2, 64), jnp.int8)
    for scales, missing in ((dict(v_scale=1.0), "k_scale"), (dict(k_scale=1.0), "v_scale")):
        with pytest.raises(ValueError, match=rf"int8 cache needs .*; got {missing}=None. Pass cache.{missing}"):
            function(CASE.q, cache, cache, CASE.block_tables, CASE.lengths, **scales)


COMPLEX = {
    "scale": dict(scale=1j),
    "logits_soft_cap": dict(logits_soft_cap=jnp.complex64(3 + 1j)),
    "alibi_slopes": dict(alibi_slopes=np.ones(6, np.complex64)),
    "sinks": dict(sinks=jnp.ones(6, jnp.complex64)),
    "k_scale": dict(k_scale=1 + 1j),
    "v_scale": dict(v_scale=np.complex64(1j)),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_options_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be float32; got complex"):
        paged_attention(*CASE.arrays, **COMPLEX[name])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paged_attention(*CASE.arrays, num_partitions=2**31), r"below 2\^31 .*got num_partitions=2147483648"),
        (
            lambda: AttentionStep.create(allocator(), [0, 1], num_kv_heads=2.0),
            r"num_kv_heads must be an int; got num_kv_heads=2.0",
        ),
    ],
)
def test_sizes(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_table_row_holds_less_than_2_to_31_tokens():
    q, k_cache, v_cache, _, lengths = CASE.arrays
    pools = [jax.ShapeDtypeStruct((2, 2**29, *pool.shape[2:]), pool.dtype) for pool in (k_cache, v_cache)]
    with pytest.raises(ValueError, match=r"less than 2\^31 tokens; got .*\(3, 4\), block_size=536870912"):
        jax.eval_shape(paged_attention, q, *pools, CASE.block_tables, lengths)


@pytest.mark.parametrize("packed", [False, True])
def test_a_numpy_number_of_partitions_widens_nothing_with_x64(packed):
    q, *rest = CASE.arrays
    how = dict(query_starts=jnp.arange(q.shape[0] + 1, dtype=jnp.int32)) if packed else {}
    wanted = paged_attention(q, *rest, **how, num_partitions=2)
    with jax.enable_x64(True):
        got = paged_attention(q, *rest, **how, num_partitions=np.int64(2))
    np.testing.assert_array_equal(got, wanted)


def test_everything_stays_int32_with_x64():
    with jax.enable_x64(True):
        plan = make_plan(CASE.lengths, num_kv_heads=2)
        planned_attention(*CASE.arrays, plan=plan)
        slots = CacheLayer(STACK, np.int64(1)).slots(jnp.zeros(2, jnp.int32))
        made = BlockAllocator.create(**{name: np.int64(size) for name, size in SIZES.items()})
        after = made.append(np.array([1, 2]), q_len=np.int64(2))
        step = AttentionStep.create(
            after[0], np.asarray(after[1], np.int64), num_kv_heads=np.int64(2), adapters=np.array([1, 2, 3, 4])
        )
        packed = AttentionStep.create(
            after[0], [4, 8, 9], query_starts=np.array([0, 1, 3]), num_partitions=np.int64(2), positions=[0, 0, 1]
        )
    assert {leaf.dtype.name for leaf in jax.tree.leaves((plan, slots, after, step, packed))} == {"int32", "bool"}
