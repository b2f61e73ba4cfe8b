"""`shared_prefix`: blocks that sequences begin with are attended to once, and the results are those without."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import paged_attention, tree_mask
from jaxpaged._attention import run, shared_prefix, xla
from jaxpaged._attention.plan import make_plan
from jaxpaged._attention.public import planned_attention
from jaxpaged._attention.runs import cut_uniform, join_uniform
from tests.cases import OPTIONS, assert_lse, assert_within_budget, make_case, within_budget
from tests.kernels.interpret import make_call
from tests.kernels.prefill import packed

# Two groups of four that share 32 tokens. Of the first, one is empty; of the second, one has its new token in the last
# of them, and one has other blocks.
LENGTHS = (0, 40, 45, 80, 32, 33, 70, 50)
PREFIX, GROUPS, SHARING = 39, 2, (1, 2, 3, 5, 6)  # rounded down to two blocks


def shared_case(**shape):
    case = make_case(lengths=LENGTHS, **shape)
    tables = np.array(case.block_tables)
    tables[[1, 2], :2] = tables[3, :2]
    tables[[4, 5], :2] = tables[6, :2]
    return case.replace(block_tables=jnp.asarray(tables))


@functools.partial(jax.jit, static_argnames="num_partitions")
def attend(*arrays, **options):
    return paged_attention(*arrays, **options, return_lse=True)


def check(case, prefix, **how):
    out, lse = attend(*case.arrays, **case.options, shared_prefix=prefix, **how)
    assert out.dtype == case.q.dtype
    assert_within_budget(case, out)
    assert_lse(case, lse)


@pytest.mark.parametrize("name", ["plain", "sinks"])
def test_options(name):
    check(shared_case(options=OPTIONS[name]), jnp.full(GROUPS, PREFIX, jnp.int32))


# Those that share come first, and no sequence is in the second and fourth group.
SORTED = (1, 2, 3, 5, 6, 0, 4, 7)
OF_ENGINE = shared_prefix.PrefixGroups(
    starts=jnp.array([0, 3, 3, 5, 5], jnp.int32),
    first=jnp.array([0, 0, 3, 7], jnp.int32),
    num_blocks=jnp.array([2, 2, 2, 2, 2, 0, 0, 0], jnp.int32),
)


def sorted_case(**shape):
    case, rows = shared_case(**shape), jnp.array(SORTED)
    return case.replace(q=case.q[rows], block_tables=case.block_tables[rows], lengths=case.lengths[rows])


@pytest.mark.parametrize("shape", [dict(options=OPTIONS["sinks"]), dict(dtype=jnp.bfloat16)], ids=str)
def test_groups_of_an_engine(shape):
    check(sorted_case(**shape), OF_ENGINE)


def test_packed_groups_of_an_engine():
    counts, case = (2, 0, 7, 1, 3, 0, 2, 0), sorted_case(q_len=7)
    q, starts = packed(case.q, counts), jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
    q = jnp.asarray(np.concatenate([q, np.full_like(q[:3], np.nan)]))
    groups = dataclasses.replace(OF_ENGINE, starts=jnp.array([0, 9, 9, 13, 13], jnp.int32))
    out, lse = attend(q, *case.arrays[1:], query_starts=starts, shared_prefix=groups)
    expected, expected_lse = attend(q, *case.arrays[1:], query_starts=starts)
    np.testing.assert_allclose(out, expected, atol=3e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


def test_what_groups_of_an_engine_compute_once():
    case = sorted_case()
    shared, rest, shares = shared_prefix.split(make_call(case), OF_ENGINE)
    assert shares[:, 0].tolist() == [True] * 5 + [False] * 3
    assert shared.query_starts.tolist() == [0, 3, 3, 5, 5]
    assert shared.lengths.tolist() == [32, 0, 32, 0]
    assert (shared.block_tables[jnp.array([0, 2])] == case.block_tables[jnp.array([0, 3])]).all()
    assert rest.lengths.tolist() == [8, 13, 48, 1, 38, 0, 32, 50]


@pytest.mark.parametrize("shape", [dict(q_len=3), dict(dtype=jnp.bfloat16)], ids=str)
def test_rows(shape):
    check(shared_case(**shape), jnp.full(GROUPS, PREFIX, jnp.int32), num_partitions=2)


def test_8_bit_caches():
    case = shared_case(cache_dtype=jnp.int8, scale_shape="token_head")
    check(case, jnp.full(GROUPS, PREFIX, jnp.int32))


@pytest.mark.parametrize("prefix", [(32, 48), 2**40])
def test_a_known_number(prefix):
    """Of the first group no sequence but the longest has 48 tokens."""
    case = shared_case()
    out = paged_attention(*case.arrays, shared_prefix=np.asarray(prefix))
    assert_within_budget(case, out)


def test_a_plan():
    case = shared_case()
    plan = make_plan(case.lengths, num_kv_heads=2)
    assert_within_budget(case, planned_attention(*case.arrays, shared_prefix=PREFIX, plan=plan))


@pytest.mark.parametrize("name", ["window", "alibi"])
def test_what_counts_from_a_position_is_not_shared(name):
    case = shared_case(options=OPTIONS[name])
    plain, *outs = (
        paged_attention(*case.arrays, **case.options, shared_prefix=prefix) for prefix in (None, PREFIX, OF_ENGINE)
    )
    assert all((out == plain).all() for out in outs)


def test_a_tree():
    case = shared_case(q_len=3)
    mask = jnp.broadcast_to(tree_mask(jnp.array([-1, 0, 0])), (8, 3, 1))
    expected = attend(*case.arrays, tree_mask=mask)
    got = attend(*case.arrays, tree_mask=mask, shared_prefix=jnp.full(GROUPS, PREFIX, jnp.int32))
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_nobody_shares():
    """The sequences begin with other blocks. The call on the shared blocks reads none of the longest one's, whose last
    slot is not used and holds NaN."""
    cache = jnp.full((4, 4, 1, 8), jnp.nan).at[1:3].set(1.0)
    arrays = jnp.ones((2, 1, 8)), cache, cache.at[3].set(2.0).at[3, 3].set(jnp.nan)
    tables = jnp.array([[1, 3], [2, 3]], jnp.int32)
    out = paged_attention(*arrays, tables, jnp.array([4, 3]), shared_prefix=8)
    np.testing.assert_allclose(out, 1.0)


def test_what_is_computed_once():
    """Tables and lengths of the call on the shared blocks, and of that on the others."""
    case = shared_case()
    a = make_call(case)
    shared, rest, shares = shared_prefix.split(a, jnp.full(GROUPS, PREFIX, jnp.int32))
    assert np.flatnonzero(shares).tolist() == list(SHARING)
    assert shared.q.shape == (GROUPS, 4, 6, 64)
    assert shared.lengths.tolist() == [32, 32]
    assert (shared.block_tables[:, :2] == case.block_tables[jnp.array([3, 6]), :2]).all()
    assert rest.lengths.tolist() == [0, 8, 13, 48, 32, 1, 38, 50]
    for seq in SHARING:
        assert (rest.block_tables[seq, :3] == case.block_tables[seq, 2:]).all()
    assert (rest.block_tables[7] == case.block_tables[7]).all()
    known, *_ = shared_prefix.split(a, np.full(GROUPS, PREFIX))
    assert known.block_tables.shape == (GROUPS, 2)


@pytest.mark.parametrize("wrong", ["shared blocks twice", "shared blocks left out"])
def test_a_wrong_result_is_noticed(wrong, monkeypatch):
    case = shared_case()
    merge = run.merge_attention

    def merge_wrongly(*parts):
        return merge(*parts[:2], *merge(*parts)) if wrong == "shared blocks twice" else parts[2:]

    monkeypatch.setattr(run, "merge_attention", merge_wrongly)
    out = paged_attention(*case.arrays, shared_prefix=np.full(GROUPS, PREFIX))
    good = within_budget(case, out).all(axis=-1)
    assert np.flatnonzero(~good).tolist() == list(SHARING)


def test_tokens_folded_into_heads():
    """As the decode kernel takes queries that all see the whole sequence: 26 tokens of 3 heads in 2 runs."""
    case = make_case(lengths=(0, 50), q_len=26)
    a = dataclasses.replace(make_call(case), causal=False)
    folded = cut_uniform(a, run=13)
    assert folded.q.shape == (4, 1, 13 * 6, 64)
    assert cut_uniform(a, run=9).q.shape == (6, 1, 9 * 6, 64)
    expected = xla.attend(a, num_partitions=1)
    for x, y in zip(xla.attend(folded, num_partitions=1), expected, strict=True):
        np.testing.assert_allclose(join_uniform(x, a), y, atol=1e-5)


def test_gradients():
    case = shared_case(q_len=3)  # the rows of the first sequence are padding

    def loss(k_cache, prefix):
        out = paged_attention(case.q.at[0].set(jnp.nan), k_cache, *case.arrays[2:], shared_prefix=prefix)
        return jnp.sin(out[1:]).sum()

    got, wanted = (jax.grad(loss)(case.k_cache, prefix) for prefix in (np.full(GROUPS, PREFIX), None))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("prefix", [16.0, True, np.zeros((2, 1), np.int32), np.zeros(3, np.int32), ()])
def test_errors(prefix):
    case = shared_case()
    with pytest.raises(ValueError, match=r"shared_prefix must be an int or int32 \[\] or \[groups\]"):
        paged_attention(*case.arrays, shared_prefix=prefix)
