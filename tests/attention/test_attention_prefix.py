"""`prefix_groups`: shared first blocks are read once, and results equal those without groups."""

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
from jaxpaged.ops import PrefixGroups
from tests.cases import OPTIONS, assert_lse, assert_within_budget, find_groups, make_case, within_budget
from tests.kernels.interpret import make_call
from tests.kernels.prefill import packed

# Groups of three and of two sequences share 32 tokens. Other sequences are empty, have their new token in the shared
# blocks, or have different blocks.
LENGTHS = (0, 40, 45, 80, 32, 33, 70, 50)
SHARING = (1, 2, 3, 5, 6)


def shared_case(**shape):
    case = make_case(lengths=LENGTHS, **shape)
    tables = np.array(case.block_tables)
    tables[[1, 2], :2] = tables[3, :2]
    tables[[4, 5], :2] = tables[6, :2]
    return case.replace(block_tables=jnp.asarray(tables))


@functools.partial(jax.jit, static_argnames="num_partitions")
def attend(*arrays, **options):
    return paged_attention(*arrays, **options, return_lse=True)


def check(case, groups=None, **how):
    groups = find_groups(case) if groups is None else groups
    out, lse = attend(*case.arrays, **case.options, prefix_groups=groups, **how)
    assert out.dtype == case.q.dtype
    assert_within_budget(case, out)
    assert_lse(case, lse)


@pytest.mark.parametrize("name", ["plain", "sinks"])
def test_options(name):
    check(shared_case(options=OPTIONS[name]))


