"""Packed queries (`query_starts`) against the same tokens in padded rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import AttentionStep, BlockAllocator, KVCache, paged_attention, paged_attention_reference
from jaxpaged._attention import xla
from jaxpaged._attention.call import check_call
from jaxpaged._attention.kernels import KERNELS
from jaxpaged._by_kernel import NO_HINTS, choose
from jaxpaged._device import GPUS
from jaxpaged.debug import explain
from tests.attention.conformance import OptionsAlone
from tests.cases import OPTIONS, jitted_attention, jitted_reference, make_case, oracle
from tests.kernels.prefill import packed, unpacked

H100 = GPUS["H100"]
LENGTHS, COUNTS = (0, 1, 15, 16, 17, 80, 72, 35), (0, 1, 15, 7, 0, 40, 1, 20)
BEFORE, BEHIND = 2, 3  # rows of padding in q


def packed_call(case, counts=COUNTS):
    """(q, query_starts), with NaN in the padding."""
    q = packed(case.q, counts)
    before, behind = (np.full((n, *q.shape[1:]), np.nan, q.dtype) for n in (BEFORE, BEHIND))
    q = np.concatenate([before, q, behind])
    return jnp.asarray(q), jnp.asarray(BEFORE + np.cumsum([0, *counts]), jnp.int32)


def check(case, out, lse, counts=COUNTS, atol=3e-6):
    expected, expected_lse = (packed(x, counts) for x in oracle(case))
    tokens = slice(BEFORE, BEFORE + sum(counts))
    np.testing.assert_allclose(np.asarray(out, np.float32)[tokens], expected, atol=atol)
    np.testing.assert_allclose(lse[tokens], expected_lse, atol=1e-5)
    check_padding(out, lse)


def check_padding(out, lse):
    for rows in (slice(BEFORE), slice(-BEHIND, None)):
        assert not np.asarray(out[rows]).any()
        assert (np.asarray(lse[rows]) == -np.inf).all()


class Packed(OptionsAlone):
    """Each sequence has `COUNTS` new tokens, at most its length."""

    case = staticmethod(functools.partial(make_case, lengths=LENGTHS, q_len=max(COUNTS)))

    def attend(self, case, num_partitions=1):
        lengths = np.asarray(case.lengths)
        counts = tuple(np.minimum(lengths, COUNTS if len(lengths) == len(COUNTS) else max(COUNTS)).tolist())
        q, starts = packed_call(case, counts)
        out, lse = self.function(q, *case.arrays[1:], query_starts=starts, **case.options, return_lse=True)
        check_padding(out, lse)
        return unpacked(case, counts, out[BEFORE:], lse[BEFORE:])


class TestPackedReference(Packed):
    function = staticmethod(jitted_reference)


class TestPackedAttention(Packed):
    function = staticmethod(jitted_attention)


@pytest.mark.parametrize("counts", [(0,) * 8, (1,) * 8, COUNTS[::-1], (0, 0, 0, 0, 0, 80, 0, 0)])
def test_any_counts_in_one_program(counts):
    case = make_case(lengths=LENGTHS, q_len=80)
    rows = np.zeros((90, 6, 64), np.float32)
    flat = packed(case.q, counts)
    rows[BEFORE : BEFORE + len(flat)] = flat
    starts = jnp.asarray(BEFORE + np.cumsum([0, *counts]), jnp.int32)
    out, lse = paged_attention(jnp.asarray(rows), *case.arrays[1:], query_starts=starts, return_lse=True)
    check(case, out[: BEFORE + len(flat) + BEHIND], lse[: BEFORE + len(flat) + BEHIND], counts)


def test_blocks_that_a_window_has_passed_are_never_read():
    """Short runs: entries before the window are garbage, and the null block that they are clamped to holds NaN."""
    counts, window = (1, 3, 20), 20
    case = make_case(lengths=(80, 77, 60), options={"sliding_window": window}, q_len=20)
    tables = np.asarray(case.block_tables).copy()
    for row, length, count in zip(tables, (80, 77, 60), counts, strict=True):
        row[: (length - count - window + 1) // 16] = -5
    q, starts = packed_call(case, counts)
    arrays = q, *case.arrays[1:3], jnp.asarray(tables), case.lengths
    for function in (paged_attention, paged_attention_reference):
        check(case, *function(*arrays, query_starts=starts, **case.options, return_lse=True), counts)


def test_xla_runs_have_about_as_many_tokens_as_sequences():
    cases = {(3, 8): 1, (8, 8): 1, (16, 8): 2, (24, 8): 4, (5, 1): 8, (40, 8): 8, (128, 8): 16, (121, 1): 16}
    assert {case: xla.run_tokens(*case) for case in cases} == cases


@pytest.mark.parametrize("num_partitions", [1, 3])
@pytest.mark.parametrize(
    "cache", [dict(cache_dtype=jnp.int8, scale_shape="token_head"), dict(block_size=8, max_blocks=10)]
)
def test_caches_and_partitions(cache, num_partitions):
    case = make_case(lengths=LENGTHS, q_len=max(COUNTS), **cache)
    q, starts = packed_call(case)
    how = dict(num_partitions=num_partitions, return_lse=True)
    check(case, *paged_attention(q, *case.arrays[1:], query_starts=starts, **case.options, **how), atol=1e-5)


def test_off_by_one_starts_are_noticed():
    case = make_case(lengths=LENGTHS, q_len=max(COUNTS))
    q, starts = packed_call(case)
    out, lse = paged_attention(q, *case.arrays[1:], query_starts=starts.at[3].add(1), return_lse=True)
    with pytest.raises(AssertionError):
        check(case, out, lse)


def test_gradients_equal_padded_rows():
    counts = (3, 0, 2)
    case = make_case(lengths=(20, 9, 33), q_len=3)
    q, starts = packed_call(case, counts)

    def loss(k_cache, *, q, **named):
        out, lse = paged_attention(q, k_cache, *case.arrays[2:], return_lse=True, **named)
        return jnp.sin(out), jnp.where(jnp.isfinite(lse), lse, 0.0)

    def packed_loss(k_cache):
        return sum(x[BEFORE:-BEHIND].sum() for x in loss(k_cache, q=q, query_starts=starts))

    def padded_loss(k_cache):
        return sum(x[0].sum() + x[2, 1:].sum() for x in loss(k_cache, q=case.q))

    got, wanted = jax.grad(packed_loss)(case.k_cache), jax.grad(padded_loss)(case.k_cache)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_tangents_for_a_precomputed_result():
    # As after a kernel, which computes the packed call as a whole.
    counts = (3, 0, 17)
    case = make_case(lengths=(20, 9, 33), q_len=17, options=OPTIONS["all"])
    q, starts = packed_call(case, counts)
    call = check_call(q, *case.arrays[1:], query_starts=starts, **case.options)

    def moved(x):
        return np.sin(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0)

    along = jax.tree.map(moved, call)
    by_xla = functools.partial(xla.attend, num_partitions=1)
    results, expected = jax.jvp(by_xla, (call,), (along,))
    for got, wanted in zip(results, by_xla(call), strict=True):
        assert (got == wanted).all()
    tokens = slice(BEFORE, -BEHIND)
    for got, wanted in zip(xla.tangents_of(call, along, results), expected, strict=True):
        assert np.abs(wanted[tokens]).max() > 0.1
        np.testing.assert_allclose(got[tokens], wanted[tokens], atol=1e-5)


@pytest.mark.parametrize(("head_dim", "by_prefill"), [(128, True), (120, False)])
def test_choice_of_the_kernel(head_dim, by_prefill):
    case = make_case(lengths=LENGTHS, q_len=max(COUNTS), head_dim=head_dim, dtype=jnp.bfloat16)
    q, starts = packed_call(case)
    choice = choose(check_call(q, *case.arrays[1:], query_starts=starts), H100, NO_HINTS, KERNELS)
    assert choice.kernel.name == ("paged_prefill" if by_prefill else "paged_decode")
    assert choice.config.run == (0 if by_prefill else 64 // 3)  # query tokens of a run: 64 rows of 3 heads


def test_partitions_with_more_heads_than_the_decode_kernel_accepts():
    case = make_case(lengths=LENGTHS, q_len=max(COUNTS), heads=65, kv_heads=1, dtype=jnp.bfloat16)
    q, starts = packed_call(case)
    how = dict(query_starts=starts, num_partitions=2, gpu="H100")
    assert explain(q, *case.arrays[1:], **how).implementation == "xla"
    with pytest.raises(NotImplementedError, match="q_len=1, group=65"):
        explain(q, *case.arrays[1:], **how, implementation="mosaic_gpu")


def test_scales_of_an_unquantised_cache_are_not_ignored():
    case = make_case(lengths=LENGTHS, q_len=max(COUNTS), head_dim=128, dtype=jnp.bfloat16)
    q, starts = packed_call(case)
    how = dict(query_starts=starts, k_scale=jnp.float32(2.0), implementation="mosaic_gpu", gpu="H100")
    with pytest.raises(NotImplementedError, match="support k_scale and v_scale with 8-bit caches"):
        explain(q, *case.arrays[1:], **how)


def test_a_step_of_prompts_chunks_and_decode_rows_through_the_cache():
    """Writes packed tokens to the allocator's slots. The output equals attention over each sequence alone."""
    counts = [5, 1, 0, 9]
    cache = KVCache.create(num_blocks=16, block_size=4, num_kv_heads=2, head_dim=16, dtype="float32")
    allocator = BlockAllocator.create(num_blocks=16, block_size=4, num_seqs=4, max_blocks_per_seq=4)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (15, heads, 16)) for key, heads in zip(keys, (4, 2, 2), strict=True))
    allocator, _, _ = allocator.append(jnp.asarray(counts, jnp.int32), q_len=9)
    seqs = jnp.asarray(np.repeat(np.arange(4), counts), jnp.int32)
    positions = jnp.asarray(np.concatenate([np.arange(n) for n in counts]), jnp.int32)
    starts = jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
    step = AttentionStep.create(allocator, allocator.slots(seqs, positions), query_starts=starts)
    assert (step.positions == positions).all()
    cache, out = step.attend(q, k, v, cache)
    for s, count in enumerate(counts):
        rows = slice(int(starts[s]), int(starts[s]) + count)
        if count:
            alone = dataclasses.replace(
                allocator, block_tables=allocator.block_tables[s : s + 1], lengths=allocator.lengths[s : s + 1]
            )
            own = AttentionStep.create(alone, step.slots[None, rows])
            np.testing.assert_allclose(out[rows], own.attend(q[None, rows], None, None, cache)[1][0], atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(q=jnp.zeros((2, 3, 6, 64))), r"with query_starts q must be \[tokens, heads, head_dim\]"),
        (dict(query_starts=jnp.zeros(3, jnp.int32)), r"query_starts must be int32 \[seqs \+ 1\].*got int32 \[3\]"),
        (dict(query_starts=jnp.zeros(9)), r"query_starts must be int32 \[seqs \+ 1\].*got float32 \[9\]"),
        (dict(num_partitions=0), r"num_partitions must be an int"),
    ],
)
def test_errors(changes, message):
    case = make_case(lengths=LENGTHS, q_len=max(COUNTS))
    q, starts = packed_call(case)
    k_cache, v_cache, tables, lengths = case.arrays[1:]
    named = dict(q=q, k_cache=k_cache, v_cache=v_cache, block_tables=tables, lengths=lengths, query_starts=starts)
    with pytest.raises(ValueError, match=message):
        paged_attention(**named | changes)
