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
    """The cached blocks with which sequences may begin, one row each."""

    num_asked: jax.Array  # int32 [seqs], full blocks that were looked up
    num_found: jax.Array  # int32 [seqs], those that were found, in each group
    ids: jax.Array  # int32 [seqs, groups, columns]
    begin: jax.Array  # bool [seqs, groups, columns]: those that a row begins with, not those its window has passed

    @property
    def num_blocks(self) -> jax.Array:
        """Blocks that each begins with, in all groups."""
        return self.begin.sum(axis=(1, 2), dtype=jnp.int32)


def longest_matches(allocator: BlockAllocator, num_asked: jax.Array, ids: jax.Array, there: jax.Array) -> PrefixMatch:
    """The longest prefixes after which each group has all blocks that its window shows there.

    Args:
        allocator: with the windows.
        num_asked: int32 `[seqs]`.
        ids: int32 `[groups, seqs, columns]`.
        there: bool, in that shape: which of them are cached. In the first group, none after one that is not.
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
    """Empty sequences begin with the cached blocks that were found for them; the others do not change.

    Also returns how many tokens these hold, int32 `[seqs]`.
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
