"""The longest cached prefix that every layer group can use."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged._allocator.block_allocator import BlockAllocator


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefixMatch:
    """The cached blocks with which sequences may begin, one row per sequence."""

    num_asked: jax.Array  # int32 [seqs], number of full blocks that were looked up
    num_found: jax.Array  # int32 [seqs], number of blocks that were found, per group
    ids: jax.Array  # int32 [seqs, groups, columns], cached blocks
    begin: jax.Array  # bool [seqs, groups, columns], whether the row begins with this block: matched, and in the window

    @property
    def num_blocks(self) -> jax.Array:
        """Number of blocks with which each sequence begins, in all groups together, int32 `[seqs]`."""
        return self.begin.sum(axis=(1, 2), dtype=jnp.int32)


def longest_matches(allocator: BlockAllocator, num_asked: jax.Array, ids: jax.Array, there: jax.Array) -> PrefixMatch:
    """The longest prefixes at whose end each group has all blocks that its window shows.

    Args:
        allocator: the allocator, for its windows.
        num_asked: int32 `[seqs]`, number of blocks that were looked up.
        ids: int32 `[groups, seqs, columns]`, cached blocks.
        there: bool `[groups, seqs, columns]`, whether the block is cached. In the first group, a block counts only if
            all blocks before it are cached.
    """
    column = jnp.arange(ids.shape[2], dtype=jnp.int32)
    first = allocator.num_passed_at((column + 1) * allocator.block_size)[:, None]  # [groups, 1, columns]
    last_missing = jax.lax.cummax(jnp.where(there, -1, column[None, None]), axis=2)
    is_end = there[0] & (last_missing < first).all(axis=0)
    num_found = jnp.where(is_end, column[None] + 1, 0).max(axis=1, initial=0)
    first = allocator.num_passed_at(num_found * allocator.block_size)[..., None]  # [groups, seqs, 1]
    begin = (column[None, None] >= first) & (column[None, None] < num_found[None, :, None])
    return PrefixMatch(num_asked, num_found, ids.swapaxes(0, 1), begin.swapaxes(0, 1))


def begin_with(allocator: BlockAllocator, matches: PrefixMatch) -> tuple[BlockAllocator, jax.Array]:
    """Puts the matched blocks into empty rows. Rows without a match do not change.

    Returns the new allocator, and the number of cached tokens of each sequence, int32 `[seqs]`.
    """
    num_columns, tables, num_passed = matches.ids.shape[2], allocator.rows, allocator.num_passed
    ids, begin = (x.swapaxes(0, 1).reshape(-1, num_columns) for x in (matches.ids, matches.begin))
    num_cached = matches.num_found * allocator.block_size
    if num_passed is not None:
        num_passed = jnp.where(num_cached[None] > 0, allocator.num_passed_at(num_cached), num_passed)
    allocator = allocator.with_rows(
        lax.dynamic_update_slice_in_dim(tables, jnp.where(begin, ids, tables[:, :num_columns]), 0, axis=1),
        jnp.where(num_cached > 0, num_cached, allocator.lengths),
        allocator.pool.acquire_cached(ids, begin),
        num_passed,
    )
    return allocator, num_cached
