"""Which blocks a sequence leaves when its tokens move to the host, and which it gets when they come back."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpaged._allocator.state import AllocatorState
from jaxpaged._one_program import one_program


@one_program()
def swap_out[S: AllocatorState](allocator: S, seqs: jax.Array) -> tuple[S, jax.Array]:
    leaves = seqs & (allocator.lengths > 0)
    leave = allocator.per_row(leaves)[:, None]
    block_ids = jnp.where(leave & allocator.is_entry(allocator.lengths), allocator.rows, 0)
    swapped_lengths = jnp.where(leaves, allocator.lengths, allocator.swapped_lengths)
    left = allocator.let_go(leaves)
    # The same blocks, those that windows have not passed, come back.
    left = dataclasses.replace(left, swapped_lengths=swapped_lengths, num_passed=allocator.num_passed)
    return left, allocator.per_group(block_ids)


@one_program()
def swap_in[S: AllocatorState](allocator: S, seqs: jax.Array) -> tuple[S, jax.Array, jax.Array]:
    legal = seqs & (allocator.swapped_lengths > 0)
    first = 0 if allocator.num_passed is None else allocator.num_passed.ravel()
    num_blocks = allocator.per_row(allocator.num_blocks_for(allocator.swapped_lengths))
    ok, starts, total = allocator.grant(legal, jnp.where(allocator.per_row(legal), num_blocks - first, 0))
    is_new = allocator.per_row(ok)[:, None] & allocator.is_entry(allocator.swapped_lengths)
    column = jnp.arange(is_new.shape[1], dtype=jnp.int32)[None]
    ids = allocator.pool.peek((starts - first)[:, None] + column)
    back = dataclasses.replace(
        allocator.with_rows(
            jnp.where(is_new, ids, allocator.rows),
            jnp.where(ok, allocator.swapped_lengths, allocator.lengths),
            allocator.pool.take(total),
        ),
        swapped_lengths=jnp.where(ok, 0, allocator.swapped_lengths),
    )
    return back, allocator.per_group(jnp.where(is_new, ids, 0)), ok | ~seqs
