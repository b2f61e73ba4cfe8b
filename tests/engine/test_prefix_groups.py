"""Blocks that requests share are read once: which seats form groups, how a step is sorted, and the saved reads."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import AttentionStep, BlockAllocator, KVCache, SamplingParams, _device
from jaxpaged._attention import run
from jaxpaged._engine.defaults import chosen_least_saved_reads
from jaxpaged._scheduler.records import StepPlan
from jaxpaged._slice.prefix_groups import SeatGroups, find_groups, sort_by_group
from jaxpaged.ops import PrefixGroups
from tests.toy_model import BLOCK_SIZE, counting, create_cache, finish, shared_engine

pytestmark = pytest.mark.usefixtures("idle_engines")
NONE = 8  # no seat leads


def make_allocator(rows, lengths=None):
    """`rows`: the blocks of each seat, of 4 tokens each and full by default."""
    tables = np.zeros((len(rows), max(1, *map(len, rows))), np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row)] = row
    allocator = BlockAllocator.create(
        num_blocks=64, block_size=4, num_seqs=len(rows), max_blocks_per_seq=tables.shape[1]
    )
    held = np.bincount(tables[tables > 0], minlength=64)
    pool = dataclasses.replace(allocator.pool, extra_holders=jnp.asarray(np.maximum(held - 1, 0), jnp.int32))
    lengths = [4 * len(row) for row in rows] if lengths is None else lengths
    return dataclasses.replace(
        allocator, block_tables=jnp.asarray(tables), lengths=jnp.asarray(lengths, jnp.int32), pool=pool
    )


def found(*args):
    groups = jax.jit(find_groups)(make_allocator(*args))
    return groups.leaders.tolist(), groups.num_blocks.tolist(), int(groups.num_saved_reads)


def test_seats_form_the_groups_that_save_most():
    """All seats begin with two equal blocks. Three share five, which saves more reads. Another block of two seats
    saves nothing."""
    system = [1, 2]
    rows = [
        [*system, 3, 4, 5, 10, 11],
        [*system, 6, 20],
        [*system, 3, 4, 5, 12],
        [],
        [30, 31, 32],  # its own
        [*system, 6, 21],
        [*system, 22],
        [*system, 3, 4, 5, 13],
    ]
    assert found(rows) == ([0, 1, 0, NONE, NONE, 1, 1, 0], [5, 2, 5, 0, 0, 2, 2, 5], 4 * (2 * 5 + 2 * 2))


@pytest.mark.parametrize(
    ("rows", "leaders"),
    [
        # Two prompts were computed at once, and a third request matches blocks of both.
        ([[1, 2, 3], [4, 5, 6], [1, 5, 3, 7]], [3, 3, 3]),
        # The leader's block is at another place in the table.
        ([[1, 2, 3], [4, 1, 2], [5, 6, 2]], [3, 3, 3]),
        ([[], []], [2, 2]),
    ],
)
def test_only_common_prefixes_are_shared(rows, leaders):
    assert found(rows) == (leaders, [0] * len(rows), 0)


def test_a_partly_filled_block_is_not_shared():
    assert found([[1, 2, 3], [1, 2, 3]], [12, 12]) == ([0, 0], [3, 3], 12)
    assert found([[1, 2, 3], [1, 2, 3]], [11, 11]) == ([0, 0], [2, 2], 8)
    assert found([[1], [1]], [3, 3]) == ([2, 2], [0, 0], 0)


def sort(counts, leaders, num_blocks, padding=0):
    """A step in which each seat has `counts` rows, sorted."""
    starts = np.cumsum([0, *counts], dtype=np.int32)
    rows = jnp.arange(starts[-1] + padding, dtype=jnp.int32)
    seats = jnp.asarray([*np.repeat(np.arange(len(counts)), counts), *[len(counts)] * padding], jnp.int32)
    step = StepPlan(
        **dict.fromkeys(field.name for field in dataclasses.fields(StepPlan))
        | dict(tokens=10 + rows, positions=20 + rows, slots=30 + rows, seats=seats, query_starts=jnp.asarray(starts))
        | dict(last=jnp.asarray(np.maximum(starts[1:] - 1, 0)))
    )
    groups = SeatGroups(jnp.asarray(leaders, jnp.int32), jnp.asarray(num_blocks, jnp.int32), jnp.int32(0))
    return jax.jit(sort_by_group)(step, groups)


def test_a_step_of_single_tokens_is_sorted_by_group():
    step, seats, groups, num_saved_reads = sort([1] * 6, [0, 1, 6, 0, 1, 0], [3, 2, 0, 3, 2, 3])
    assert seats.tolist() == step.seats.tolist() == [0, 3, 5, 1, 4, 2]
    for values, first in ((step.tokens, 10), (step.positions, 20), (step.slots, 30)):
        assert values.tolist() == [first + seat for seat in seats.tolist()]
    assert groups.num_blocks.tolist() == [3, 3, 3, 2, 2, 0]
    assert groups.starts.tolist() == [0, 3, 5, 5]  # room for three groups of six seats
    assert groups.first[:2].tolist() == [0, 3]
    assert int(num_saved_reads) == 2 * 3 + 2


def test_the_rows_of_a_seat_stay_together():
    """One seat of the first group has no row, the second group has no rows, and the third has one: no read is saved."""
    counts, leaders = [1, 0, 3, 2, 0, 0, 0, 2], [0, 1, 8, 0, 1, 0, 6, 6]
    step, seats, groups, num_saved_reads = sort(counts, leaders, [3, 2, 0, 3, 2, 3, 4, 4], padding=2)
    assert seats.tolist() == [0, 3, 5, 1, 4, 6, 7, 2]
    assert step.seats.tolist() == [0, 3, 3, 7, 7, 2, 2, 2, 8, 8]
    for values, first in ((step.tokens, 10), (step.positions, 20), (step.slots, 30)):
        assert values.tolist() == [first + row for row in (0, 4, 5, 6, 7, 1, 2, 3, 8, 9)]
    assert step.query_starts.tolist() == [0, 1, 3, 3, 3, 3, 3, 5, 8]
    assert [step.last[seat] for seat in (0, 2, 3, 7)] == [0, 7, 2, 4]
    assert groups.starts.tolist() == [0, 3, 3, 5, 5]
    assert groups.first[:3].tolist() == [0, 3, 5]
    assert groups.num_blocks.tolist() == [3, 3, 3, 2, 2, 4, 4, 0]
    assert int(num_saved_reads) == 3


def test_a_step_in_which_all_seats_share():
    _, seats, groups, num_saved_reads = sort([1] * 4, [0, 1, 0, 1], [2, 5, 2, 5])
    assert seats.tolist() == [0, 2, 1, 3]
    assert (groups.starts.tolist(), groups.num_blocks.tolist()) == ([0, 2, 4], [2, 2, 5, 5])
    assert int(num_saved_reads) == 7


def test_stats_count_the_saved_reads_of_tokens():
    engine = shared_engine(prefix_cache=True)
    with counting(engine) as counts:
        engine.generate([[*range(22)]], SamplingParams(max_tokens=6, seed=7, n=4))
    # The first request is a token ahead: in five steps all read its five blocks, in one step the other three do.
    assert counts.num_saved_reads == 5 * (3 * 20) + 2 * 20
    with counting(engine) as counts:
        engine.generate([[*range(22)], [*range(22, 44)]], SamplingParams(max_tokens=6))
    assert counts.num_saved_reads == 0


def test_a_group_continues_after_one_of_its_requests_ends():
    engine = shared_engine(prefix_cache=True)
    request = engine.add_request([*range(7, 29)], SamplingParams(max_tokens=26, n=4))
    engine.step()
    engine.step()
    assert engine._runner.state.seat_groups.num_blocks.tolist().count(20 // BLOCK_SIZE) == 4
    engine.abort(request, 0)  # the leader
    engine.step()
    groups = engine._runner.state.seat_groups
    members = np.flatnonzero(groups.num_blocks)
    assert len(members) == 3
    assert set(groups.leaders[members].tolist()) == {members[0]}
    engine.abort(request)
    finish(engine)
    assert not engine._runner.state.seat_groups.num_blocks.any()


@pytest.mark.parametrize("own", [None, "sliding_window", "num_partitions"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_layers_read_shared_blocks_once_unless_they_attend_on_their_own(is_packed, own, monkeypatch):
    calls = []
    monkeypatch.setattr(run, "_attend", lambda call, *_, attend=run._attend: calls.append(call) or attend(call, *_))
    rows = [[1, 2, 10], [1, 2, 11], [3]]
    allocator = make_allocator(rows, [10, 12, 3])
    cache = create_cache(64, num_kv_heads=2, head_dim=16)
    cache = dataclasses.replace(cache, k=jax.random.normal(jax.random.key(0), cache.k.shape), v=cache.v + 1)
    groups = PrefixGroups(*(jnp.array(x, jnp.int32) for x in ([0, 2, 2], [0, 0], [2, 2, 0])))
    slots = allocator.slots(jnp.arange(3, dtype=jnp.int32), allocator.lengths - 1)
    options = {} if own is None else {own: 2}
    heads = jax.random.normal(jax.random.key(1), (3, 2, 16))

    def attended(groups):
        starts = jnp.arange(4, dtype=jnp.int32) if is_packed else None
        step = AttentionStep.create(allocator, slots, query_starts=starts, prefix_groups=groups)
        return step.attend(heads, heads, heads, cache, **options)[1]

    plain = attended(None)
    assert len(calls) == 1
    np.testing.assert_allclose(attended(groups), plain, atol=1e-5)
    assert len(calls) == (3 if own is None else 2)


def test_the_least_saved_reads_by_gpu(monkeypatch):
    cache = KVCache.create(num_blocks=2, block_size=16, num_kv_heads=8, head_dim=128, num_layers=2)
    assert chosen_least_saved_reads([cache]) is None  # a CPU
    monkeypatch.setattr(_device, "is_gpu", lambda: True)
    monkeypatch.setattr(_device, "gpu", lambda: _device.named("H200"))
    assert chosen_least_saved_reads([cache]) == 16384
    monkeypatch.setattr(_device, "gpu", lambda: _device.named("A100"))
    assert chosen_least_saved_reads([cache]) is None
