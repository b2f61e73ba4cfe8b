"""The free list of a `BlockAllocator`: a ring of block ids, blocks taken and returned with prefix sums.

Its free blocks stand in `free_list` from `free_start` on, around the end, `num_free` of them. The last of them is the
top, the next block to be handed out. Blocks come back on top, so that those just used are used again first; blocks that
can be found by their tokens come back at the bottom, so that they are kept longest and the oldest of them go first.
"""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxpaged._allocator import BlockAllocator


def prefix_sum(values: jax.Array, axis: int = 0) -> jax.Array:
    """Inclusive, int32."""
    return jnp.cumsum(values, axis=axis, dtype=jnp.int32)


def take(allocator: "BlockAllocator", from_top: jax.Array) -> jax.Array:
    """The ids of the free blocks at these ranks below the top; any id where there are not so many."""
    place = allocator.free_start + allocator.num_free - 1 - from_top
    return allocator.free_list.at[place % allocator.num_blocks].get(mode="promise_in_bounds")


def hand_out(allocator: "BlockAllocator", block_ids: jax.Array, is_new: jax.Array) -> "BlockAllocator":
    """Marks the blocks that were taken: one reference, and a new generation, under which no one can find them."""
    dropped = allocator.num_blocks + jnp.arange(block_ids.size, dtype=jnp.int32).reshape(block_ids.shape)
    target = jnp.where(is_new, block_ids, dropped)
    return dataclasses.replace(
        allocator,
        # Both columns in one scatter, and one that adds a constant: it reads nothing, so that it is done in place.
        block_counts=allocator.block_counts.at[target].add(1, mode="drop", unique_indices=True),
        num_free=allocator.num_free - is_new.sum(dtype=jnp.int32),
    )


def reference(allocator: "BlockAllocator", block_ids: jax.Array, added: jax.Array) -> "BlockAllocator":
    """One more reference for each entry of `block_ids` [rows, entries] where `added`; the blocks are not free."""
    target = jnp.where(added, block_ids, allocator.num_blocks)
    return dataclasses.replace(allocator, block_counts=allocator.block_counts.at[target, 0].add(1, mode="drop"))


def unreference(allocator: "BlockAllocator", block_ids: jax.Array, removed: jax.Array) -> "BlockAllocator":
    """One reference less for each entry of `block_ids` [rows, entries] where `removed`; at 0 a block becomes free.

    A row's later blocks are the ones to be handed out first among those that can be found, and the last among those
    that cannot.
    """
    num_blocks = allocator.num_blocks
    entry = jnp.arange(block_ids.size, dtype=jnp.int32).reshape(block_ids.shape)
    target = jnp.where(removed, block_ids, num_blocks)
    counts = allocator.block_counts.at[target, 0].add(-1, mode="drop")
    emptied = removed & (counts.at[block_ids, 0].get(mode="clip") == 0)
    # Several rows may have given up the same block: one entry returns it. The counts, all 0 there, serve as the place
    # to agree on the last such entry, in whose row every other block of these sequences at its rank or before is too.
    claims = counts.at[jnp.where(emptied, block_ids, num_blocks), 0].max(entry + 1, mode="drop")
    returns = emptied & (claims.at[block_ids, 0].get(mode="clip") == entry + 1)
    counts = claims.at[jnp.where(returns, block_ids, num_blocks + entry), 0].set(0, mode="drop", unique_indices=True)

    findable = allocator.is_findable(block_ids)
    kinds = jnp.stack([returns & ~findable, returns & findable])  # to the top, to the bottom
    in_row = prefix_sum(kinds, axis=2)
    of_row = in_row[:, :, -1:]
    before_row = prefix_sum(of_row, axis=1) - of_row
    num_top, num_bottom = before_row[0, -1, 0] + of_row[0, -1, 0], before_row[1, -1, 0] + of_row[1, -1, 0]
    from_top = before_row[0] + in_row[0] - 1
    from_bottom = before_row[1] + of_row[1] - in_row[1]  # the last block of a row first
    place = jnp.where(
        findable,
        allocator.free_start - 1 - from_bottom,
        allocator.free_start + allocator.num_free + num_top - 1 - from_top,
    )
    place = jnp.where(returns, place % num_blocks, num_blocks + entry)
    return dataclasses.replace(
        allocator,
        block_counts=counts,
        free_list=allocator.free_list.at[place].set(block_ids, mode="drop", unique_indices=True),
        free_start=(allocator.free_start - num_bottom) % num_blocks,
        num_free=allocator.num_free + num_top + num_bottom,
    )


def remove_referenced(allocator: "BlockAllocator") -> "BlockAllocator":
    """Closes the gaps that blocks leave which were referenced while they stood in the free list; O(pool)."""
    num_blocks = allocator.num_blocks
    rank = jnp.arange(num_blocks, dtype=jnp.int32)
    ids = allocator.free_list[(allocator.free_start + rank) % num_blocks]
    kept = (rank < allocator.num_free) & (allocator.ref_counts[ids] == 0)
    new_rank = prefix_sum(kept)
    place = jnp.where(kept, new_rank - 1, num_blocks + rank)
    return dataclasses.replace(
        allocator,
        free_list=allocator.free_list.at[place].set(ids, mode="drop", unique_indices=True),
        free_start=jnp.zeros_like(allocator.free_start),
        num_free=new_rank[-1],
    )
