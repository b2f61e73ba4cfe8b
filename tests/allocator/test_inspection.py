"""Invariants, and an allocator as text and as a drawing."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import PrefixCache
from jaxpaged._allocator import inspection
from jaxpaged._allocator.plot import FREE, NULL, WAITING, block_owners
from jaxpaged.debug import plot_blocks
from tests.allocator.allocators import counts, make, marks


def test_an_allocator_as_text():
    allocator = make(6, 0, 3, num_blocks=12)
    allocator, _, _ = allocator.fork(counts(-1, 0, -1))
    assert str(allocator) == (
        "BlockAllocator: 4 of 11 blocks of 4 tokens held (1 shared), 7 free (0 with a cached prefix)\n"
        "  seq 0: 6 tokens in blocks 1 2\n"
        "  seq 1: 6 tokens in blocks 1 4\n"
        "  seq 2: 3 tokens in blocks 3"
    )
    assert float(allocator.utilization) == pytest.approx(4 / 11)
    assert float(allocator.fragmentation) == pytest.approx(5 / 16)
    assert int(allocator.num_shared) == 1
    many = str(make(*[1] * 20, num_blocks=30))
    assert many.endswith("and 4 more sequences")
    jax.jit(lambda a: str(a) and a.num_held)(allocator)  # the str of a traced allocator works


# The numbers of a healthy allocator that break each invariant: (field, index, number).
BREAKS = {
    "lengths_fit_their_rows": [("lengths", 0, 99)],
    "no_sequence_names_a_block_twice": [("block_tables", (0, 0), 2)],
    "entries_beyond_a_sequence_are_null": [("block_tables", (0, 3), 2)],
    "null_block_is_never_handed_out": [("block_tables", (0, 0), 0)],
    "free_and_held_and_null_are_all": [("block_tables", (0, 0), 9)],
    "table_entries_are_blocks": [("block_tables", (0, 0), 99)],
    "windows_have_not_passed_what_they_show": [("num_passed", (0, 0), 1)],
    "holders_are_the_entries": [("pool.extra_holders", 1, 1)],
    "free_blocks_have_no_holders": [("pool.extra_holders", 9, 1)],
    "no_block_is_free_twice": [("pool.free_list", 0, 10)],
    "free_list_holds_blocks": [("pool.free_list", 0, -1)],
    "free_count_is_within_the_pool": [("pool.num_free", (), 12)],
    "waiting_are_among_the_free": [("pool.num_waiting", (), 11)],
    "bottom_is_within_the_ring": [("pool.bottom", (), 12)],
    "no_partly_filled_block_is_cached": [("pool.cached_at", 2, 12)],
    "free_blocks_are_not_cached_as_held": [("pool.cached_at", 9, 12)],
    "waiting_blocks_know_their_indices": [("pool.num_waiting", (), 1), ("pool.cached_at", 11, 5)],
    "a_partly_filled_block_has_one_sequence": [("block_tables", (1, 0), 2), ("lengths", 1, 1)],
}


def changed(state, field, index, number):
    field, _, inner = field.partition(".")
    old = getattr(state, field)
    new = changed(old, inner, index, number) if inner else old.at[index].set(number)
    return dataclasses.replace(state, **{field: new})


@pytest.mark.parametrize("name", BREAKS)
def test_broken_invariants_are_named(name):
    allocator = make(6, 0, windows=(4,))
    assert allocator.broken_invariants() == ()
    for change in BREAKS[name]:
        allocator = changed(allocator, *change)
    assert name in allocator.broken_invariants()


def test_each_invariant_can_be_broken():
    source = inspect.getsource(inspection.broken_invariants)
    assert set(re.findall(r'^ +"(\w+)": ', source, re.MULTILINE)) == set(BREAKS)


def test_a_drawing_has_a_colour_for_each_owner_and_a_dot_for_each_shared_block():
    allocator, _, _ = make(6, 0, 3).fork(counts(-1, 0, -1))
    allocator = allocator.free(marks(0, 0, 1))
    owners, shared = block_owners(allocator)
    assert owners.tolist() == [NULL, 0, 0, FREE, 1] + [FREE] * 7
    assert np.flatnonzero(shared).tolist() == [1]
    prefix_cache = PrefixCache.create(num_blocks=12, block_size=4)
    _, cached = prefix_cache.insert(make(9, 0), jnp.ones((2, 9), jnp.int32))
    assert block_owners(cached.free(marks(1, 0)))[0].tolist() == [NULL, WAITING, WAITING] + [FREE] * 9


def test_plot_blocks_draws_every_block():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")  # no display
    allocator, _, _ = make(6, 0, 3).fork(counts(-1, 0, -1))
    axes = plot_blocks(allocator)
    (image,) = axes.images
    null, first, second, other, copy, *free = np.asarray(image.get_array()).reshape(-1, 3)[:12].tolist()
    assert null == [0, 0, 0]
    assert first == second != copy != other
    assert free == [[1, 1, 1]] * 7
    (dots,) = axes.lines
    assert dots.get_xydata().tolist() == [[1, 0]]
    assert plot_blocks(allocator, axes=axes) is axes
    matplotlib.pyplot.close(axes.figure)
