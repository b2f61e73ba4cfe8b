"""Partitions shared out by length: the plan, and the kernels that follow it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxpaged import _device, paged_attention, plan_partitions
from jaxpaged._attention import mosaic_gpu, portable
from pallas_kernels import partition_plan
from tests.cases import make_case

pytestmark = pytest.mark.slow

BF16 = jnp.bfloat16
LENGTHS = {
    "one long": (70, 0, 64 * 40, 1, 3),
    "all alike": (640,) * 5,
    "nobody": (0,) * 5,
    "one token each": (1,) * 5,
    "growing": tuple(range(0, 6400, 300)),
}


def make(lengths, total, *, window=None, q_len=1, at_once=0):
    window = None if window is None else jnp.asarray(window, jnp.int32)
    lengths = jnp.asarray(lengths, jnp.int32)
    plan = partition_plan.make(lengths, window, q_len=q_len, total_partitions=total, at_once=at_once)
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
    assert (of == counts[seq_ids]).all()
    working = indices < of
    assert working.tolist() == [True] * starts[-1] + [False] * (total - starts[-1])
    assert sorted(zip(seq_ids[working], indices[working], strict=True)) == [
        (seq, index) for seq in range(seqs) for index in range(counts[seq])
    ]
    tiles = -(-lengths // 64)
    assert (-(-tiles // counts) <= max(partition_plan.LEAST_TILES, -(-tiles.sum() // extra))).all()
    assert (np.diff((tiles // counts)[seq_ids[working]]) <= 0).all()  # the longest begin


def test_a_literal_plan():
    """2, 0, 80, 1 and 9 tiles, together 92, on 5 + 8 partitions: 12 tiles each at most."""
    partitions, starts = make((70, 0, 64 * 80, 1, 64 * 9), 13)
    assert starts.tolist() == [0, 1, 2, 9, 10, 11]
    assert partitions[:, 0].tolist() == [2, 2, 2, 2, 2, 2, 2, 4, 0, 3, 1, 1, 1]
    assert partitions[:, 1].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 1, 2]
    assert partitions[:, 2].tolist() == [7, 7, 7, 7, 7, 7, 7, 1, 1, 1, 1, 1, 1]


def test_a_sequence_as_long_as_the_mean_stays_whole():
    for seqs in (66, 256):
        assert (partitions_of((1000,) * seqs) == 1).all()
        assert partitions_of((1000,) * (seqs - 1) + (100_000,))[-1] >= 40


def partitions_of(lengths):
    plan = partition_plan.default(jnp.asarray(lengths, jnp.int32), None, q_len=1, kv_heads=8, num_sms=132)
    return np.diff(plan.partition_starts)


def test_partitions_that_all_run_at_once():
    """66 of a KV head do on an H100: with a few tiles more each, no program starts when the others end."""
    lengths = (4096,) * 24
    assert np.diff(make(lengths, 90)[1]).tolist() == [3] * 24
    assert partitions_of(lengths).tolist() == [2] * 24
    assert partitions_of((1024,) * 63 + (4096,)).tolist() == [1] * 63 + [3]  # and not 4
    assert partitions_of((256,) * 63 + (2048,)).tolist() == [1] * 63 + [4]  # but for short ones
    assert partitions_of((1024,) * 31 + (4096,)).sum() > 66  # of half as many tiles more it would still be too many
    assert make((1400 * 64,) * 10, 150, at_once=100)[1][-1] == 100  # of 140 tiles, not of 100


def test_a_short_sequence_stays_whole():
    _, starts = make((513, 512, 3), 100)
    assert np.diff(starts).tolist() == [2, 1, 1]


def test_a_window_is_what_there_is_to_share():
    lengths = 64 * 100, 64 * 5
    assert np.diff(make(lengths, 12)[1]).tolist() == [10, 1]
    assert np.diff(make(lengths, 12, window=64 * 12)[1]).tolist() == [2, 1]
    assert np.diff(make(lengths, 12, window=64 * 12, q_len=300)[1]).tolist() == [3, 1]


def test_total():
    def total(seqs, kv_heads):
        lengths = jnp.ones(seqs, jnp.int32)
        return partition_plan.default(lengths, None, q_len=1, kv_heads=kv_heads, num_sms=132).total_partitions

    assert [total(seqs, 8) for seqs in (2, 66, 100)] == [68, 132, 200]
    assert total(8, 1) == 8 + 528


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


@pytest.fixture
def launched(monkeypatch):
    """The plans of the calls that are launched; None where the Hopper kernel is."""
    plans = []
    monkeypatch.setattr(_device, "gpu", lambda: _device.Gpu(132, 9.0))

    def launch(config, interpret, a, plan, falls_back):
        plans.append(plan)
        return a.q, jnp.zeros(a.q.shape[:3])

    monkeypatch.setattr(portable, "launch", launch)
    monkeypatch.setattr(
        mosaic_gpu, "_launch", lambda config, interpret, a, falls_back: launch(None, None, a, None, None)
    )
    return plans


def test_calls_whose_pool_cannot_fill_their_tables_get_a_plan(launched):
    def is_planned(max_blocks, **options):
        q_len = options.pop("q_len", None)
        case = make_case(lengths=(200, 180, 190), max_blocks=max_blocks, q_len=q_len, dtype=BF16)
        launched.clear()
        paged_attention(*case.arrays, **options, implementation="mosaic_gpu")
        (plan,) = launched
        if plan is not None and not options:
            public = plan_partitions(case.lengths, num_kv_heads=2, q_len=case.q.shape[1] if case.q.ndim == 4 else 1)
            assert (plan.partitions == public.partitions).all()
        return plan is not None

    wide = 29  # 464 tokens; the pool has 656 for three sequences
    assert is_planned(wide)
    assert is_planned(wide, q_len=2)
    assert not is_planned(wide - 1)
    assert not is_planned(wide, num_partitions=1)
    assert not is_planned(wide, sliding_window=440)  # nobody sees as much
    assert is_planned(wide, sliding_window=jnp.int32(440))
    assert not is_planned(wide, q_len=40)  # in runs


def test_wide_tables_get_a_plan_unless_the_cache_is_of_8_bits(launched):
    def is_planned(max_blocks, **kind):
        case = make_case(lengths=(200, 180, 190), max_blocks=max_blocks, dtype=BF16, **kind)
        pool = jnp.zeros((2 * 3 * max_blocks, *case.k_cache.shape[1:]), case.k_cache.dtype)  # it could fill them twice
        launched.clear()
        paged_attention(case.q, pool, pool, *case.arrays[3:], implementation="mosaic_gpu")
        (plan,) = launched
        return plan is not None

    assert not is_planned(512)
    assert is_planned(513)
    assert not is_planned(513, cache_dtype=jnp.float8_e4m3fn)


def test_one_sequence_gets_no_plan(launched):
    case = make_case(lengths=(500,), max_blocks=1000, dtype=BF16)
    paged_attention(*case.arrays, implementation="mosaic_gpu")
    paged_attention(*case.arrays, plan=plan_partitions(case.lengths, num_kv_heads=2), implementation="mosaic_gpu")
    assert launched == [None, None]


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
