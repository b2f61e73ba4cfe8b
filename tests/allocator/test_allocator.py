"""Appending and freeing, as traces with literal free lists."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import BlockAllocator, KVCache, paged_attention
from jaxpaged.ops import write_kv
from tests.allocator.allocators import assert_same, counts, free_ids


def test_a_trace():
    allocator = BlockAllocator.create(num_blocks=8, block_size=4, num_seqs=3, max_blocks_per_seq=3)
    assert free_ids(allocator) == [7, 6, 5, 4, 3, 2, 1]

    # Prompts of 5, 0 and 4 tokens: two blocks, none, one. Tokens stand at the end of their rows.
    allocator, slots, ok = allocator.append(counts(5, 0, 4), q_len=5)
    assert ok.tolist() == [True, True, True]
    assert allocator.block_tables.tolist() == [[1, 2, 0], [0, 0, 0], [3, 0, 0]]
    assert slots.tolist() == [[4, 5, 6, 7, 8], [32] * 5, [32, 12, 13, 14, 15]]
    assert free_ids(allocator) == [7, 6, 5, 4]
    assert int(allocator.num_held) == 3

    # One token each: row 0 has room in its last block, the others need a new one.
    before = allocator
    allocator, slots, ok = before.append(counts(1, 1, 1))
    assert slots.tolist() == [9, 16, 20]
    assert before.append(counts(1, 1, 1), q_len=1)[1].tolist() == [[9], [16], [20]]
    assert allocator.block_tables.tolist() == [[1, 2, 0], [4, 0, 0], [3, 5, 0]]
    assert allocator.lengths.tolist() == [6, 1, 5]
    assert free_ids(allocator) == [7, 6]

    # Rows 0 and 2 end. Their blocks go back last first, so that row 0's first block is the next to go.
    allocator = allocator.free(jnp.asarray([True, False, True]))
    assert free_ids(allocator) == [7, 6, 5, 3, 2, 1]
    assert allocator.block_tables.tolist() == [[0, 0, 0], [4, 0, 0], [0, 0, 0]]
    assert allocator.lengths.tolist() == [0, 1, 0]

    # Freeing them again changes nothing.
    assert_same(allocator.free(jnp.asarray([True, False, True])), allocator)


def test_free_undoes_append():
    allocator = BlockAllocator.create(num_blocks=9, block_size=2, num_seqs=3, max_blocks_per_seq=4)
    allocator, _, _ = allocator.append(counts(3, 1, 2), q_len=3)
    allocator = allocator.free(jnp.asarray([False, True, False]))
    before = free_ids(allocator)
    grown, _, _ = allocator.append(counts(0, 7, 0), q_len=7)
    assert free_ids(grown.free(jnp.asarray([False, True, False]))) == before


def test_running_out_is_a_value_and_leaves_the_refused_as_they_were():
    allocator = BlockAllocator.create(num_blocks=5, block_size=4, num_seqs=4, max_blocks_per_seq=4)
    allocator, _, _ = allocator.append(counts(3, 4, 0, 4), q_len=4)
    assert free_ids(allocator) == [4]
    # Row 0 has room. Row 1 takes the last block. Rows 2 and 3 find none.
    after, slots, ok = allocator.append(counts(1, 1, 1, 1))
    assert ok.tolist() == [True, True, False, False]
    assert after.lengths.tolist() == [4, 5, 0, 4]
    assert after.block_tables.tolist() == [[1, 0, 0, 0], [2, 4, 0, 0], [0, 0, 0, 0], [3, 0, 0, 0]]
    assert slots.tolist() == [7, 16, 20, 20]
    assert free_ids(after) == []
    # Behind a refused row nobody overtakes, but whoever needs no block goes on.
    _, _, ok = allocator.append(counts(1, 8, 1, 0), q_len=8)
    assert ok.tolist() == [True, False, False, True]


def test_all_or_nothing_for_each_sequence():
    allocator = BlockAllocator.create(num_blocks=4, block_size=4, num_seqs=1, max_blocks_per_seq=8)
    after, slots, ok = allocator.append(counts(13), q_len=13)
    assert ok.tolist() == [False]
    assert slots.tolist() == [[16] * 13]
    assert_same(after, allocator)


@pytest.mark.parametrize("count", [-1, 3, 9, 2**31 - 1, -(2**31)])
def test_counts_that_cannot_be(count):
    # Negative, above q_len, or more than the table can hold: refused, while the neighbour goes on.
    allocator = BlockAllocator.create(num_blocks=9, block_size=2, num_seqs=2, max_blocks_per_seq=2)
    allocator, _, _ = allocator.append(counts(2, 2), q_len=2)
    append = jax.jit(BlockAllocator.append, static_argnames="q_len")  # outside of jit the count is known
    after, _, ok = append(allocator, counts(count, 1), q_len=9 if count == 3 else 2)
    assert ok.tolist() == [False, True]
    assert after.lengths.tolist() == [2, 3]
    assert after.block_tables[0].tolist() == allocator.block_tables[0].tolist()


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray, list])
def test_known_counts_above_q_len(make):
    allocator = BlockAllocator.create(num_blocks=9, block_size=2, num_seqs=2, max_blocks_per_seq=4)
    with pytest.raises(ValueError, match=r"at most q_len=1, .* got 6 for sequence 1. Pass q_len=6."):
        allocator.append(make([0, 6]))
    known = make([0, 6])
    with pytest.raises(ValueError, match=r"Pass q_len=6\."):
        jax.jit(lambda allocator: allocator.append(known, q_len=5))(allocator)
    assert allocator.append(make([True, False]))[2].all()


def test_the_old_one_can_be_used_again():
    old, _, _ = BlockAllocator.create(num_blocks=9, block_size=2, num_seqs=2, max_blocks_per_seq=4).append(counts(1, 1))
    new, first, _ = old.append(counts(3, 0), q_len=3)
    again, second, _ = old.append(counts(3, 0), q_len=3)
    assert (first == second).all()
    assert_same(new, again)


def test_positions_are_those_of_the_newest_tokens():
    allocator = BlockAllocator.create(num_blocks=9, block_size=2, num_seqs=2, max_blocks_per_seq=4)
    allocator, _, _ = allocator.append(counts(5, 1), q_len=5)
    assert allocator.positions(3).tolist() == [[2, 3, 4], [-2, -1, 0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda a: BlockAllocator.create(num_blocks=1, block_size=4, num_seqs=1, max_blocks_per_seq=1),
            r"num_blocks must be at least 2; got num_blocks=1",
        ),
        (
            lambda a: BlockAllocator.create(num_blocks=4, block_size=0, num_seqs=1, max_blocks_per_seq=1),
            r"block_size must be at least 1; got block_size=0",
        ),
        (
            lambda a: BlockAllocator.create(num_blocks=4, block_size=4, num_seqs=0, max_blocks_per_seq=1),
            r"num_seqs must be at least 1; got num_seqs=0",
        ),
        (
            lambda a: BlockAllocator.create(num_blocks=4, block_size=4, num_seqs=1, max_blocks_per_seq=0),
            r"max_blocks_per_seq must be at least 1; got max_blocks_per_seq=0",
        ),
        (
            lambda a: BlockAllocator.create(num_blocks=2**27, block_size=16, num_seqs=1, max_blocks_per_seq=1),
            r"less than 2\^31 tokens; got num_blocks=134217728",
        ),
        (lambda a: a.append(counts(1)), r"num_tokens must be int32 \[2\], one for each sequence; got int32 \[1\]"),
        (lambda a: a.append(jnp.ones(2)), r"num_tokens must be int32 \[2\].*got float32 \[2\]"),
        (lambda a: a.append(counts(1, 1), q_len=0), r"q_len must be at least 1; got q_len=0"),
        (lambda a: a.free(counts(1, 0)), r"seqs must be bool \[2\].*got int32 \[2\]"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(BlockAllocator.create(num_blocks=4, block_size=4, num_seqs=2, max_blocks_per_seq=2))


def test_slots_of_packed_tokens():
    allocator = BlockAllocator.create(num_blocks=8, block_size=4, num_seqs=3, max_blocks_per_seq=2)
    allocator, _, _ = allocator.append(counts(5, 0, 3), q_len=5)
    assert allocator.block_tables.tolist() == [[1, 2], [0, 0], [3, 0]]
    assert allocator.slots(counts(2, 0, 0, 2), counts(2, 3, 4, 0)).tolist() == [14, 7, 8, 12]
    # Past the end of a sequence, before its start, of an empty one, and of none at all.
    assert allocator.slots(counts(0, 0, 0, 1, 3, -1), counts(5, 99, -1, 0, 0, 0)).tolist() == [32] * 6
    with pytest.raises(ValueError, match=r"int32 of one shape; got int32 \[2\] and int32 \[3\]"):
        allocator.slots(counts(0, 1), counts(0, 1, 2))


def test_blocks_are_granted_in_the_order_given():
    allocator = BlockAllocator.create(num_blocks=5, block_size=2, num_seqs=4, max_blocks_per_seq=3)
    # Row 2 first: 2 blocks. Row 3: one. Row 1 needs 2 and finds 1; row 0 needs 1 and does not overtake.
    allocator, slots, ok = allocator.append(counts(1, 3, 4, 1), q_len=4, order=counts(9, 8, -5, 0))
    assert ok.tolist() == [False, False, True, True]
    assert allocator.block_tables.tolist() == [[0, 0, 0], [0, 0, 0], [1, 2, 0], [3, 0, 0]]
    assert slots[2].tolist() == [2, 3, 4, 5]
    with pytest.raises(ValueError, match=r"order must be int32 \[4\]"):
        allocator.append(counts(1, 1, 1, 1), order=counts(0))


def test_an_order_is_a_permutation_of_the_rows():
    random = np.random.default_rng(0)
    start = BlockAllocator.create(num_blocks=15, block_size=2, num_seqs=8, max_blocks_per_seq=6)
    start, _, _ = start.append(jnp.asarray(random.integers(0, 4, 8), jnp.int32), q_len=4)
    append, refusals = jax.jit(BlockAllocator.append, static_argnames="q_len"), 0
    for _ in range(5):
        num_tokens, order = (jnp.asarray(random.integers(0, high, 8), jnp.int32) for high in (5, 6))  # with ties
        rows = jnp.argsort(order, stable=True)
        tables, lengths = start.block_tables[rows], start.lengths[rows]
        permuted = dataclasses.replace(start, block_tables=tables, lengths=lengths)
        expected, slots, ok = append(permuted, num_tokens[rows], q_len=5)
        ordered, ordered_slots, ordered_ok = append(start, num_tokens, q_len=5, order=order)
        refusals += int((~ok).sum())
        assert (ordered_ok[rows] == ok).all()
        assert (ordered_slots[rows] == slots).all()
        assert (ordered.block_tables[rows] == expected.block_tables).all()
        assert free_ids(ordered) == free_ids(expected)
        assert ordered.broken_invariants() == ()
    assert 0 < refusals < 40


def test_a_block_handed_on_never_shows_its_last_owners_tokens():
    allocator = BlockAllocator.create(num_blocks=6, block_size=4, num_seqs=2, max_blocks_per_seq=5)
    cache = KVCache.create(num_blocks=6, block_size=4, num_kv_heads=1, head_dim=32, dtype="float32")
    poison = jnp.full((2, 20, 1, 32), jnp.nan)
    allocator, slots, ok = allocator.append(counts(20, 0), q_len=20)
    assert ok.all()
    cache = write_kv(cache, poison, poison, slots)
    allocator = allocator.free(jnp.asarray([True, False]))
    allocator, slots, _ = allocator.append(counts(0, 6), q_len=6)
    good = jnp.ones((2, 6, 1, 32))
    cache = write_kv(cache, good, good, slots)
    out = paged_attention(jnp.ones((2, 1, 32)), cache.k, cache.v, allocator.block_tables, allocator.lengths)
    np.testing.assert_allclose(out[1], 1.0, rtol=1e-6)
    assert (out[0] == 0).all()


def test_dtypes_hold_with_64_bits_switched_on():
    with jax.enable_x64(True):
        allocator = BlockAllocator.create(num_blocks=20, block_size=2, num_seqs=3, max_blocks_per_seq=6)
        step = lambda i, a: a.append(counts(1, 1, 0))[0].free(jnp.asarray([True, False, False]))  # noqa: E731
        allocator = jax.lax.fori_loop(0, 5, step, allocator)
    assert allocator.lengths.tolist() == [0, 5, 0]
    assert {leaf.dtype for leaf in jax.tree.leaves(allocator)} == {jnp.dtype("int32")}


def test_inside_scan_and_while_loop():
    start = BlockAllocator.create(num_blocks=20, block_size=2, num_seqs=3, max_blocks_per_seq=6)

    def step(allocator, _):
        allocator, slots, ok = allocator.append(counts(1, 1, 0))
        return allocator, (slots, ok)

    scanned, (slots, ok) = jax.jit(lambda a: jax.lax.scan(step, a, length=5))(start)
    assert slots[:, 0].tolist() == [2, 3, 6, 7, 10]
    assert ok.all()
    looped = jax.lax.fori_loop(0, 5, lambda i, a: step(a, None)[0], start)
    assert_same(scanned, looped)
    assert dataclasses.is_dataclass(looped)
