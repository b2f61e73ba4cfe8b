"""Partitions shared out by length: the plan, and the kernels that follow it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged import _device, paged_attention
from jaxpaged._attention.plan import make_plan, plan_step
from jaxpaged._attention.public import planned_attention
from jaxpaged._attention.run import run
from jaxpaged.debug import explain
from pallas_kernels.common import partition_plan
from tests.cases import OPTIONS, assert_within_budget, make_case, within_budget
from tests.kernels.interpret import (
    A100,
    H100,
    attend,
    by_decode,
    check,
    choose,
    make_call,
    partitions_per_seq,
    races_found,
)

pytestmark = pytest.mark.slow

BF16 = jnp.bfloat16
LENGTHS = {
    "one long": (70, 0, 64 * 40, 1, 3),
    "all alike": (640,) * 5,
    "nobody": (0,) * 5,
    "one token each": (1,) * 5,
    "growing": tuple(range(0, 6400, 300)),
}


jitted_make = jax.jit(partition_plan.make, static_argnames=("q_len", "total_partitions", "at_once"))


def make(lengths, total, *, window=None, q_len=1, at_once=0):
    window = None if window is None else np.int32(window)
    plan = jitted_make(np.asarray(lengths, np.int32), window, q_len=q_len, total_partitions=total, at_once=at_once)
    return np.asarray(plan.partitions), partitions_per_seq(plan)


@pytest.mark.parametrize("extra", [1, 3, 16, 100])
@pytest.mark.parametrize("name", LENGTHS)
def test_every_partition_is_somebodys_and_none_has_too_much(name, extra):
    lengths = np.array(LENGTHS[name])
    seqs, total = len(lengths), len(lengths) + extra
    partitions, counts = make(lengths, total)
    assert (counts >= 1).all()
    seq_ids, indices, of = partitions.T
    assert (of == counts[seq_ids]).all()
    working = indices < of
    assert working.tolist() == [True] * counts.sum() + [False] * (total - counts.sum())
    assert sorted(zip(seq_ids[working], indices[working], strict=True)) == [
        (seq, index) for seq in range(seqs) for index in range(counts[seq])
    ]
    tiles = -(-lengths // 64)
    assert (-(-tiles // counts) <= max(partition_plan.LEAST_TILES, -(-tiles.sum() // extra))).all()
    assert (np.diff((tiles // counts)[seq_ids[working]]) <= 0).all()  # the longest begin


def test_a_literal_plan():
    """2, 0, 80, 1 and 9 tiles, together 92, on 5 + 8 partitions: 12 tiles each at most."""
    partitions, counts = make((70, 0, 64 * 80, 1, 64 * 9), 13)
    assert counts.tolist() == [1, 1, 7, 1, 1]
    assert partitions[:, 0].tolist() == [2, 2, 2, 2, 2, 2, 2, 4, 0, 3, 1, 1, 1]
    assert partitions[:, 1].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 1, 2]
    assert partitions[:, 2].tolist() == [7, 7, 7, 7, 7, 7, 7, 1, 1, 1, 1, 1, 1]


def test_a_sequence_as_long_as_the_mean_stays_whole():
    for seqs in (66, 256):
        assert (count_partitions((1000,) * seqs) == 1).all()
        assert count_partitions((1000,) * (seqs - 1) + (100_000,))[-1] >= 40


jitted_default = jax.jit(partition_plan.default, static_argnames=("q_len", "at_once"))


def count_partitions(lengths):
    plan = jitted_default(np.asarray(lengths, np.int32), None, q_len=1, at_once=66)
    return partitions_per_seq(plan)


def test_partitions_that_all_run_at_once():
    """With a few tiles more each, no program starts when the others end."""
    lengths = (4096,) * 24
    assert make(lengths, 90)[1].tolist() == [3] * 24
    assert count_partitions(lengths).tolist() == [2] * 24
    assert count_partitions((1024,) * 63 + (4096,)).tolist() == [1] * 63 + [3]  # and not 4
    assert count_partitions((256,) * 63 + (2048,)).tolist() == [1] * 63 + [4]  # but for short ones
    assert count_partitions((1024,) * 31 + (4096,)).sum() > 66  # of half as many tiles more it would still be too many
    assert make((1400 * 64,) * 10, 150, at_once=100)[1].sum() == 100  # of 140 tiles, not of 100


def test_a_short_sequence_stays_whole():
    assert make((513, 512, 3), 100)[1].tolist() == [2, 1, 1]


def test_a_window_is_what_there_is_to_share():
    lengths = 64 * 100, 64 * 5
    assert make(lengths, 12)[1].tolist() == [10, 1]
    assert make(lengths, 12, window=64 * 12)[1].tolist() == [2, 1]
    assert make(lengths, 12, window=64 * 12, q_len=300)[1].tolist() == [3, 1]


def test_total():
    """For each sequence one, and as many again or as run at once."""
    assert [partition_plan.default_total(seqs, 33) for seqs in (2, 33, 100)] == [35, 66, 200]


@pytest.mark.parametrize(
    ("gpu", "kind", "at_once"),
    [
        (H100, dict(heads=8), 66),
        (H100, dict(heads=66), 66),
        (H100, dict(heads=8, cache_dtype=jnp.int8), 66),
        (H100, dict(heads=4, q_len=4, options=dict(tree_mask=jnp.zeros((2, 4, 1), jnp.uint32))), 66),
        (A100, dict(heads=40), 54),
    ],
)
def test_how_many_partitions_of_a_plan_run_at_once(gpu, kind, at_once):
    """Four programs a SM."""
    a = make_call(make_case(lengths=(3, 50), max_blocks=4, kv_heads=2, dtype=BF16, **kind))
    a = dataclasses.replace(a, k_cache=jax.ShapeDtypeStruct((4, 16, 8, 64), a.k_cache.dtype))
    a = dataclasses.replace(a, q=jax.ShapeDtypeStruct((2, a.q.shape[1], 4 * a.q.shape[2], 64), BF16))
    plan = partition_plan.PartitionPlan(np.zeros((4, 3)))
    assert by_decode(dataclasses.replace(a, plan=plan), gpu).config.at_once == at_once


def test_a_plan_is_made_once_and_passed_to_a_scan(monkeypatch):
    monkeypatch.setattr(_device, "gpu", lambda: _device.Gpu(132, 9.0))
    case = make_case(lengths=(500, 3), max_blocks=32, dtype=BF16)
    q, *cache = case.arrays

    def layers(q, is_made_before, *rest):
        before = make_plan(rest[-1], num_kv_heads=2)

        def layer(q, _):
            plan = before if is_made_before else make_plan(rest[-1], num_kv_heads=2)
            return planned_attention(q, *rest, plan=plan, implementation="mosaic_gpu"), None

        return jax.lax.scan(layer, q, length=3)[0]

    def plans_inside(is_made_before):
        jaxpr = jax.make_jaxpr(layers, static_argnums=1)(q, is_made_before, *cache)
        (scan,) = (equation for equation in jaxpr.eqns if equation.primitive.name == "scan")
        return str(scan.params["jaxpr"]).count("argmax[")

    assert plans_inside(True) == 0
    assert plans_inside(False) == 1


@pytest.mark.parametrize(
    "kind",
    [
        dict(options=OPTIONS["plain"]),
        dict(options=OPTIONS["all"]),
        dict(q_len=6),  # many rows
        dict(q_len=6, options=OPTIONS["all"]),
        dict(head_dim=120),  # in parts
        dict(cache_dtype=jnp.int8, scale_shape="token_head"),
    ],
)
def test_the_kernels_follow(kind):
    """Sequences that are whole, split, and empty; of 10 partitions of the longest the merge takes a few at once."""
    lengths = jnp.array([0, 1, 64 * 80, 64 * 16])
    plan = partition_plan.make(lengths, None, q_len=1, total_partitions=17)
    assert partitions_per_seq(plan).tolist() == [1, 1, 10, 2]
    case = make_case(lengths=(0, 1, 620, 70), max_blocks=39, kv_heads=1, dtype=BF16, **kind)
    check(case, plan=plan, zero_fill="head_dim" in kind)


@pytest.mark.parametrize("kind", [{}, dict(q_len=6), dict(cache_dtype=jnp.int8, scale_shape="token_head")])
def test_the_kernels_follow_a_plan_for_other_lengths(kind):
    """Partitions without a tile, all of a sequence of none."""
    plan = partition_plan.make(jnp.array([64 * 40, 64 * 16, 1]), None, q_len=1, total_partitions=12)
    assert partitions_per_seq(plan).tolist() == [5, 2, 1]
    check(make_case(lengths=(70, 0, 9), max_blocks=5, kv_heads=1, dtype=BF16, **kind), plan=plan)


def test_a_plan_that_loses_a_partition_is_noticed():
    plan = partition_plan.make(jnp.array([64 * 16, 3]), None, q_len=1, total_partitions=5)
    assert plan.partitions[1].tolist() == [0, 1, 2]
    shorter = dataclasses.replace(plan, partitions=plan.partitions.at[1, 1].set(2))  # now it is one left over
    case = make_case(lengths=(150, 3), max_blocks=10, kv_heads=1, dtype=BF16)
    out, _ = attend(case, plan=shorter)
    assert within_budget(case, out).reshape(2, -1).all(axis=1).tolist() == [False, True]


@pytest.mark.parametrize("mapped", ["everything", "queries", "plans"])
def test_mapped_calls_follow_no_plan(mapped):
    """They run side by side: in none of them a program merges what others wrote, which would be a race."""
    cases = [make_case(seed, lengths=(3, 70), max_blocks=5, kv_heads=1, dtype=BF16) for seed in range(2)]
    if mapped != "everything":
        cases[1] = cases[0].replace(q=cases[mapped == "queries"].q)
    a, *_ = singles = list(map(make_call, cases))
    plan = partition_plan.make(jnp.array([3, 64 * 16]), None, q_len=1, total_partitions=5)
    assert partitions_per_seq(plan).tolist() == [1, 2]
    choice = by_decode(dataclasses.replace(a, plan=plan), H100)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    launch = functools.partial(run, dataclasses.replace(choice, interpret=interpret))
    stack = functools.partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
    if mapped == "everything":
        out, _ = jax.vmap(lambda call: launch(dataclasses.replace(call, plan=plan)))(stack(*singles))
    elif mapped == "queries":
        queries = jnp.stack([each.q for each in singles])
        out, _ = jax.vmap(lambda q: launch(dataclasses.replace(a, q=q, plan=plan)))(queries)
    else:
        out, _ = jax.vmap(lambda plan: launch(dataclasses.replace(a, plan=plan)))(stack(plan, plan))
    assert not races_found()
    for case, its in zip(cases, out, strict=True):
        assert_within_budget(case, its[:, 0])


def test_long_calls_get_a_plan():
    def gets_one(max_blocks, q_len=1, **options):
        shape = functools.partial(jax.ShapeDtypeStruct, dtype=BF16)
        pool, sizes = shape((9000, 16, 8, 128)), functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        arrays = shape((64, q_len, 32, 128)), pool, pool, sizes((64, max_blocks)), sizes((64,))
        return explain(*arrays, **options, gpu="H100").num_partitions == "plan"

    assert gets_one(50)  # 800 tokens for 512 pairs of a sequence and a KV head
    assert gets_one(50, q_len=8)
    assert not gets_one(49)
    assert not gets_one(50, num_partitions=1)
    assert not gets_one(50, sliding_window=792)  # nobody sees as much
    assert gets_one(50, sliding_window=jnp.int32(792))
    assert not gets_one(50, q_len=9)  # more than 32 rows, by the prefill kernel
    assert not gets_one(50, q_len=40)  # a prompt


@pytest.mark.parametrize("q_len", [None, 2])
def test_the_plan_of_a_call_is_that_of_a_step(monkeypatch, q_len):
    monkeypatch.setattr(_device, "gpu", lambda: H100)
    case = make_case(lengths=(200, 180, 190), max_blocks=4225, q_len=q_len, dtype=BF16)
    how = dict(num_kv_heads=2, q_len=q_len or 1)
    of_step = plan_step(case.lengths, **how, capacity=4225 * 16)
    plan = partition_plan.default(
        case.lengths, None, q_len=q_len or 1, at_once=choose(make_call(case), H100).config.at_once
    )
    assert (plan.partitions == of_step.partitions).all()
    assert plan_step(case.lengths, **how, capacity=4224 * 16) is None


def test_what_follows_no_plan():
    a = make_call(make_case(lengths=(0, 1, 70), max_blocks=5, kv_heads=1, dtype=BF16))

    def is_followed(total, *, seqs=3, q_len=1, heads=6, causal=True):
        return dataclasses.replace(a, q=np.zeros((seqs, q_len, heads, 64)), causal=causal).can_follow(total)

    assert is_followed(5)
    assert not is_followed(5, causal=False)
    assert not is_followed(5, seqs=1)
    assert not is_followed(5, q_len=40)  # in runs
    assert not is_followed(65536)
    assert not is_followed(30_000, heads=24)  # 24 rows of 64 columns, 184 MB


def test_one_sequence_gets_no_plan():
    case = make_case(lengths=(500,), max_blocks=1000, dtype=BF16)
    assert choose(make_call(case), H100).config.at_once is None
    plan = make_plan(case.lengths, num_kv_heads=2)
    assert choose(dataclasses.replace(make_call(case), plan=plan), H100).config.at_once is None
    two = make_call(make_case(lengths=(500, 3), max_blocks=32, dtype=BF16))
    assert choose(dataclasses.replace(two, plan=plan), H100).config.at_once is not None


@pytest.mark.parametrize("lengths", [(0, 100_000), (2**31 - 1, 3), (2**31 - 64,) * 100, (1, 2, 3)])
@pytest.mark.parametrize(("window", "q_len"), [(None, 1), (2**31 - 1, 4), (1, 4)])
def test_no_length_and_no_window_breaks_a_plan(lengths, window, q_len):
    partitions, counts = make(lengths, 2 * len(lengths), window=window, q_len=q_len)
    assert len(counts) == len(lengths)
    assert (counts >= 1).all()
    assert counts.sum() <= 2 * len(lengths)
    assert (partitions[:, 0] < len(lengths)).all()


def test_a_step_that_takes_a_plan_is_exported():
    def attend(q, *rest):
        *arrays, plan = rest
        return planned_attention(q, *arrays, plan=plan)

    case = make_case(lengths=(30, 3), max_blocks=4)
    plan = make_plan(case.lengths, num_kv_heads=case.k_cache.shape[2])
    step = export.deserialize(export.export(jax.jit(attend))(*case.arrays, plan).serialize())
    assert (step.call(*case.arrays, plan) == paged_attention(*case.arrays)).all()
