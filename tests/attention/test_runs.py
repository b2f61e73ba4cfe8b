"""Query tokens cut into runs: their shapes, and the tokens that each run sees."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged._attention import xla
from jaxpaged._attention.call import check_call
from jaxpaged._attention.runs import cut_uniform, join_uniform
from pallas_kernels.common.interface import AttentionOptions, Call
from tests.attention.conformance import OptionsAlone
from tests.cases import OPTIONS, make_case, within_budget

NONE = ("scale", "sliding_window", "logits_soft_cap", "alibi_slopes", "sinks", "k_scale", "v_scale")


def shaped_call(rows, *, group, seqs=1):
    """A call with q `[*rows, 64]`, packed if q has three axes."""
    q, cache = (np.broadcast_to(np.float32(0), (*shape, 64)) for shape in (rows, (9, 16, rows[-1] // group)))
    starts = np.zeros(seqs + 1, np.int32) if len(rows) == 2 else None
    sizes = np.zeros((seqs, 1), np.int32), np.zeros(seqs, np.int32)
    return Call(q, cache, cache, *sizes, AttentionOptions(np.float32(1)), 64, query_starts=starts)


def shapes_of_runs(q_len, group):
    call = shaped_call((1, q_len, group), group=group)
    run = call.run_tokens()
    return call.num_runs(run), run


@pytest.mark.parametrize(
    ("q_len", "group", "runs"),
    [
        (1, 1, (1, 1)),
        (64, 1, (1, 64)),
        (16, 4, (1, 16)),
        (16, 5, (2, 8)),
        (13, 6, (2, 7)),
        (16, 7, (2, 8)),
        (16, 8, (2, 8)),
        (5, 16, (2, 3)),
        (16, 33, (16, 1)),
        (16, 64, (16, 1)),
        (2, 65, (2, 1)),
        (65, 1, (2, 33)),
        (17, 4, (2, 9)),
        (300, 4, (19, 16)),
        (2049, 4, (129, 16)),
        (8192, 8, (1024, 8)),
    ],
)
def test_runs(q_len, group, runs):
    assert shapes_of_runs(q_len, group) == runs
    num_runs, run = runs
    assert q_len <= num_runs * run < q_len + run
    assert run * group <= 64 or run == 1


@pytest.mark.parametrize("run", [1, 2, 7])
@pytest.mark.parametrize(("tokens", "seqs"), [(1, 1), (5, 3), (3, 5), (9, 4), (4, 4)])
def test_packed_runs_suffice_and_are_never_fewer(tokens, seqs, run):
    shares = [counts for counts in itertools.product(range(tokens + 1), repeat=seqs) if sum(counts) <= tokens]
    needed = max(sum(-(-count // run) for count in counts) for counts in shares)
    assert shaped_call((tokens, 1), group=1, seqs=seqs).num_runs(run) == needed


def arguments(case):
    return check_call(*case.arrays, **(dict.fromkeys(NONE) | case.options))


def test_each_run_is_a_sequence_that_ends_with_the_run():
    case = make_case(lengths=(0, 3, 70), q_len=13, heads=6, kv_heads=1)  # 2 runs of 7, one row of padding
    a = cut_uniform(arguments(case), run=7)
    assert a.lengths.tolist() == [0, 0, 0, 3, 63, 70]
    assert a.q.shape == (6, 7, 6, 64)
    assert (a.q[::2, 0] == 0).all()
    assert (a.q[::2, 1:] == case.q[:, :6]).all()
    assert (a.q[1::2] == case.q[:, 6:]).all()
    assert (a.block_tables[::2] == case.block_tables).all()
    assert (a.block_tables[1::2] == case.block_tables).all()
    assert (join_uniform(a.q, arguments(case)) == case.q).all()


@pytest.mark.parametrize("group", [1, 3, 4, 7, 12, 31, 64])
def test_no_run_is_only_padding(group):
    for q_len in range(1, 3000):
        num_runs, run = shapes_of_runs(q_len, group)
        assert q_len <= num_runs * run < q_len + run


def test_few_rows_are_not_cut():
    a = arguments(make_case(q_len=10, heads=6, kv_heads=1))
    assert cut_uniform(a, run=10) is a


class TestRuns(OptionsAlone):
    case = staticmethod(functools.partial(make_case, lengths=(0, 3, 13, 14, 70), q_len=13, heads=6, kv_heads=1))
    options = "plain", "window", "alibi", "all"
    faults = ()

    def attend(self, case, num_partitions=1):
        a = arguments(case)
        out, lse = xla.attend(cut_uniform(a, run=7), num_partitions=1)
        return join_uniform(out, a), join_uniform(lse, a)


@pytest.mark.parametrize("name", ["plain", "window", "alibi"])
def test_runs_that_all_end_with_the_sequence_are_noticed(name):
    case = make_case(lengths=(30, 70), q_len=13, heads=6, kv_heads=1, options=OPTIONS[name])
    a = arguments(case)
    cut = cut_uniform(a, run=7)
    cut = cut.__class__(**(cut.__dict__ | {"lengths": jnp.repeat(a.lengths, 2)}))
    out = join_uniform(xla.attend(cut, num_partitions=1)[0], a)
    assert not within_budget(case, np.asarray(out))[:, :6].any()


def test_derivatives_of_single_tokens_compute_no_padding():
    case = make_case(lengths=(3, 70, 33, 9), q_len=1)
    q, *others = case.arrays
    options = dict.fromkeys(NONE) | case.options
    calls = check_call(q, *others, **options), check_call(q[:, 0], *others, query_starts=np.arange(5), **options)

    def flops(call):
        results = xla.attend(call, num_partitions=1)
        program = jax.jit(functools.partial(xla._weighted_sums, results[1], None)).lower(call).compile()
        return program.cost_analysis()["flops"]

    uniform, packed = map(flops, calls)
    assert packed < 1.5 * uniform
