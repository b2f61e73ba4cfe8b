"""Fork and rollback, as traces with literal tables and free lists."""

import numpy as np
import pytest

from jaxpaged.ops import copy_blocks
from tests.allocator.allocators import assert_same, attend, counts, create_cache, free_ids, make, marks, write


def pairs(copies) -> list[tuple[int, int]]:
    """(source, destination) of each copy that is not padding."""
    return [(s, d) for s, d in zip(*(ids.tolist() for ids in copies), strict=True) if d]


def test_parallel_sampling_shares_full_blocks_and_copies_the_last():
    allocator = make(6, 0, 0, 4)
    assert allocator.block_tables[:, :2].tolist() == [[1, 2], [0, 0], [0, 0], [3, 0]]
    forked, copies, ok = allocator.fork(counts(-1, 0, 0, 3))
    assert ok.tolist() == [True] * 4
    assert forked.block_tables[:, :2].tolist() == [[1, 2], [1, 4], [1, 5], [3, 0]]
    assert forked.lengths.tolist() == [6, 6, 6, 4]
    assert pairs(copies) == [(2, 4), (2, 5)]
    assert forked.pool.num_holders().tolist()[:6] == [0, 3, 1, 1, 1, 1]
    assert forked.broken_invariants() == ()
    # A shared block is freed with its last holder.
    freed = forked.free(marks(1, 1, 0, 0))
    assert free_ids(freed) == [11, 10, 9, 8, 7, 6, 4, 2]
    freed = freed.free(marks(0, 0, 1, 0))
    assert free_ids(freed) == [11, 10, 9, 8, 7, 6, 4, 2, 5, 1]
    assert freed.broken_invariants() == ()


def test_beam_search_reorders_in_place_and_a_sole_child_copies_nothing():
    # Four beams with a common full block. Beams 0 and 3 swap rows, 1 has two children, 2 has none.
    allocator, _, _ = make(4, 0, 0, 0).fork(counts(0, 0, 0, 0))
    allocator, _, _ = allocator.append(counts(2, 2, 2, 2), q_len=2)
    assert allocator.block_tables[:, :2].tolist() == [[1, 2], [1, 3], [1, 4], [1, 5]]
    after, copies, ok = allocator.fork(counts(3, 1, 1, 0), replace=True)
    assert ok.all()
    assert after.block_tables[:, :2].tolist() == [[1, 5], [1, 3], [1, 6], [1, 2]]
    assert pairs(copies) == [(3, 6)]
    assert free_ids(after) == [11, 10, 9, 8, 7, 4]
    assert after.broken_invariants() == ()


def test_with_too_few_blocks_for_copies_later_rows_are_refused_and_none_inherits():
    # Rows 0 and 1 inherit from each other. The single free block is enough for row 2.
    _, copies, ok = make(3, 2, 1, num_blocks=5).fork(counts(1, 0, 0), replace=True)
    assert ok.all()
    assert pairs(copies) == [(1, 4)]
    # It is not enough for two copies. Row 0 is then not replaced, so row 1 cannot inherit and all need copies.
    after, copies, ok = make(3, 2, 1, 1, num_blocks=6).fork(counts(1, 0, 0, 0), replace=True)
    assert ok.tolist() == [True, False, False, False]
    assert pairs(copies) == [(2, 5)]
    assert after.block_tables[:, 0].tolist() == [5, 2, 3, 4]
    assert after.lengths.tolist() == [2, 2, 1, 1]
    assert free_ids(after) == [1]
    assert after.broken_invariants() == ()


@pytest.mark.parametrize(
    ("parents", "replace", "ok"),
    [
        ((0, 0, 0), False, [True, False, True]),  # row 1 is occupied
        ((0, 0, 0), True, [True, True, True]),
        ((-1, 1, -1), False, [True, True, True]),
        ((-2, 3, 7), True, [False, False, False]),
        ((2, 1, 2), False, [False, True, True]),
        ((2, 1, 2), True, [True, True, True]),  # a copy of an empty row is empty
    ],
)
def test_invalid_parents(parents, replace, ok):
    allocator = make(5, 3, 0)
    after, _, got = allocator.fork(counts(*parents), replace=replace)
    assert got.tolist() == ok
    assert after.broken_invariants() == ()
    for i, fine in enumerate(ok):
        if not fine or parents[i] in (-1, i):
            assert after.block_tables[i].tolist() == allocator.block_tables[i].tolist()
            assert after.lengths[i] == allocator.lengths[i]


def test_rollback_frees_the_blocks_beyond():
    allocator = make(14, 9)
    assert allocator.block_tables.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
    after, copies, ok = allocator.rollback(counts(5, 8))
    assert ok.all()
    assert pairs(copies) == []
    assert after.block_tables.tolist() == [[1, 2, 0, 0], [5, 6, 0, 0]]
    assert after.lengths.tolist() == [5, 8]
    assert free_ids(after) == [11, 10, 9, 8, 7, 4, 3]
    assert after.broken_invariants() == ()
    assert free_ids(after.rollback(counts(0, 8))[0]) == [11, 10, 9, 8, 7, 4, 3, 2, 1]


@pytest.mark.parametrize("length", [-1, 7, 2**31 - 1, -(2**31)])
def test_invalid_lengths(length):
    allocator = make(6, 3)
    after, _, ok = allocator.rollback(counts(length, 1))
    assert ok.tolist() == [False, True]
    assert after.lengths.tolist() == [6, 1]
    assert after.broken_invariants() == ()


def test_rollback_into_a_shared_block_copies_it():
    allocator, _, _ = make(8, 0).fork(counts(0, 0))
    after, copies, ok = allocator.rollback(counts(8, 6))
    assert ok.all()
    assert pairs(copies) == [(2, 3)]
    assert after.block_tables[:, :2].tolist() == [[1, 2], [1, 3]]
    assert after.pool.num_holders().tolist()[:4] == [0, 2, 1, 1]
    # Both at once: each gets its own copy, and the block that both leave is freed.
    after, copies, ok = allocator.rollback(counts(7, 6))
    assert pairs(copies) == [(2, 3), (2, 4)]
    assert 2 in free_ids(after)
    assert after.broken_invariants() == ()
    # Without a free block for the copy the row does not change.
    full, _, _ = make(8, 0, num_blocks=3).fork(counts(0, 0))
    after, copies, ok = full.rollback(counts(8, 6))
    assert ok.tolist() == [True, False]
    assert_same(after, full)


@pytest.mark.parametrize("copying", [True, False])
def test_a_child_reads_its_parents_tokens_and_writes_its_own(copying):
    allocator = make(0, 0, 0)
    cache, allocator = write(create_cache(allocator), allocator, [1, 2, 3, 4, 5, 6], [], [])
    allocator, copies, _ = allocator.fork(counts(0, 0, 0))
    cache = copy_blocks(cache, *copies) if copying else cache
    cache, allocator = write(cache, allocator, [7], [14], [21, 22, 23])
    expected = [28 / 7, 35 / 7, (21 + 66) / 9]
    close = np.allclose(attend(cache, allocator), expected, rtol=1e-6)
    assert close is copying  # without the copies the children read unwritten slots
