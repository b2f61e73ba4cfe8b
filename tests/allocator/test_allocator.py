"""Appending and freeing, as traces with literal free lists, and the refusals of the allocator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import BlockAllocator
from tests.allocator.allocators import assert_same, attend, counts, create_cache, free_ids, make, marks, write


def test_a_trace():
    allocator = make(0, 0, 0, num_blocks=8, max_blocks=3)
    assert free_ids(allocator) == [7, 6, 5, 4, 3, 2, 1]

    # Prompts of 5, 0 and 4 tokens: two blocks, none, one. Tokens are at the ends of their rows.
    allocator, slots, ok = allocator.append(counts(5, 0, 4), q_len=5)
    assert ok.tolist() == [True, True, True]
    assert allocator.block_tables.tolist() == [[1, 2, 0], [0, 0, 0], [3, 0, 0]]
    assert slots.tolist() == [[4, 5, 6, 7, 8], [32] * 5, [32, 12, 13, 14, 15]]
    assert free_ids(allocator) == [7, 6, 5, 4]
    assert int(allocator.num_held) == 3
    assert allocator.positions(3).tolist() == [[2, 3, 4], [-3, -2, -1], [1, 2, 3]]

    # One token each: row 0 has room in its last block, the others need a new one.
    before = allocator
    allocator, slots, ok = before.append(counts(1, 1, 1))
    assert slots.tolist() == [9, 16, 20]
    assert before.append(counts(1, 1, 1), q_len=1)[1].tolist() == [[9], [16], [20]]
    assert allocator.block_tables.tolist() == [[1, 2, 0], [4, 0, 0], [3, 5, 0]]
    assert allocator.lengths.tolist() == [6, 1, 5]
    assert free_ids(allocator) == [7, 6]

    # Rows 0 and 2 end. Their blocks are returned last first, so that row 0's first block is granted next.
    allocator = allocator.free(marks(1, 0, 1))
    assert free_ids(allocator) == [7, 6, 5, 3, 2, 1]
    assert allocator.block_tables.tolist() == [[0, 0, 0], [4, 0, 0], [0, 0, 0]]
    assert allocator.lengths.tolist() == [0, 1, 0]

    # Freeing them again changes nothing.
    assert_same(allocator.free(marks(1, 0, 1)), allocator)


def test_running_out_returns_not_ok_and_leaves_refused_rows_unchanged():
    allocator = make(3, 4, 0, 4, num_blocks=5)
    assert free_ids(allocator) == [4]
    # Row 0 has room. Row 1 gets the last block. Rows 2 and 3 find none.
    after, slots, ok = allocator.append(counts(1, 1, 1, 1))
    assert ok.tolist() == [True, True, False, False]
    assert after.lengths.tolist() == [4, 5, 0, 4]
    assert after.block_tables.tolist() == [[1, 0, 0, 0], [2, 4, 0, 0], [0, 0, 0, 0], [3, 0, 0, 0]]
    assert slots.tolist() == [7, 16, 20, 20]
    assert free_ids(after) == []
    # After a refused row no row that needs a block gets one; rows that need none continue.
    _, _, ok = allocator.append(counts(1, 8, 1, 0), q_len=8)
    assert ok.tolist() == [True, False, False, True]


@pytest.mark.parametrize("count", [-1, 3, 9, 2**31 - 1, -(2**31)])
def test_invalid_counts(count):
    # Negative, above q_len, or more than the table can hold: refused, while the neighbour continues.
    allocator = make(2, 2, num_blocks=9, block_size=2, max_blocks=2)
    append = jax.jit(BlockAllocator.append, static_argnames="q_len")  # without jit the count is concrete
    after, _, ok = append(allocator, counts(count, 1), q_len=9 if count == 3 else 2)
    assert ok.tolist() == [False, True]
    assert after.lengths.tolist() == [2, 3]
    assert after.block_tables[0].tolist() == allocator.block_tables[0].tolist()


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray, list])
def test_known_counts_above_q_len(array):
    allocator, known = make(0, 0), array([0, 6])
    with pytest.raises(ValueError, match=r"at most q_len=1, .* got 6 for sequence 1. Pass q_len=6."):
        allocator.append(known)
    with pytest.raises(ValueError, match=r"Pass q_len=6\."):
        jax.jit(lambda allocator: allocator.append(known, q_len=5))(allocator)
    wanted = allocator.append(counts(1, 0))
    jax.tree.map(np.testing.assert_array_equal, allocator.append(array([True, False])), wanted)  # a mask counts too


SIZES = dict(num_blocks=4, block_size=4, num_seqs=1, max_blocks_per_seq=1)
INTEGERS, FLOATS, MARKS = counts(1, 0), jnp.ones(2), marks(1, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_blocks=1), r"num_blocks must be at least 2; got num_blocks=1"),
        (dict(block_size=0), r"block_size must be at least 1; got block_size=0"),
        (dict(block_size="4"), r"block_size must be an int; got block_size='4'"),
        (dict(num_seqs=0), r"num_seqs must be at least 1; got num_seqs=0"),
        (dict(max_blocks_per_seq=0), r"max_blocks_per_seq must be at least 1; got max_blocks_per_seq=0"),
        (dict(num_blocks=2**27, block_size=16), r"less than 2\^31 tokens; got num_blocks=134217728"),
        (dict(max_blocks_per_seq=2**29), r"less than 2\^31 tokens; got max_blocks_per_seq=536870912"),
        *((dict(windows=windows), "window") for windows in [(), (4, None), (None, 4, None), (0,), (None, 2.5)]),
    ],
)
def test_create_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        BlockAllocator.create(**SIZES | changes)


@pytest.mark.parametrize(
    ("call", "name", "right", "wrong"),
    [
        (BlockAllocator.append, "num_tokens", INTEGERS, FLOATS),
        (lambda a, order: a.append(counts(1, 1), order=order), "order", INTEGERS, MARKS),
        (BlockAllocator.free, "seqs", MARKS, INTEGERS),
        (BlockAllocator.fork, "parents", INTEGERS, FLOATS),
        (BlockAllocator.rollback, "lengths", INTEGERS, FLOATS),
    ],
)
def test_arrays_of_wrong_shape_or_dtype_are_refused(call, name, right, wrong):
    for received in (right[:1], wrong):
        got = rf"got {received.dtype} \[{len(received)}\]"
        with pytest.raises(ValueError, match=rf"{name} must be {right.dtype} \[2\], one for each sequence; {got}"):
            call(make(1, 1), received)


def test_a_width_below_one_is_refused():
    with pytest.raises(ValueError, match="q_len must be at least 1; got q_len=0"):
        make(1, 1).append(counts(1, 1), q_len=0)


def test_slots_of_packed_tokens():
    allocator = make(5, 0, 3, num_blocks=8, max_blocks=2)
    assert allocator.block_tables.tolist() == [[1, 2], [0, 0], [3, 0]]
    assert allocator.slots(counts(2, 0, 0, 2), counts(2, 3, 4, 0)).tolist() == [14, 7, 8, 12]
    # Past the end of a sequence, before its start, in an empty one, and in rows that do not exist.
    assert allocator.slots(counts(0, 0, 0, 1, 3, -1), counts(5, 99, -1, 0, 0, 0)).tolist() == [32] * 6
    with pytest.raises(ValueError, match=r"int32 of one shape; got int32 \[2\] and int32 \[3\]"):
        allocator.slots(counts(0, 1), counts(0, 1, 2))


def test_blocks_are_granted_in_the_order_given():
    # Row 2 first: 2 blocks. Row 3: one. Row 1 needs 2 and finds 1; row 0 needs 1 and does not overtake.
    allocator = make(0, 0, 0, 0, num_blocks=5, block_size=2, max_blocks=3)
    allocator, slots, ok = allocator.append(counts(1, 3, 4, 1), q_len=4, order=counts(9, 8, -5, 0))
    assert ok.tolist() == [False, False, True, True]
    assert allocator.block_tables.tolist() == [[0, 0, 0], [0, 0, 0], [1, 2, 0], [3, 0, 0]]
    assert slots[2].tolist() == [2, 3, 4, 5]


def test_a_reused_block_never_exposes_its_previous_owners_tokens():
    allocator = make(0, 0, num_blocks=6, max_blocks=5)
    cache, allocator = write(create_cache(allocator), allocator, [np.nan] * 20, [], q_len=20)
    cache, allocator = write(cache, allocator.free(marks(1, 0)), [], [1] * 6)
    np.testing.assert_allclose(attend(cache, allocator), [0, 1], rtol=1e-6)


def test_inside_a_scan_with_x64():
    def step(allocator, _):
        allocator, slots, ok = allocator.append(counts(1, 1, 0))
        return allocator.free(marks(1, 0, 0)), (slots, ok)

    with jax.enable_x64(True):
        allocator, (slots, ok) = jax.lax.scan(step, make(0, 0, 0, block_size=2), length=5)
    assert (allocator.lengths.tolist(), allocator.block_tables[1, :3].tolist()) == ([0, 5, 0], [2, 3, 4])
    assert slots[:, 1].tolist() == [4, 5, 6, 7, 8]
    assert ok.all()
    assert {leaf.dtype for leaf in jax.tree.leaves(allocator)} == {jnp.dtype("int32")}
