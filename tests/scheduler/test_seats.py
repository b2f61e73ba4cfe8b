"""With a prefix cache: who waits for blocks that another computes, and how many free blocks each would hold first."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import BlockAllocator, PrefixCache
from jaxpaged._allocator.prefix_match import PrefixMatch
from jaxpaged._scheduler.seats import is_being_computed, woken_by_each


def int32(*values):
    return jnp.asarray(values, jnp.int32)


def test_free_blocks_that_several_find_are_counted_for_the_first():
    sizes = dict(num_blocks=9, block_size=2)
    allocator = BlockAllocator.create(**sizes, num_seqs=4, max_blocks_per_seq=4)
    cache = PrefixCache.create(**sizes)
    tokens, lengths = int32([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [0] * 6, [0] * 6), int32(6, 6, 0, 0)
    allocator, _, _ = allocator.append(lengths, q_len=6)
    cache, allocator = cache.insert(allocator, tokens)
    allocator = allocator.free(jnp.array([True, True, False, False]))
    blocks = tokens[int32(0, 1, 0, 2)].reshape(4, 3, 2)
    matches, _ = cache.find(allocator, blocks, int32(3, 3, 3, 0), jnp.zeros(4, jnp.int32))
    np.testing.assert_array_equal(matches.num_blocks, [3, 3, 3, 0])
    # The second shares two blocks with the first, and the third all.
    np.testing.assert_array_equal(woken_by_each(allocator, matches), [3, 1, 0, 0])


@pytest.mark.parametrize(
    ("num_listed", "num_known", "waits"),
    [
        (1, 4, True),  # the second block, which the candidate lacks, will be listed
        (2, 4, False),  # it was, and was lost: it never comes
        (1, 3, False),  # it will not be full
    ],
)
def test_a_candidate_waits_for_what_a_seat_before_it_will_list(num_listed, num_known, waits):
    scheduler = types.SimpleNamespace(
        num_seqs=1, max_requests=2, seated=int32(0), num_known=int32(num_known, 9), ranks=int32(0, 1)
    )
    nothing = jnp.zeros((1, 1, 2), jnp.int32)
    matches = PrefixMatch(int32(2), int32(1), nothing, nothing.astype(jnp.bool_))
    tags = jnp.asarray([[5, 6]], jnp.uint32)
    prefixes, allocator = types.SimpleNamespace(num_listed=int32(num_listed)), types.SimpleNamespace(block_size=2)
    found = is_being_computed(scheduler, prefixes, allocator, int32(1), matches, tags, tags)
    assert found.tolist() == [waits]
