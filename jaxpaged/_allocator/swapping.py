"""Which blocks a sequence leaves when its tokens move to the host, and which it gets when they come back."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpaged._allocator.state import AllocatorState


def swap_out[S: AllocatorState](allocator: S, seqs: jax.Array) -> tuple[S, jax.Array]:
    leaves = seqs & (allocator.lengths > 0)
    block_ids = jnp.where(leaves[:, None], allocator.block_tables, 0)
    swapped_lengths = jnp.where(leaves, allocator.lengths, allocator.swapped_lengths)
    return dataclasses.replace(allocator.let_go(leaves), swapped_lengths=swapped_lengths), block_ids


def swap_in[S: AllocatorState](allocator: S, seqs: jax.Array) -> tuple[S, jax.Array, jax.Array]:
    legal = seqs & (allocator.swapped_lengths > 0)
    needed = jnp.where(legal, allocator.num_blocks_for(allocator.swapped_lengths), 0)
    ok, starts, total = allocator.grant(legal, needed)
    rank = jnp.arange(allocator.block_tables.shape[1], dtype=jnp.int32)[None]
    is_new = ok[:, None] & (rank < needed[:, None])
    ids = allocator.pool.peek(starts[:, None] + rank)
    back = dataclasses.replace(
        allocator,
        block_tables=jnp.where(is_new, ids, allocator.block_tables),
        lengths=jnp.where(ok, allocator.swapped_lengths, allocator.lengths),
        swapped_lengths=jnp.where(ok, 0, allocator.swapped_lengths),
        pool=allocator.pool.take(total),
    )
    return back, jnp.where(is_new, ids, 0), ok | ~seqs
