"""Groups of layers: each has a table, all share one pool, and windows free the blocks that they have passed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxpaged import PrefixCache
from jaxpaged.ops import write_kv
from tests.allocator import allocators
from tests.allocator.allocators import attend, counts, create_cache, free_ids, marks


def make(*windows, num_seqs=1, num_blocks=24, max_blocks=8):
    return allocators.make(*[0] * num_seqs, num_blocks=num_blocks, max_blocks=max_blocks, windows=windows)


def grown(allocator, *lengths, q_len=1):
    """Appends chunks of `q_len` tokens up to these lengths."""
    while (missing := counts(*lengths) - allocator.lengths).any():
        allocator, _, ok = allocator.append(jnp.minimum(missing, q_len), q_len=q_len)
        assert ok.all()
    return allocator


def held(allocator):
    """The blocks in each row of the tables of all groups."""
    rows, is_entry = allocator.rows, allocator.is_entry(allocator.lengths)
    return [row[entries].tolist() for row, entries in zip(np.asarray(rows), np.asarray(is_entry), strict=True)]


def test_each_group_gets_its_own_blocks():
    allocator, slots, ok = make(None, 8, num_seqs=2).append(counts(5, 2), q_len=5)
    assert allocator.block_tables[..., :2].tolist() == [[[1, 2], [5, 0]], [[3, 4], [6, 0]]]
    assert slots[0].tolist() == [[4, 5, 6, 7, 8], [96, 96, 96, 20, 21]]
    assert slots[1].tolist() == [[12, 13, 14, 15, 16], [96, 96, 96, 24, 25]]
    assert sorted(free_ids(allocator.free(marks(1, 1)))) == sorted(free_ids(make(None)))
    assert allocator.slots(counts(0, 1), counts(4, 2)).tolist() == [[8, 96], [16, 96]]  # row 1 has two tokens
    assert allocator.append(counts(1, 0))[1].tolist() == [[9, 96], [17, 96]]  # one token each: no token axis


def test_a_single_group_has_no_group_axis():
    allocator = make(None)
    assert (allocator.num_passed, allocator.windows, allocator.block_tables.shape) == (None, (None,), (1, 8))
    assert allocator.group(0) is allocator


def test_a_window_frees_the_blocks_that_it_has_passed():
    allocator = make(None, 6)  # the query at position 9 is the first that sees nothing of the first block
    assert held(grown(allocator, 9)) == [[1, 3, 5], [2, 4, 6]]
    assert held(grown(allocator, 10)) == [[1, 3, 5], [4, 6]]
    assert held(grown(allocator, 13)) == [[1, 3, 5, 2], [4, 6, 7]]  # 2 is allocated again
    assert held(grown(allocator, 14)) == [[1, 3, 5, 2], [6, 7]]
    assert grown(allocator, 14).broken_invariants() == ()


@pytest.mark.parametrize("window", [1, 2, 4, 5, 9, 100])
def test_a_window_holds_at_most_one_extra_block(window):
    def step(allocator, _):
        allocator, _, _ = allocator.append(counts(1))
        return allocator, allocator.num_passed[0, 0]

    _, num_passed = jax.lax.scan(step, make(window, max_blocks=20), length=69)
    lengths = np.arange(1, 70)
    assert (num_passed == np.maximum(lengths - window, 0) // 4).all()  # up to the block that the newest token sees
    assert (-(-lengths // 4) - num_passed <= -(-(window - 1) // 4) + 1).all()


def test_passed_blocks_are_free_within_the_same_call_even_if_it_is_refused():
    allocator = grown(make(6, num_blocks=4), 12)
    assert held(allocator) == [[2, 3]]  # one of three is free
    allocator, _, ok = allocator.append(counts(1))
    assert (held(allocator), ok.tolist()) == ([[2, 3, 1]], [True])
    allocator, _, ok = allocator.append(counts(8), q_len=8)
    assert (held(allocator), ok.tolist(), int(allocator.num_free)) == ([[3, 1]], [False], 1)
    assert int(allocator.lengths[0]) == 13


def test_rollback_cannot_go_behind_a_window():
    allocator = grown(make(None, 6), 14)  # the window has passed the first two blocks
    assert allocator.num_passed.tolist() == [[0], [2]]
    for length, fine in ((14, True), (13, True), (12, False), (1, False), (0, True), (15, False)):
        after, _, ok = allocator.rollback(counts(length))
        assert ok.tolist() == [fine], length
        assert after.broken_invariants() == ()
        assert after.lengths.tolist() == [length if fine else 14]


def test_layers_attend_with_their_group():
    allocator, positions = grown(make(None, 6, num_seqs=2), 14, 3), jnp.arange(14, dtype=jnp.int32)
    values = jnp.broadcast_to(positions[:, None, None].astype(jnp.float32), (14, 1, 8))
    for index, mean in enumerate([6.5, 10.5]):
        group = allocator.group(index)
        slots = group.slots(jnp.zeros(14, jnp.int32), positions)
        cache = write_kv(create_cache(group), jnp.zeros((14, 1, 8)), values, slots)
        assert attend(cache, group, sliding_window=group.windows[0])[0] == pytest.approx(mean)
    for wrong in (2, -1):
        with pytest.raises(ValueError, match=f"a group is from 0 to 1.*got {wrong}"):
            allocator.group(wrong)


def test_an_exported_function_keeps_the_windows():
    allocator = make(None, 6)
    exported = export.export(jax.jit(lambda a: a.append(counts(3), q_len=3)[0]))(allocator)
    after = export.deserialize(exported.serialize()).call(allocator)
    assert after.windows == allocator.windows
    assert held(after) == [[1], [2]]


def test_text_shows_every_group():
    allocator = grown(make(None, 6, num_seqs=2), 14, 0)
    full, _, window, _ = (" ".join(map(str, ids)) for ids in held(allocator))
    assert str(allocator).endswith(f"seq 0: 14 tokens in blocks {full} | {window}")


def cached(*windows):
    """One sequence of 14 tokens, cached block by block as it grew, then freed; and its tokens, with 6 more."""
    allocator, tokens = make(*windows), jnp.arange(20, dtype=jnp.int32)[None]
    prefix_cache = PrefixCache.create(num_blocks=24, block_size=4, num_groups=len(windows))
    for end in range(4, 15):
        allocator = grown(allocator, end)
        prefix_cache, allocator = prefix_cache.insert(allocator, jnp.roll(tokens, -end, axis=1))
    return prefix_cache, allocator.free(marks(1)), tokens


def match(prefix_cache, allocator, tokens):
    prefix_cache, allocator, num_cached = prefix_cache.match_prefix(allocator, tokens, counts(tokens.shape[1]))
    assert allocator.broken_invariants() == ()
    return allocator, int(num_cached[0])


def test_a_found_prefix_has_the_blocks_that_windows_need():
    prefix_cache, allocator, tokens = cached(None, 6)
    after, num_cached = match(prefix_cache, allocator, tokens)
    assert num_cached == 12
    assert after.num_passed.tolist() == [[0], [1]]  # the next token sees positions from 7 on
    assert [len(ids) for ids in held(after)] == [3, 2]
    again, num_cached = match(prefix_cache, allocator, tokens[:, :9])  # passed blocks are cached too
    assert (num_cached, again.num_passed.tolist()) == (8, [[0], [0]])


def test_a_prefix_is_cut_to_where_windows_have_their_blocks():
    prefix_cache, allocator, tokens = cached(None, 6)
    held_before, _ = match(prefix_cache, allocator, tokens)
    third = held(held_before)[1][-1]  # the window's block of positions 8 to 11
    pool = dataclasses.replace(allocator.pool, cached_at=allocator.pool.cached_at.at[third].set(-1))
    after, num_cached = match(prefix_cache, dataclasses.replace(allocator, pool=pool), tokens)
    assert num_cached == 8
    assert held(after)[0] == held(held_before)[0][:2]


def test_without_a_full_group_a_prefix_is_found_while_its_windows_are_cached():
    prefix_cache, allocator, tokens = cached(6)
    after, num_cached = match(prefix_cache, allocator, tokens)
    assert (num_cached, len(held(after)[0])) == (12, 2)
