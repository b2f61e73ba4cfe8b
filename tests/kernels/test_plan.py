"""Partitions shared out by length: the plan, and the kernels that follow it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import _mosaic_gpu, paged_attention, plan_partitions
from pallas_kernels import decode_config, partition_plan
from tests.cases import OPTIONS, make_case, within_budget
from tests.kernels.interpret import arguments_of, attend, check
from tests.kernels.test_config import SHAPE

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


def balanced(case):
    """How `attend` is told to share out as "balanced" does for these lengths."""
    config = _mosaic_gpu.config_of(arguments_of(case), num_sms=4, num_partitions="balanced")
    return dict(num_partitions=config.num_partitions, cluster=1, total_partitions=config.total_partitions)


@pytest.mark.parametrize("name", ["plain", "window", "all"])
def test_options(name):
    """Sequences that are whole, split, and empty."""
    case = make_case(lengths=(0, 1, 500, 70), max_blocks=32, kv_heads=2, dtype=BF16, options=OPTIONS[name])
    check(case, **balanced(case))


@pytest.mark.parametrize(("q_len", "heads", "head_dim"), [(5, 3, 64), (1, 64, 128), (2, 4, 120)])
def test_rows_and_heads(q_len, heads, head_dim):
    case = make_case(
        lengths=(130, 3), max_blocks=9, q_len=q_len, heads=heads, kv_heads=1, head_dim=head_dim, dtype=BF16
    )
    check(case, zero_fill=True, **balanced(case))


def test_a_plan_is_made_once_and_passed_to_a_scan(monkeypatch):
    monkeypatch.setattr(_mosaic_gpu, "_gpu", lambda: (132, 9.0))
    case = make_case(lengths=(500, 3), max_blocks=32, dtype=BF16)
    q, *cache = case.arrays

    def layers(q, num_partitions, *rest):
        plan = num_partitions or plan_partitions(rest[-1], num_kv_heads=2)

        def layer(q, _):
            return paged_attention(q, *rest, num_partitions=plan, implementation="mosaic_gpu"), None

        return jax.lax.scan(layer, q, length=3)[0]

    def plans_inside(num_partitions):
        jaxpr = jax.make_jaxpr(layers, static_argnums=1)(q, num_partitions, *cache)
        (scan,) = (equation for equation in jaxpr.eqns if equation.primitive.name == "scan")
        return str(scan.params["jaxpr"]).count("cumsum[")

    assert plans_inside(None) == 0
    assert plans_inside("balanced") == 1


def test_a_plan_made_elsewhere_is_followed(monkeypatch):
    """From other lengths, for other KV heads: it decides only who works on what."""
    case = make_case(lengths=(0, 1, 500, 70), max_blocks=32, kv_heads=2, dtype=BF16)
    other = partition_plan.make(jnp.array([900, 1, 30, 64]), None, q_len=1, total_partitions=9)
    assert jnp.diff(other.partition_starts).tolist() == [4, 1, 1, 1]
    monkeypatch.setattr(_mosaic_gpu, "plan_of", lambda *_: other)
    config = _mosaic_gpu.config_of(arguments_of(case), num_sms=4, num_partitions=other)
    assert config.total_partitions == 9
    check(case, num_partitions=config.num_partitions, cluster=1, total_partitions=9)


def test_a_plan_that_loses_a_partition_is_noticed(monkeypatch):
    case = make_case(lengths=(500, 3), max_blocks=32, kv_heads=1, dtype=BF16)
    how = balanced(case)
    plan = partition_plan.make(jnp.asarray(case.lengths), None, q_len=1, total_partitions=how["total_partitions"])
    assert plan.partitions[1].tolist() == [0, 1, 2]
    shorter = dataclasses.replace(plan, partitions=plan.partitions.at[1, 1].set(2))  # now it is one left over
    monkeypatch.setattr(_mosaic_gpu, "plan_of", lambda *_: shorter)
    out, _ = attend(case, **how)
    assert not within_budget(case, out)[0].all()
