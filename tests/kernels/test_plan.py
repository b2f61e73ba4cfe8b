"""Partitions shared out by length: the plan, and the kernels that follow it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxpaged import _device, paged_attention, plan_partitions
from jaxpaged._attention import mosaic_gpu
from pallas_kernels import decode_config, partition_plan
from tests.cases import OPTIONS, make_case, within_budget
from tests.kernels.interpret import arguments_of, attend, check
from tests.kernels.lowering import SHAPE

pytestmark = pytest.mark.slow

BF16 = jnp.bfloat16
LENGTHS = {
    "one long": (70, 0, 64 * 40, 1, 3),
    "all alike": (640,) * 5,
    "nobody": (0,) * 5,
    "one token each": (1,) * 5,
    "growing": tuple(range(0, 6400, 300)),
}


def make(lengths, total, *, window=None, q_len=1):
    window = None if window is None else jnp.asarray(window, jnp.int32)
    plan = partition_plan.make(jnp.asarray(lengths, jnp.int32), window, q_len=q_len, total_partitions=total)
    return np.asarray(plan.partitions), np.asarray(plan.partition_starts)


@pytest.mark.parametrize("extra", [1, 3, 16, 100])
@pytest.mark.parametrize("name", LENGTHS)
def test_every_partition_is_somebodys_and_none_has_too_much(name, extra):
    lengths = np.array(LENGTHS[name])
    seqs, total = len(lengths), len(lengths) + extra
    partitions, starts = make(lengths, total)
    counts = np.diff(starts)
    assert starts[0] == 0
    assert starts[-1] <= total
    assert (counts >= 1).all()
    seq_ids, indices, of = partitions.T
    assert (seq_ids[: starts[-1]] == np.repeat(np.arange(seqs), counts)).all()
    assert (seq_ids[starts[-1] :] == seqs - 1).all()
    assert (indices == np.arange(total) - starts[seq_ids]).all()
    assert (of == counts[seq_ids]).all()
    tiles = -(-lengths // 64)
    assert (-(-tiles // counts) <= max(1, -(-tiles.sum() // extra))).all()


def test_a_literal_plan():
    """2, 0, 40, 1 and 1 tiles, together 44, on 5 + 8 partitions: 6 tiles each at most."""
    partitions, starts = make(LENGTHS["one long"], 13)
    assert starts.tolist() == [0, 1, 2, 9, 10, 11]
    assert partitions[:, 0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 2, 3, 4, 4, 4]
    assert partitions[:, 1].tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6, 0, 0, 1, 2]
    assert partitions[:, 2].tolist() == [1, 1, 7, 7, 7, 7, 7, 7, 7, 1, 1, 1, 1]


def test_a_sequence_as_long_as_the_mean_stays_whole():
    for seqs in (8, 64):
        total = decode_config.balanced_partitions(seqs, kv_heads=8, num_sms=132)
        _, starts = make((1000,) * seqs, total)
        assert (np.diff(starts) == 1).all()
        _, starts = make((1000,) * (seqs - 1) + (100_000,), total)
        assert np.diff(starts)[-1] > seqs // 2


def test_a_window_is_what_there_is_to_share():
    _, starts = make(LENGTHS["one long"], 13, window=64)
    assert np.diff(starts).tolist() == [2, 1, 1, 1, 1]  # 70 tokens end 6 past a tile
    _, starts = make((640, 64), 6, window=65, q_len=64)
    assert np.diff(starts).tolist() == [2, 1]


def test_what_is_balanced():
    def total(**shape):
        return decode_config.default_config(**(SHAPE | dict(num_partitions="balanced") | shape)).total_partitions

    assert total() == 16
    assert total(seqs=64) == 128
    assert total(seqs=4) == 12
    assert total(kv_heads=1) == 74
    assert total(seqs=1) is None
    assert total(seqs=40_000) is None
    assert decode_config.default_config(**SHAPE).total_partitions is None


def test_what_is_not_balanced():
    """One sequence, prompts in several runs, and what would need too much memory for partials."""

    def total(**shape):
        case = make_case(**(dict(lengths=(70, 3), max_blocks=8, dtype=BF16) | shape))
        return mosaic_gpu.config_of(arguments_of(case), num_sms=132, num_partitions="balanced").total_partitions

    assert total() is not None
    assert total(lengths=(70,)) is None
    assert total(q_len=40) is None
    many = SHAPE | dict(num_partitions="balanced", group=64, head_dim=256)
    assert decode_config.default_config(**many | dict(seqs=64)).total_partitions == 128
    assert decode_config.default_config(**many | dict(seqs=256)).total_partitions is None


FEW = dict(num_partitions="balanced", num_sms=4)


@pytest.mark.parametrize("name", ["plain", "window", "all"])
def test_options(name):
    """Sequences that are whole, split, and empty."""
    case = make_case(lengths=(0, 1, 500, 70), max_blocks=32, kv_heads=2, dtype=BF16, options=OPTIONS[name])
    check(case, **FEW)


@pytest.mark.parametrize(("q_len", "heads", "head_dim"), [(5, 3, 64), (1, 64, 128), (2, 4, 120)])
def test_rows_and_heads(q_len, heads, head_dim):
    case = make_case(
        lengths=(130, 3), max_blocks=9, q_len=q_len, heads=heads, kv_heads=1, head_dim=head_dim, dtype=BF16
    )
    check(case, zero_fill=True, **FEW)


def test_narrow_caches():
    """Tiles of 128 tokens, where the plan counts 64: of two partitions one has nothing to do."""
    case = make_case(
        lengths=(100, 3, 40), max_blocks=7, kv_heads=1, dtype=BF16, cache_dtype=jnp.int8, scale_shape="token_head"
    )
    check(case, **FEW)


def test_more_partials_than_weights_at_once():
    case = make_case(lengths=(5, 64 * 65), max_blocks=4 * 65, heads=2, kv_heads=1, dtype=BF16)
    plan = partition_plan.make(case.lengths, None, q_len=1, total_partitions=68)
    assert plan.partition_starts.tolist() == [0, 1, 66]
    check(case, num_partitions="balanced")


def test_a_plan_is_made_once_and_passed_to_a_scan(monkeypatch):
    monkeypatch.setattr(_device, "gpu", lambda: _device.Gpu(132, 9.0))
    case = make_case(lengths=(500, 3), max_blocks=32, dtype=BF16)
    q, *cache = case.arrays

    def layers(q, is_made_before, *rest):
        before = plan_partitions(rest[-1], num_kv_heads=2)

        def layer(q, _):
            plan = before if is_made_before else plan_partitions(rest[-1], num_kv_heads=2)
            return paged_attention(q, *rest, plan=plan, implementation="mosaic_gpu"), None

        return jax.lax.scan(layer, q, length=3)[0]

    def plans_inside(is_made_before):
        jaxpr = jax.make_jaxpr(layers, static_argnums=1)(q, is_made_before, *cache)
        (scan,) = (equation for equation in jaxpr.eqns if equation.primitive.name == "scan")
        return str(scan.params["jaxpr"]).count("cumsum[")

    assert plans_inside(True) == 0
    assert plans_inside(False) == 1


def test_the_public_plan_is_that_of_balanced(monkeypatch):
    monkeypatch.setattr(_device, "gpu", lambda: _device.Gpu(132, 9.0))
    case = make_case(lengths=(500, 3), max_blocks=32, dtype=BF16, options=OPTIONS["window"])
    a = arguments_of(case)
    theirs = mosaic_gpu.plan_of(mosaic_gpu.config_of(a, num_sms=132, num_partitions="balanced"), a, "balanced")
    ours = plan_partitions(a.lengths, num_kv_heads=2, sliding_window=a.options.sliding_window)
    assert (ours.partitions == theirs.partitions).all()
    assert (ours.partition_starts == theirs.partition_starts).all()


def test_a_plan_for_other_lengths_and_heads_is_followed():
    """It decides only who works on what."""
    case = make_case(lengths=(0, 1, 500, 70), max_blocks=32, kv_heads=2, dtype=BF16)
    plan = partition_plan.make(jnp.array([900, 1, 30, 64]), None, q_len=1, total_partitions=9)
    assert jnp.diff(plan.partition_starts).tolist() == [4, 1, 1, 1]
    check(case, num_partitions=plan)


def test_a_plan_that_loses_a_partition_is_noticed():
    case = make_case(lengths=(500, 3), max_blocks=32, kv_heads=1, dtype=BF16)
    plan = partition_plan.make(case.lengths, None, q_len=1, total_partitions=4)
    assert plan.partitions[1].tolist() == [0, 1, 2]
    shorter = dataclasses.replace(plan, partitions=plan.partitions.at[1, 1].set(2))  # now it is one left over
    out, _ = attend(case, num_partitions=shorter)
    assert within_budget(case, out).reshape(2, -1).all(axis=1).tolist() == [False, True]


@pytest.mark.parametrize("lengths", [(0, 100_000), (2**31 - 1, 3), (2**31 - 1,) * 40, (1, 2, 3)])
@pytest.mark.parametrize(("window", "q_len"), [(None, 1), (2**31 - 1, 4), (1, 4)])
def test_no_length_and_no_window_breaks_a_plan(lengths, window, q_len):
    partitions, starts = make(lengths, 2 * len(lengths), window=window, q_len=q_len)
    assert (np.diff(starts) >= 1).all()
    assert starts[-1] <= 2 * len(lengths)
    assert (partitions[:, 0] < len(lengths)).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(lengths=jnp.zeros(0, jnp.int32)), r"lengths must be \[seqs\], of one sequence at least; got"),
        (dict(lengths=jnp.ones(2)), r"lengths must be int32; got lengths.dtype=float32"),
        (dict(sliding_window=0), r"sliding_window must be positive; got sliding_window=0"),
        (dict(num_kv_heads=0), r"num_kv_heads must be at least 1; got num_kv_heads=0"),
    ],
)
def test_plan_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_partitions(**(dict(lengths=jnp.array([1, 2]), num_kv_heads=2) | arguments))


def test_a_step_that_takes_a_plan_is_exported():
    def attend(q, *rest):
        *arrays, plan = rest
        return paged_attention(q, *arrays, plan=plan)

    case = make_case(lengths=(30, 3), max_blocks=4)
    plan = plan_partitions(case.lengths, num_kv_heads=case.k_cache.shape[2])
    step = export.deserialize(export.export(jax.jit(attend))(*case.arrays, plan).serialize())
    assert (step.call(*case.arrays, plan) == paged_attention(*case.arrays)).all()
