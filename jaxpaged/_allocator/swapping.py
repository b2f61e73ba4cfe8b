"""Which blocks a sequence leaves when its tokens move to the host, and which it gets when they come back."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxpaged._allocator.block_allocator import BlockAllocator


def swap_out(allocator: BlockAllocator, seqs: jax.Array) -> tuple[BlockAllocator, jax.Array]:
    leaves = seqs & (allocator.lengths > 0)
    block_ids = jnp.where(leaves[:, None], allocator.block_tables, 0)
    swapped_lengths = jnp.where(leaves, allocator.lengths, allocator.swapped_lengths)
    return dataclasses.replace(allocator.free(leaves), swapped_lengths=swapped_lengths), block_ids


def swap_in(allocator: BlockAllocator, seqs: jax.Array) -> tuple[BlockAllocator, jax.Array, jax.Array]:
    legal = seqs & (allocator.swapped_lengths > 0)
    needed = jnp.where(legal, allocator._blocks_of(allocator.swapped_lengths), 0)
    ok, starts, total = allocator._grant(legal, needed)
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
