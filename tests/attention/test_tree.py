"""Tree masks: each drafted token sees the same tokens as if its branch were alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import paged_attention, paged_attention_reference, tree_mask
from jaxpaged._attention.call import check_call
from jaxpaged._attention.kernels import KERNELS
from jaxpaged._attention.plan import make_plan
from jaxpaged._by_kernel import NO_HINTS, choose
from jaxpaged._device import GPUS
from jaxpaged.debug import explain
from tests.cases import OPTIONS, Case, assert_within_budget, make_case, oracle

BOTH = [
    jax.jit(functools.partial(function, return_lse=True)) for function in (paged_attention_reference, paged_attention)
]

#       0 -> 1 -> 3 -> 5        0 -> 2 -> 4        a second root: 6
PARENTS = (-1, 0, 0, 1, 2, 3, -1)
NODES = len(PARENTS)
LENGTHS = (NODES, NODES + 1, 23, 80)


def find_branch(node):
    return [] if node < 0 else [*find_branch(PARENTS[node]), node]


def alone(case):
    """Each token by the reference, at the end of its branch, in a pool where the branch follows the history."""
    outs, lses = [], []
    for node in range(NODES):
        branch = find_branch(node)
        firsts = np.asarray(LENGTHS) - NODES

        def slots(ordinals):  # int [seqs, n]
            ids = np.take_along_axis(np.asarray(case.block_tables), ordinals // 16, axis=1)
            return ids, ordinals % 16

        pools = []
        for pool in (case.k_cache, case.v_cache):
            moved = np.asarray(pool).copy()
            moved[slots(firsts[:, None] + np.arange(len(branch)))] = moved[slots(firsts[:, None] + np.asarray(branch))]
            pools.append(jnp.asarray(moved))
        lengths = jnp.asarray(firsts + len(branch), jnp.int32)
        out, lse = oracle(case.replace(q=case.q[:, node], k_cache=pools[0], v_cache=pools[1], lengths=lengths))
        outs.append(out)
        lses.append(lse)
    return np.stack(outs, axis=1), np.stack(lses, axis=1)


def tree_case(**options):
    case = make_case(lengths=LENGTHS, q_len=NODES, **options)
    # No shared blocks, because the branches overwrite them.
    return case.replace(
        block_tables=case.block_tables.at[3, 0].set(0),
        k_cache=case.k_cache.at[0].set(0.5),
        v_cache=case.v_cache.at[0].set(2.0),
    )


def make_mask(parents=PARENTS):
    mask = tree_mask(jnp.asarray(parents, jnp.int32))
    return jnp.broadcast_to(mask, (len(LENGTHS), *mask.shape))


@pytest.mark.parametrize("name", ["plain", "all", "window of one"])
def test_a_token_sees_its_branch_and_the_history(name):
    case = tree_case(options=OPTIONS[name])
    expected, expected_lse = alone(case)
    for call in BOTH:
        out, lse = call(*case.arrays, **case.options, tree_mask=make_mask())
        np.testing.assert_allclose(out, expected, atol=3e-6)
        np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
        wrong, _ = call(*case.arrays, **case.options, tree_mask=make_mask((-1, 0, 0, 1, 1, 3, -1)))
        differs = np.abs(np.asarray(wrong) - expected).max(axis=(2, 3)) > 1e-3
        # The twin with a mistake: one token has another parent. With a window of one no token sees its ancestors.
        assert differs[:, 4].all() == (name != "window of one")
        assert not np.delete(differs, 4, axis=1).any()


def test_rows_before_the_start_of_a_short_sequence_are_zero():
    """Only rows 5 and 6 of the 7 exist. They are on different branches, so each sees only itself."""
    case = make_case(lengths=(2, *LENGTHS[1:]), q_len=NODES)
    values = case.v_cache[case.block_tables[0, 0], :2]  # [tokens, kv_heads, head_dim]
    for call in BOTH:
        out, _ = call(*case.arrays, tree_mask=make_mask())
        assert not np.asarray(out[0, :5]).any()
        np.testing.assert_allclose(out[0, 5:], jnp.repeat(values, 3, axis=1), atol=1e-6)


def test_a_mask_that_is_no_tree():
    """A query sees exactly the tokens whose bits are set. The last query of each sequence sees token 2, but not
    everything that token 2 sees."""
    lengths, bits = (20, 35), np.asarray([[0, 2, 6, 12], [1, 3, 7, 12]], np.uint32)[..., None]
    case = make_case(lengths=lengths, q_len=4)
    expected, expected_lse = np.zeros((2, 4, 6, 64)), np.zeros((2, 4, 6))
    for seq, query in np.ndindex(2, 4):  # alone, at the end of a sequence of what it sees
        seen = [j for j in range(4) if j == query or bits[seq, query, 0] >> j & 1]
        ordinals = np.asarray([*range(lengths[seq] - 4), *(lengths[seq] - 4 + j for j in seen)])
        tokens = np.asarray(case.block_tables)[seq, ordinals // 16], ordinals % 16
        pools = [np.asarray(pool)[tokens][:, None] for pool in (case.k_cache, case.v_cache)]
        alone = case.q[seq, query][None], *pools, np.arange(len(ordinals))[None], np.asarray([len(ordinals)])
        out, lse = oracle(Case(*alone, options={}))
        expected[seq, query], expected_lse[seq, query] = out[0], lse[0]
    by_position = []  # with a window and ALiBi
    for call in BOTH:
        out, lse = call(*case.arrays, tree_mask=jnp.asarray(bits))
        np.testing.assert_allclose(out, expected, atol=3e-6)
        np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
        by_position.append(call(*case.arrays, **OPTIONS["all"], tree_mask=jnp.asarray(bits))[0])
    np.testing.assert_allclose(*by_position, atol=3e-6)


def test_a_mask_from_parents():
    assert tree_mask(jnp.asarray(PARENTS))[:, 0].tolist() == [1, 3, 5, 11, 21, 43, 64]
    chain = tree_mask(jnp.arange(70) - 1)
    assert chain.shape == (70, 3)
    assert chain[33].tolist() == [2**32 - 1, 3, 0]
    two = tree_mask(jnp.asarray([PARENTS, range(-1, NODES - 1)]))
    assert two[1, :, 0].tolist() == [2 ** (i + 1) - 1 for i in range(NODES)]
    with pytest.raises(ValueError, match=r"parents must be int32 \[\.\.\., n\]; got float32 \[2\]"):
        tree_mask(jnp.zeros(2))
    with pytest.raises(ValueError, match=r"must be before its token; got parent 2 of token \[1, 2\]"):
        tree_mask(jnp.asarray([[-1, 0, 1], [-1, 0, 2]]))


def test_a_chain_equals_no_mask():
    case = make_case(lengths=LENGTHS, q_len=NODES, options=OPTIONS["all"])
    out, _ = BOTH[1](*case.arrays, **case.options, tree_mask=make_mask(range(-1, NODES - 1)))
    assert_within_budget(case, out)


MASK = jnp.zeros((4, NODES, 1), jnp.uint32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(tree_mask=MASK.astype(jnp.int32)), r"uint32 \[seqs, q_len, words\].*got int32 \[4, 7, 1\]"),
        (dict(tree_mask=MASK[..., 0]), r"uint32 \[seqs, q_len, words\].*got uint32 \[4, 7\]"),
        (dict(tree_mask=MASK[:, :5]), r"got uint32 \[4, 5, 1\], .* jaxpaged.tree_mask\(parents\)"),
        (dict(q=jnp.zeros((4, 6, 64)), tree_mask=MASK[:, 0]), r"for q \[seqs, q_len, heads, head_dim\]"),
        (
            dict(q=jnp.zeros((4, 33, 6, 64)), tree_mask=jnp.zeros((4, 33, 1), jnp.uint32)),
            r"a bit for each of the q_len",
        ),
        (
            dict(q=jnp.zeros((9, 6, 64)), query_starts=jnp.arange(5), tree_mask=MASK),
            r"without query_starts, .*; got uint32 \[4, 7, 1\], q.shape=\(9, 6, 64\)",
        ),
    ],
)
@pytest.mark.parametrize("function", [paged_attention, paged_attention_reference])
def test_errors(function, changes, message):
    case = make_case(lengths=LENGTHS, q_len=NODES)
    named = dict(zip(("q", "k_cache", "v_cache", "block_tables", "lengths"), case.arrays, strict=True))
    with pytest.raises(ValueError, match=message):
        function(**named | changes)


@pytest.mark.parametrize("gpu", ["H100", "A100"])
def test_choice_of_the_kernel(gpu):
    """The decode kernel, up to 64 rows, with and without partitions. XLA computes larger ones."""
    q, *arrays = make_case(lengths=LENGTHS, q_len=22, dtype=jnp.bfloat16).arrays
    mask = jnp.ones((4, 22, 1), jnp.uint32)

    def explained(q, **options):
        return explain(q, *arrays, **options, gpu=gpu, tree_mask=mask[:, : q.shape[1]])

    by_name = dict(implementation="mosaic_gpu")
    for options in ({}, dict(num_partitions=2)):
        assert explained(q[:, :21], **options, **by_name).kernel == "paged_decode"  # 63 rows
    call = check_call(q[:, :21], *arrays, tree_mask=mask[:, :21])
    call = dataclasses.replace(call, plan=make_plan(call.lengths, num_kv_heads=call.kv_heads, q_len=21))
    planned = choose(call, GPUS[gpu], NO_HINTS, KERNELS)
    assert (planned.kernel.name, planned.config.partitions) == ("paged_decode", "plan")
    assert explained(jnp.zeros((4, 16, 8, 64), jnp.bfloat16), **by_name).kernel == "paged_decode"  # 64 rows
    with pytest.raises(NotImplementedError, match="a tree_mask of up to 64 rows"):
        explained(q, **by_name)
    assert "a tree_mask of up to 64 rows" in explained(q).reason


def test_trees_that_the_kernels_reject():
    case = make_case(lengths=LENGTHS, q_len=NODES, dtype=jnp.bfloat16)
    arrays, how = case.arrays[1:], dict(implementation="mosaic_gpu", gpu="H100")
    for options in (dict(sliding_window=9), dict(alibi_slopes=jnp.ones(6))):
        with pytest.raises(NotImplementedError, match="do not support a tree_mask with sliding_window or alibi_slopes"):
            explain(case.q, *arrays, tree_mask=MASK, **options, **how)
    assert explain(case.q, *arrays, tree_mask=MASK, sliding_window=9, gpu="H100").implementation == "xla"
