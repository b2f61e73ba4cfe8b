"""Sequences that share blocks: forking, and shortening one that shares its last block."""

import dataclasses

import jax
import jax.numpy as jnp

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

    # 1. Every child of a parent with a partly filled last block needs a block of its own, except one that inherits
    # it. Inheriting is sound only if the parent is surely replaced, that is, if no row is refused.
    first = jnp.full(num_seqs, num_seqs, jnp.int32).at[jnp.where(legal, parents, num_seqs)].min(rows, mode="drop")
    heir = legal & legal[parents] & (first[parents] == rows)
    needed = (legal & partial & ~heir).astype(jnp.int32)
    enough = num_groups * needed.sum(dtype=jnp.int32) <= allocator.num_free
    heir &= enough
    needed = (legal & partial & ~heir).astype(jnp.int32)
    needed = allocator.per_row(needed)
    ok, starts, total = allocator.grant(legal, needed)

    # 2. The tables, with the new blocks in them.
    are_ok, entry = allocator.per_row(ok), allocator.per_row(entry)
    ids, copied = _read_once(allocator.pool.peek(starts), are_ok & (needed > 0))
    source_ids = tables.at[jnp.arange(len(tables), dtype=jnp.int32), entry].get(mode="clip")
    is_copy = copied[:, None] & (jnp.arange(tables.shape[1], dtype=jnp.int32)[None] == entry[:, None])
    tables = jnp.where(is_copy, ids[:, None], tables)

    # 3. The children hold the shared blocks, and let go of their old ones.
    pool = allocator.pool.take(total)
    pool = pool.share(tables, are_ok[:, None] & ~is_copy & children.is_entry(lengths))
    if replace:
        pool = pool.let_go(allocator.rows, are_ok[:, None] & allocator.is_entry(allocator.lengths))
    forked = allocator.with_rows(
        jnp.where(are_ok[:, None], tables, allocator.rows),
        jnp.where(ok, lengths, allocator.lengths),
        pool,
        None if num_passed is None else num_passed[:, jnp.where(ok, parents, rows)],
    )
    copies = jnp.where(copied, source_ids, 0), jnp.where(copied, ids, 0)
    return forked, copies, ok | unchanged


@one_program()
def rollback[S: AllocatorState](allocator: S, lengths: jax.Array) -> tuple[S, Copies, jax.Array]:
    tables, num_passed = allocator.rows, allocator.num_passed
    legal = (lengths >= 0) & (lengths <= allocator.lengths)
    if num_passed is not None:  # the tokens that the windows show at the new end must still be there
        legal &= (lengths == 0) | (num_passed <= allocator.num_passed_at(lengths)).all(axis=0)
    entry, partial = lengths // allocator.block_size, lengths % allocator.block_size > 0
    cut = legal & partial & (lengths < allocator.lengths)  # ends inside a block, whose further tokens are dropped
    entry = allocator.per_row(entry)
    last_ids = tables.at[jnp.arange(len(tables), dtype=jnp.int32), entry].get(mode="clip")
    kept_by_others = (allocator.pool.extra_holders[last_ids] > 0) | (
        allocator.pool.cached_at[last_ids] == allocator.num_blocks
    )
    (kept_by_others,) = _read_once(kept_by_others)
    needed = (allocator.per_row(cut) & kept_by_others).astype(jnp.int32)
    ok, starts, total = allocator.grant(legal, needed)
    ids, copied = _read_once(allocator.pool.peek(starts), allocator.per_row(ok) & (needed > 0))
    lengths = jnp.where(ok, lengths, allocator.lengths)
    if num_passed is not None:
        num_passed = jnp.where(lengths == 0, 0, num_passed)

    is_copy = copied[:, None] & (jnp.arange(tables.shape[1], dtype=jnp.int32)[None] == entry[:, None])
    stays = allocator.is_entry(lengths) & ~is_copy
    pool = allocator.pool.take(total).let_go(tables, allocator.is_entry(allocator.lengths) & ~stays)
    tables = jnp.where(is_copy, ids[:, None], jnp.where(stays, tables, 0))
    copies = jnp.where(copied, last_ids, 0), jnp.where(copied, ids, 0)
    return allocator.with_rows(tables, lengths, pool, num_passed), copies, ok


def _read_once(*values: jax.Array) -> tuple[jax.Array, ...]:
    """Values read from the pool before it is written. Without the barrier XLA reads again after it, from copies."""
    return jax.lax.optimization_barrier(values)
