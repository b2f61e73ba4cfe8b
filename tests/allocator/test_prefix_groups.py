"""`BlockAllocator.prefix_groups`: neighbouring rows that begin with the same full blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import BlockAllocator
from tests.allocator.allocators import counts, make, marks


def allocator_with(rows, lengths=None):
    """An allocator from the blocks of each row, of 4 tokens. By default blocks are full and a new token follows."""
    tables = np.zeros((len(rows), 6), np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row)] = row
    lengths = [4 * len(row) + 1 if row else 0 for row in rows] if lengths is None else lengths
    allocator = make(*[0] * len(rows))
    return dataclasses.replace(allocator, block_tables=jnp.asarray(tables), lengths=counts(*lengths))


def found(rows, lengths=None, **which):
    """(rows, blocks) of each group that shares blocks."""
    return named(allocator_with(rows, lengths).prefix_groups(**which))


def named(groups):
    bounds = zip(groups.starts[:-1].tolist(), groups.starts[1:].tolist(), groups.first.tolist(), strict=True)
    blocks = groups.num_blocks.tolist()
    return [((begin, end), blocks[first]) for begin, end, first in bounds if begin < end and blocks[first]]


def test_a_row_joins_the_group_that_saves_most():
    """All rows begin with two equal blocks. Three of them share five, which saves more for each."""
    rows = [[1, 2, 20], [1, 2, 21], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 22]]
    groups = allocator_with(rows).prefix_groups()
    assert named(groups) == [((0, 2), 2), ((2, 5), 5)]
    assert groups.num_blocks.tolist() == [2, 2, 5, 5, 5, 0]  # the last row is alone
    assert groups.starts.tolist() == [0, 2, 5, 6, 6]


def test_rows_that_share_nothing_are_in_no_group():
    assert found([[9], [1, 2], [1, 2], [7], [8], [3, 4], [3, 5]]) == [((1, 3), 2), ((5, 7), 1)]
    assert found([[1, 2, 3], [4, 2, 3], [5]]) == []
    assert found([[1], [2], [1]]) == []  # not neighbours
    assert found([[1, 2]]) == found([[], []]) == []


def test_empty_rows_do_not_split_a_group():
    groups = allocator_with([[], [1, 2], [], [1, 3], [], [9], []]).prefix_groups()
    assert named(groups) == [((0, 5), 1)]  # empty rows are inside the group but share nothing
    assert groups.num_blocks.tolist() == [0, 1, 0, 1, 0, 0, 0]
    assert groups.first[:1].tolist() == [1]


def test_a_block_with_a_new_token_is_not_shared():
    assert found([[1, 2, 3]] * 2, [12, 12]) == [((0, 2), 2)]
    assert found([[1, 2, 3]] * 2, [13, 13]) == [((0, 2), 3)]
    assert found([[1, 2, 3]] * 2, [12, 12], q_len=4) == [((0, 8), 2)]
    assert found([[1, 2, 3]] * 2, [12, 12], q_len=5) == [((0, 10), 1)]
    assert found([[1, 2, 3]] * 2, [12, 12], q_len=12) == []


def test_packed_rows():
    rows = [[1, 2, 3], [1, 2, 4], [9], [1, 2, 5], [1, 2, 5]]
    starts = counts(2, 4, 7, 7, 12, 13)  # the third row has no new token
    assert found(rows, query_starts=starts) == [((2, 13), 2)]
    starts = counts(0, 6, 9, 10, 15, 16)
    assert found(rows, query_starts=starts) == [((0, 9), 1), ((10, 16), 2)]


def test_forks_share_their_full_blocks_until_they_end():
    allocator, _, _ = make(10, 0, 0, 0).fork(counts(-1, 0, 0, 0))
    allocator, _, _ = allocator.append(counts(1, 1, 1, 1))
    step = jax.jit(BlockAllocator.prefix_groups)
    assert named(step(allocator)) == [((0, 4), 2)]
    assert named(step(allocator.free(marks(0, 1, 0, 0)))) == [((0, 4), 2)]
    assert named(step(allocator.free(marks(1, 1, 1, 0)))) == []


def test_random_tables():
    """Members are neighbours with equal, full blocks that hold no new token. Groups are in order."""
    rng, num_grouped = np.random.default_rng(0), 0
    step = jax.jit(BlockAllocator.prefix_groups)
    for _ in range(60):
        rows = [rng.integers(1, 3, rng.choice([0, 3, 5])).tolist() for _ in range(9)]
        allocator = allocator_with(rows, [max(4 * len(row) - int(rng.integers(0, 4)), 0) for row in rows])
        groups = step(allocator)
        starts, first, shared = map(np.asarray, (groups.starts, groups.first, groups.num_blocks))
        assert (np.diff(starts) >= 0).all()
        assert starts[-1] == 9
        full, grouped = (np.asarray(allocator.lengths) - 1) // 4, []
        for begin, end, leader in zip(starts[:-1], starts[1:], first, strict=True):
            members = [row for row in range(begin, end) if shared[row]]
            assert len(members) != 1
            for row in members:
                assert shared[row] == shared[leader] <= full[row]
                assert rows[row][: shared[row]] == rows[leader][: shared[row]]
            assert not members or not any(rows[row] for row in range(begin, end) if not shared[row])
            grouped += members
        assert grouped == np.flatnonzero(shared).tolist()
        num_grouped += len(grouped)
    assert num_grouped > 60


def test_a_group_of_layers_with_a_window_shares_nothing():
    allocator, _, _ = make(9, 0, windows=(None, 8)).fork(counts(-1, 0))
    assert named(allocator.group(0).prefix_groups()) == [((0, 2), 2)]
    assert named(allocator.group(1).prefix_groups()) == []
    with pytest.raises(ValueError, match=r"the allocator has 2 groups; call it on allocator.group\(i\)"):
        allocator.prefix_groups()


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (dict(q_len=0), "q_len"),
        (dict(query_starts=counts(0, 1)), r"query_starts must be int32 \[3\].*got int32 \[2\]"),
        (dict(query_starts=jnp.zeros(3)), r"query_starts must be int32 \[3\].*got float32 \[3\]"),
    ],
)
def test_errors(which, message):
    with pytest.raises(ValueError, match=message):
        make(1, 1).prefix_groups(**which)