# Sharing sequences come first. The second and the fourth group are empty.
SORTED = (1, 2, 3, 5, 6, 0, 4, 7)
OF_ENGINE = PrefixGroups(
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
    out, lse = attend(q, *case.arrays[1:], query_starts=starts, prefix_groups=groups)
    expected, expected_lse = attend(q, *case.arrays[1:], query_starts=starts)
    np.testing.assert_allclose(out, expected, atol=3e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


def test_groups_of_an_engine_read_shared_blocks_once():
    case = sorted_case()
    shared, rest, shares = shared_prefix.split(make_call(case), OF_ENGINE)
    assert shares[:, 0].tolist() == [True] * 5 + [False] * 3
    assert shared.query_starts.tolist() == [0, 3, 3, 5, 5]
    assert shared.lengths.tolist() == [32, 0, 32, 0]
    assert (shared.block_tables[jnp.array([0, 2])] == case.block_tables[jnp.array([0, 3])]).all()
    assert rest.lengths.tolist() == [8, 13, 48, 1, 38, 0, 32, 50]


@pytest.mark.parametrize("shape", [dict(q_len=3), dict(dtype=jnp.bfloat16)], ids=str)
def test_rows(shape):
    check(shared_case(**shape), num_partitions=2)


def test_8_bit_caches():
    check(shared_case(cache_dtype=jnp.int8, scale_shape="token_head"))


def test_groups_beyond_the_sequences_are_clamped():
    """Groups are clamped, so that nothing outside the tables is read."""
    case = shared_case()
    case = case.replace(k_cache=jnp.nan_to_num(case.k_cache), v_cache=jnp.nan_to_num(case.v_cache))
    far = PrefixGroups(jnp.array([0, 4, 99]), jnp.array([3, 99]), jnp.full(8, 2**31 - 1))
    out, _ = attend(*case.arrays, prefix_groups=far)
    assert np.isfinite(out).all()


def test_a_plan():
    case = shared_case()
    groups = find_groups(case)
    plan = make_plan(case.lengths - 16 * groups.num_blocks, num_kv_heads=2)
    assert_within_budget(case, planned_attention(*case.arrays, prefix_groups=groups, plan=plan))


def test_packed_groups():
    """Sequences without new tokens do not split a group."""
    counts, case = (0, 2, 0, 7, 1, 3, 2, 4), shared_case(q_len=7)
    starts = jnp.asarray(np.cumsum([1, *counts]), jnp.int32)  # a row of padding comes first
    nan = np.full_like(case.q[0, :1], np.nan)
    q = jnp.asarray(np.concatenate([nan, packed(case.q, counts), nan]))
    groups = find_groups(case, query_starts=starts)
    assert groups.num_blocks.tolist() == [0, 2, 0, 2, 1, 1, 1, 0]
    out, lse = attend(q, *case.arrays[1:], query_starts=starts, prefix_groups=groups)
    expected, expected_lse = attend(q, *case.arrays[1:], query_starts=starts)
    np.testing.assert_allclose(out, expected, atol=3e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


def test_an_empty_sequence_in_a_group():
    """The query of an empty sequence may be NaN."""
    case = shared_case()
    case = case.replace(lengths=case.lengths.at[2].set(0), q=case.q.at[2].set(jnp.nan))
    groups = find_groups(case)
    assert groups.starts[:2].tolist() == [0, 4]
    assert groups.num_blocks.tolist() == [0, 2, 0, 2, 0, 2, 2, 0]
    out, lse = attend(*case.arrays, prefix_groups=groups)
    expected, expected_lse = attend(*case.arrays)
    np.testing.assert_allclose(out, expected, atol=3e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


@pytest.mark.parametrize("name", ["window", "alibi"])
def test_position_dependent_options_share_nothing(name):
    case = shared_case(options=OPTIONS[name])
    plain, *outs = (
        paged_attention(*case.arrays, **case.options, prefix_groups=groups)
        for groups in (None, find_groups(case), OF_ENGINE)
    )
    assert all((out == plain).all() for out in outs)


def test_a_tree():
    case = shared_case(q_len=3)
    mask = jnp.broadcast_to(tree_mask(jnp.array([-1, 0, 0])), (8, 3, 1))
    expected = attend(*case.arrays, tree_mask=mask)
    got = attend(*case.arrays, tree_mask=mask, prefix_groups=find_groups(case))
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_no_sequence_shares():
    """The call on the shared blocks reads none."""
    case = make_case(lengths=(20, 15))  # the second sequence has no full block
    groups = find_groups(case)
    assert not groups.num_blocks.any()
    shared, rest, shares = shared_prefix.split(make_call(case), groups)
    assert not shared.lengths.any()
    assert not shares.any()
    assert (rest.lengths == case.lengths).all()
    check(case)


def test_shared_blocks_are_computed_once():
    """Tables and lengths of the calls on the shared blocks and on the rest."""
    case = shared_case()
    shared, rest, shares = shared_prefix.split(make_call(case), find_groups(case))
    assert np.flatnonzero(shares).tolist() == list(SHARING)
    assert shared.query_starts.tolist() == [0, 4, 5, 7, 8, 8]
    assert shared.lengths.tolist() == [32, 0, 32, 0, 0]
    assert (shared.block_tables[jnp.array([0, 2]), :2] == case.block_tables[jnp.array([3, 6]), :2]).all()
    assert rest.lengths.tolist() == [0, 8, 13, 48, 32, 1, 38, 50]
    for seq in SHARING:
        assert (rest.block_tables[seq, :3] == case.block_tables[seq, 2:]).all()
    assert (rest.block_tables[7] == case.block_tables[7]).all()


@pytest.mark.parametrize("wrong", ["shared blocks twice", "shared blocks left out"])
def test_a_wrong_merge_is_noticed(wrong, monkeypatch):
    case = shared_case()
    merge = run.merge_attention

    def merge_wrongly(*parts):
        return merge(*parts[:2], *merge(*parts)) if wrong == "shared blocks twice" else parts[2:]

    monkeypatch.setattr(run, "merge_attention", merge_wrongly)
    out = paged_attention(*case.arrays, prefix_groups=find_groups(case))
    good = within_budget(case, out).all(axis=-1)
    assert np.flatnonzero(~good).tolist() == list(SHARING)


def test_tokens_folded_into_heads():
    """The decode kernel's form for queries that all see the whole sequence: 26 tokens of 3 heads in 2 runs."""
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

    def loss(k_cache, groups):
        out = paged_attention(case.q.at[0].set(jnp.nan), k_cache, *case.arrays[2:], prefix_groups=groups)
        return jnp.sin(out[1:]).sum()

    got, wanted = (jax.grad(loss)(case.k_cache, groups) for groups in (find_groups(case), None))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def groups_of_shapes(*shapes):
    return PrefixGroups(*(jnp.zeros(shape, jnp.int32) for shape in shapes))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (32, r"prefix_groups must be what allocator.prefix_groups\(\) returns.*got int"),
        (jnp.array([16, 32]), "prefix_groups must be what allocator.prefix_groups"),
        (groups_of_shapes(3, 2, 7), r"num_blocks \[seqs\] with seqs=8; got \[\[3\], \[2\], \[7\]\]"),
        (groups_of_shapes(2, 2, 8), r"starts \[groups \+ 1\], first \[groups\]"),
        (groups_of_shapes(1, 0, 8), r"starts \[groups \+ 1\], first \[groups\]"),
    ],
)
def test_errors(groups, message):
    with pytest.raises(ValueError, match=message):
        paged_attention(*shared_case().arrays, prefix_groups=groups)
