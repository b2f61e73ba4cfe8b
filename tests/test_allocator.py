"""The allocator, as traces with literal free lists, and against a plain Python model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxpaged import BlockAllocator, KVCache, paged_attention, write_kv


def counts(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def free_ids(allocator: BlockAllocator) -> list[int]:
    """The free blocks, the next one last."""
    return allocator.pool.free_list[: int(allocator.num_free)].tolist()


def assert_same(left: BlockAllocator, right: BlockAllocator) -> None:
    assert (left.block_tables == right.block_tables).all()
    assert (left.lengths == right.lengths).all()
    assert free_ids(left) == free_ids(right)


def test_a_trace():
    allocator = BlockAllocator.create(num_blocks=8, block_size=4, num_seqs=3, max_blocks=3)
    assert free_ids(allocator) == [7, 6, 5, 4, 3, 2, 1]

    # Prompts of 5, 0 and 4 tokens: two blocks, none, one. Tokens stand at the end of their rows.
    allocator, slots, ok = allocator.append(counts(5, 0, 4), max_tokens=5)
    assert ok.tolist() == [True, True, True]
    assert allocator.block_tables.tolist() == [[1, 2, 0], [0, 0, 0], [3, 0, 0]]
    assert slots.tolist() == [[4, 5, 6, 7, 8], [32] * 5, [32, 12, 13, 14, 15]]
    assert free_ids(allocator) == [7, 6, 5, 4]
    assert int(allocator.num_held) == 3

    # One token each: row 0 has room in its last block, the others need a new one.
    allocator, slots, ok = allocator.append(counts(1, 1, 1))
    assert slots.tolist() == [[9], [16], [20]]
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
    allocator = BlockAllocator.create(num_blocks=9, block_size=2, num_seqs=3, max_blocks=4)
    allocator, _, _ = allocator.append(counts(3, 1, 2), max_tokens=3)
    allocator = allocator.free(jnp.asarray([False, True, False]))
    before = free_ids(allocator)
    grown, _, _ = allocator.append(counts(0, 7, 0), max_tokens=7)
    assert free_ids(grown.free(jnp.asarray([False, True, False]))) == before


def test_running_out_is_a_value_and_leaves_the_refused_as_they_were():
    allocator = BlockAllocator.create(num_blocks=5, block_size=4, num_seqs=4, max_blocks=4)
    allocator, _, _ = allocator.append(counts(3, 4, 0, 4), max_tokens=4)
    assert free_ids(allocator) == [4]
    # Row 0 has room. Row 1 takes the last block. Rows 2 and 3 find none.
    after, slots, ok = allocator.append(counts(1, 1, 1, 1))
    assert ok.tolist() == [True, True, False, False]
    assert after.lengths.tolist() == [4, 5, 0, 4]
    assert after.block_tables.tolist() == [[1, 0, 0, 0], [2, 4, 0, 0], [0, 0, 0, 0], [3, 0, 0, 0]]
    assert slots.tolist() == [[7], [16], [20], [20]]
    assert free_ids(after) == []
    # Behind a refused row nobody overtakes, but whoever needs no block goes on.
    _, _, ok = allocator.append(counts(1, 8, 1, 0), max_tokens=8)
    assert ok.tolist() == [True, False, False, True]


def test_all_or_nothing_for_each_sequence():
    allocator = BlockAllocator.create(num_blocks=4, block_size=4, num_seqs=1, max_blocks=8)
    after, slots, ok = allocator.append(counts(13), max_tokens=13)
    assert ok.tolist() == [False]
    assert slots.tolist() == [[16] * 13]
    assert_same(after, allocator)


@pytest.mark.parametrize("count", [-1, 3, 9, 2**31 - 1, -(2**31)])
def test_counts_that_cannot_be(count):
    # Negative, above max_tokens, or more than the table can hold: refused, while the neighbour goes on.
    allocator = BlockAllocator.create(num_blocks=9, block_size=2, num_seqs=2, max_blocks=2)
    allocator, _, _ = allocator.append(counts(2, 2), max_tokens=2)
    after, _, ok = allocator.append(counts(count, 1), max_tokens=9 if count == 3 else 2)
    assert ok.tolist() == [False, True]
    assert after.lengths.tolist() == [2, 3]
    assert after.block_tables[0].tolist() == allocator.block_tables[0].tolist()


def test_keeping_the_old_one_is_a_snapshot():
    old, _, _ = BlockAllocator.create(num_blocks=9, block_size=2, num_seqs=2, max_blocks=4).append(counts(1, 1))
    new, first, _ = old.append(counts(3, 0), max_tokens=3)
    again, second, _ = old.append(counts(3, 0), max_tokens=3)
    assert (first == second).all()
    assert_same(new, again)


def test_positions_are_those_of_the_newest_tokens():
    allocator = BlockAllocator.create(num_blocks=9, block_size=2, num_seqs=2, max_blocks=4)
    allocator, _, _ = allocator.append(counts(5, 1), max_tokens=5)
    assert allocator.positions(3).tolist() == [[2, 3, 4], [-2, -1, 0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: BlockAllocator.create(1, 4, 1, 1), r"num_blocks must be at least 2; got num_blocks=1"),
        (lambda a: BlockAllocator.create(4, 0, 1, 1), r"block_size must be at least 1; got block_size=0"),
        (lambda a: BlockAllocator.create(4, 4, 0, 1), r"num_seqs must be at least 1; got num_seqs=0"),
        (lambda a: BlockAllocator.create(4, 4, 1, 0), r"max_blocks must be at least 1; got max_blocks=0"),
        (lambda a: BlockAllocator.create(2**27, 16, 1, 1), r"less than 2\^31 tokens; got num_blocks=134217728"),
        (lambda a: a.append(counts(1)), r"num_tokens must be int32 \[2\], one for each sequence; got int32 \[1\]"),
        (lambda a: a.append(jnp.ones(2)), r"num_tokens must be int32 \[2\].*got float32 \[2\]"),
        (lambda a: a.append(counts(1, 1), max_tokens=0), r"max_tokens must be at least 1; got max_tokens=0"),
        (lambda a: a.free(counts(1, 0)), r"seqs must be bool \[2\].*got int32 \[2\]"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(BlockAllocator.create(num_blocks=4, block_size=4, num_seqs=2, max_blocks=2))


def test_a_block_handed_on_never_shows_its_last_owners_tokens():
    allocator = BlockAllocator.create(num_blocks=6, block_size=4, num_seqs=2, max_blocks=5)
    cache = KVCache.create(num_blocks=6, block_size=4, num_kv_heads=1, head_dim=32)
    poison = jnp.full((2, 20, 1, 32), jnp.nan)
    allocator, slots, ok = allocator.append(counts(20, 0), max_tokens=20)
    assert ok.all()
    cache = write_kv(cache, poison, poison, slots)
    allocator = allocator.free(jnp.asarray([True, False]))
    allocator, slots, _ = allocator.append(counts(0, 6), max_tokens=6)
    good = jnp.ones((2, 6, 1, 32))
    cache = write_kv(cache, good, good, slots)
    out = paged_attention(jnp.ones((2, 1, 32)), cache.k, cache.v, allocator.block_tables, allocator.lengths)
    np.testing.assert_allclose(out[1], 1.0, rtol=1e-6)
    assert (out[0] == 0).all()


# Random interleavings against a model in dicts and lists, written for clarity; eager, under jit, and under vmap.


class Model:
    def __init__(self, num_blocks: int, block_size: int, num_seqs: int, max_blocks: int):
        self.block_size, self.max_blocks = block_size, max_blocks
        self.free = list(range(num_blocks - 1, 0, -1))
        self.blocks: list[list[int]] = [[] for _ in range(num_seqs)]
        self.lengths = [0] * num_seqs

    def append(self, numbers: list[int], max_tokens: int) -> tuple[list[list[int]], list[bool]]:
        slots: list[list[int]] = []
        oks: list[bool] = []
        short = False  # whether a row before was refused for want of blocks
        for i, number in enumerate(numbers):
            length = self.lengths[i] + number
            needed = -(-length // self.block_size) - len(self.blocks[i])
            legal = 0 <= number <= max_tokens and length <= self.max_blocks * self.block_size
            ok = legal and (needed == 0 or (not short and needed <= len(self.free)))
            short = short or (legal and not ok)
            oks.append(ok)
            slots.append([])
            if ok:
                self.blocks[i] += [self.free.pop() for _ in range(needed)]
                slots[i] = [self.slot(i, t) for t in range(self.lengths[i], length)]
                self.lengths[i] = length
        return slots, oks

    def slot(self, row: int, token: int) -> int:
        return self.blocks[row][token // self.block_size] * self.block_size + token % self.block_size

    def free_rows(self, marked: list[bool]) -> None:
        for i in reversed(range(len(marked))):
            if marked[i]:
                self.free += reversed(self.blocks[i])
                self.blocks[i], self.lengths[i] = [], 0


_append = jax.jit(BlockAllocator.append, static_argnames="max_tokens")
_free = jax.jit(BlockAllocator.free)
_free_four = jax.jit(jax.vmap(BlockAllocator.free))


@functools.partial(jax.jit, static_argnames="max_tokens")
def _append_four(allocators, num_tokens, max_tokens):
    return jax.vmap(lambda a, n: a.append(n, max_tokens=max_tokens))(allocators, num_tokens)


class AllocatorMachine(RuleBasedStateMachine):
    SHAPES = ((4, 1, 1, 3), (9, 4, 3, 3), (40, 2, 6, 8), (500, 16, 4, 200))  # few, since each compiles

    @initialize(shape=st.sampled_from(SHAPES))
    def create(self, shape: tuple[int, int, int, int]) -> None:
        self.num_blocks = shape[0]
        self.model = Model(*shape)
        self.make(shape)

    def make(self, shape: tuple[int, int, int, int]) -> None:
        self.allocator = BlockAllocator.create(*shape)

    def do_append(self, numbers: list[int], max_tokens: int) -> tuple[list[list[int]], list[bool]]:
        self.allocator, slots, ok = _append(self.allocator, counts(*numbers), max_tokens=max_tokens)
        return slots.tolist(), ok.tolist()

    def do_free(self, marked: list[bool]) -> None:
        self.allocator = _free(self.allocator, jnp.asarray(marked))

    @rule(data=st.data(), max_tokens=st.sampled_from([1, 7, 40]))
    def append(self, data: st.DataObject, max_tokens: int) -> None:
        one = st.integers(-1, max_tokens + 1) | st.just(max_tokens)
        rows = len(self.model.lengths)
        numbers = data.draw(st.lists(one, min_size=rows, max_size=rows))
        expected_slots, expected_ok = self.model.append(numbers, max_tokens)
        slots, ok = self.do_append(numbers, max_tokens)
        assert ok == expected_ok
        for row, new in zip(slots, expected_slots, strict=True):
            padding = max_tokens - len(new)
            assert row[padding:] == new
            assert all(slot >= self.num_blocks * self.model.block_size for slot in row[:padding])

    @precondition(lambda self: any(self.model.lengths))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        rows = len(self.model.lengths)
        marked = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
        self.model.free_rows(marked)
        self.do_free(marked)

    @invariant()
    def agrees(self) -> None:
        self.compare(self.allocator)

    def compare(self, allocator: BlockAllocator) -> None:
        assert allocator.lengths.tolist() == self.model.lengths
        assert free_ids(allocator) == self.model.free
        for row, blocks in zip(allocator.block_tables.tolist(), self.model.blocks, strict=True):
            assert row == blocks + [0] * (len(row) - len(blocks))
        held = [block for blocks in self.model.blocks for block in blocks]
        assert sorted([0, *held, *free_ids(allocator)]) == list(range(self.num_blocks))


class VmappedMachine(AllocatorMachine):
    """Four independent pools under vmap; the others do the same a little differently, the second is compared."""

    def make(self, shape: tuple[int, int, int, int]) -> None:
        self.allocator = jax.tree.map(lambda x: jnp.stack([x] * 4), BlockAllocator.create(*shape))

    def do_append(self, numbers: list[int], max_tokens: int) -> tuple[list[list[int]], list[bool]]:
        others = np.asarray([numbers[::-1], numbers, [0] * len(numbers), numbers], np.int32)
        self.allocator, slots, ok = _append_four(self.allocator, jnp.asarray(others), max_tokens)
        return slots[1].tolist(), ok[1].tolist()

    def do_free(self, marked: list[bool]) -> None:
        others = jnp.asarray([marked[::-1], marked, marked, [True] * len(marked)])
        self.allocator = _free_four(self.allocator, others)

    @invariant()
    def agrees(self) -> None:
        self.compare(jax.tree.map(lambda x: x[1], self.allocator))


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=40, stateful_step_count=40)
TestVmapped = VmappedMachine.TestCase
TestVmapped.settings = settings(max_examples=8, stateful_step_count=15)


def test_dtypes_hold_with_64_bits_switched_on():
    with jax.enable_x64(True):
        allocator = BlockAllocator.create(num_blocks=20, block_size=2, num_seqs=3, max_blocks=6)
        step = lambda i, a: a.append(counts(1, 1, 0))[0].free(jnp.asarray([True, False, False]))  # noqa: E731
        allocator = jax.lax.fori_loop(0, 5, step, allocator)
    assert allocator.lengths.tolist() == [0, 5, 0]
    assert {leaf.dtype for leaf in jax.tree.leaves(allocator)} == {jnp.dtype("int32")}


def test_inside_scan_and_while_loop():
    start = BlockAllocator.create(num_blocks=20, block_size=2, num_seqs=3, max_blocks=6)

    def step(allocator, _):
        allocator, slots, ok = allocator.append(counts(1, 1, 0))
        return allocator, (slots, ok)

    scanned, (slots, ok) = jax.jit(lambda a: jax.lax.scan(step, a, length=5))(start)
    assert slots[:, 0, 0].tolist() == [2, 3, 6, 7, 10]
    assert ok.all()
    looped = jax.lax.fori_loop(0, 5, lambda i, a: step(a, None)[0], start)
    assert_same(scanned, looped)
    assert dataclasses.is_dataclass(looped)
