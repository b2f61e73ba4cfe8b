"""`fork` and `rollback`: operations on sequences that share blocks."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpaged._allocator.block_pool import BlockPool
from jaxpaged._allocator.state import AllocatorState
from jaxpaged._one_program import one_program

# (source_ids, destination_ids) for copy_blocks, int32 [groups * seqs] each
Copies = tuple[jax.Array, jax.Array]


@one_program("replace")
def fork[S: AllocatorState](allocator: S, parents: jax.Array, replace: bool) -> tuple[S, Copies, jax.Array]:
    num_seqs, num_groups = len(allocator.lengths), allocator.num_groups
    rows = jnp.arange(num_seqs, dtype=jnp.int32)
    unchanged = (parents == -1) | (parents == rows)
    legal = ~unchanged & (parents >= 0) & (parents < num_seqs) & (replace | (allocator.lengths == 0))
    parents = jnp.where(legal, parents, rows)
    lengths = allocator.lengths[parents]
    tables = jnp.take(allocator.block_tables, parents, axis=-2).reshape(allocator.rows.shape)
    num_passed = allocator.num_passed
    children = dataclasses.replace(allocator, num_passed=None if num_passed is None else num_passed[:, parents])
    entry, partial = lengths // allocator.block_size, lengths % allocator.block_size > 0

    # 1. Every child of a parent with a partly filled last block needs its own copy, except one that inherits the block.
    # A child may inherit it only if the parent is certain to be replaced, that is, if no row is refused.
    first = jnp.full(num_seqs, num_seqs, jnp.int32).at[jnp.where(legal, parents, num_seqs)].min(rows, mode="drop")
    heir = legal & legal[parents] & (first[parents] == rows)
    heir &= num_groups * (legal & partial & ~heir).sum(dtype=jnp.int32) <= allocator.num_free

    # 2. The tables with the new blocks.
    entry = allocator.per_row(entry)
    needs_copy = allocator.per_row(legal & partial & ~heir)
    ok, pool, copied_tables, is_copy, copies = _with_copies(allocator, tables, entry, legal, needs_copy)
    are_ok = allocator.per_row(ok)

    # 3. The children become holders of the shared blocks, and release their old blocks.
    pool = pool.share(tables, are_ok[:, None] & ~is_copy & children.is_entry(lengths))
    if replace:
        pool = pool.let_go(allocator.rows, are_ok[:, None] & allocator.is_entry(allocator.lengths))
    forked = allocator.with_rows(
        jnp.where(are_ok[:, None], copied_tables, allocator.rows),
        jnp.where(ok, lengths, allocator.lengths),
        pool,
        None if num_passed is None else num_passed[:, jnp.where(ok, parents, rows)],
    )
    return forked, copies, ok | unchanged


@one_program()
def rollback[S: AllocatorState](allocator: S, lengths: jax.Array) -> tuple[S, Copies, jax.Array]:
    tables, num_passed = allocator.rows, allocator.num_passed
    legal = (lengths >= 0) & (lengths <= allocator.lengths)
    if num_passed is not None:  # the sequence must still hold the tokens that the windows show at the new end
        legal &= (lengths == 0) | (num_passed <= allocator.num_passed_at(lengths)).all(axis=0)
    entry, partial = lengths // allocator.block_size, lengths % allocator.block_size > 0
    cut = legal & partial & (lengths < allocator.lengths)  # the new end is inside a block
    entry = allocator.per_row(entry)
    last_ids = _entries(tables, entry)
    kept_by_others = (allocator.pool.extra_holders[last_ids] > 0) | (
        allocator.pool.cached_at[last_ids] == allocator.num_blocks
    )
    (kept_by_others,) = _read_once(kept_by_others)
    needs_copy = allocator.per_row(cut) & kept_by_others
    ok, pool, copied_tables, is_copy, copies = _with_copies(allocator, tables, entry, legal, needs_copy)
    lengths = jnp.where(ok, lengths, allocator.lengths)
    if num_passed is not None:
        num_passed = jnp.where(lengths == 0, 0, num_passed)
    stays = allocator.is_entry(lengths)
    pool = pool.let_go(tables, allocator.is_entry(allocator.lengths) & (is_copy | ~stays))
    return allocator.with_rows(jnp.where(stays, copied_tables, 0), lengths, pool, num_passed), copies, ok


def _with_copies(
    allocator: AllocatorState, tables: jax.Array, entry: jax.Array, legal: jax.Array, needs_copy: jax.Array
) -> tuple[jax.Array, BlockPool, jax.Array, jax.Array, Copies]:
    """Grants a block to each row that needs a copy of the block at its `entry` of `tables`, int32 `[groups * seqs]`.

    Returns: which sequences got all blocks that they need, the pool without these blocks, the tables with them, a mask
    of their table entries, and the copies.
    """
    needed = needs_copy.astype(jnp.int32)
    ok, starts, total = allocator.grant(legal, needed)
    ids, is_copied = _read_once(allocator.pool.peek(starts), allocator.per_row(ok) & needs_copy)
    is_copy = is_copied[:, None] & (jnp.arange(tables.shape[1], dtype=jnp.int32)[None] == entry[:, None])
    copies = jnp.where(is_copied, _entries(tables, entry), 0), jnp.where(is_copied, ids, 0)
    return ok, allocator.pool.take(total), jnp.where(is_copy, ids[:, None], tables), is_copy, copies


def _entries(tables: jax.Array, entry: jax.Array) -> jax.Array:
    return tables.at[jnp.arange(len(tables), dtype=jnp.int32), entry].get(mode="clip")


def _read_once(*values: jax.Array) -> tuple[jax.Array, ...]:
    """Makes XLA keep values that were read from the pool before a write. Without the barrier it may copy the pool to
    read them again."""
    return jax.lax.optimization_barrier(values)
