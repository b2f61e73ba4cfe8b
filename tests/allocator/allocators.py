"""Builds allocators and reads them, for tests with literal tables and free lists."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged import BlockAllocator, paged_attention
from jaxpaged.ops import write_kv


def counts(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def free_ids(allocator: BlockAllocator) -> list[int]:
    """The free blocks, the next one last."""
    return allocator.pool.free_list[: int(allocator.num_free)].tolist()


def assert_same(left: BlockAllocator, right: BlockAllocator) -> None:
    assert (left.block_tables == right.block_tables).all()
    assert (left.lengths == right.lengths).all()
    assert free_ids(left) == free_ids(right)


def marks(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.bool_)


def make(*lengths: int, num_blocks: int = 12, block_size: int = 4, max_blocks: int = 4) -> BlockAllocator:
    allocator = BlockAllocator.create(
        num_blocks=num_blocks, block_size=block_size, num_seqs=len(lengths), max_blocks_per_seq=max_blocks
    )
    allocator, _, ok = allocator.append(counts(*lengths), q_len=max(*lengths, 1))
    assert ok.all()
    return allocator


def attend(cache, allocator):
    q = jnp.ones((allocator.lengths.shape[0], 1, 8))
    return np.asarray(paged_attention(q, cache.k, cache.v, allocator.block_tables, allocator.lengths))[:, 0, 0]


def write(cache, allocator, tokens, q_len):
    """Appends and writes; each token is its value. The keys are zero, so that attention is the plain mean."""
    allocator, slots, ok = allocator.append(counts(*map(len, tokens)), q_len=q_len)
    assert ok.all()
    values = np.full((len(tokens), q_len, 1, 8), np.nan, np.float32)
    for row, new in zip(values, tokens, strict=True):
        row[q_len - len(new) :] = np.reshape(new, (-1, 1, 1))
    values = jnp.asarray(values)
    return write_kv(cache, jnp.zeros_like(values), values, slots), allocator
