"""Builds allocators and reads them, for tests with literal tables and free lists."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged import BlockAllocator, KVCache, paged_attention
from jaxpaged.ops import write_kv


def counts(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def marks(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.bool_)


def make(
    *lengths: int, num_blocks: int = 12, block_size: int = 4, max_blocks: int = 4, windows: tuple = (None,)
) -> BlockAllocator:
    """An allocator with one sequence per length."""
    allocator = BlockAllocator.create(
        num_blocks=num_blocks,
        block_size=block_size,
        num_seqs=len(lengths),
        max_blocks_per_seq=max_blocks,
        windows=windows,
    )
    allocator, _, ok = allocator.append(counts(*lengths), q_len=max(*lengths, 1))
    assert ok.all()
    return allocator


def free_ids(allocator: BlockAllocator) -> list[int]:
    """The free blocks, the next one last."""
    pool = allocator.pool
    indices = (int(pool.bottom) + np.arange(int(pool.num_free))) % allocator.num_blocks
    return pool.free_list[indices].tolist()


def assert_same(left: BlockAllocator, right: BlockAllocator) -> None:
    assert (left.block_tables == right.block_tables).all()
    assert (left.lengths == right.lengths).all()
    assert free_ids(left) == free_ids(right)


def create_cache(allocator: BlockAllocator) -> KVCache:
    """The cache for `write` and `attend`, one head of 8 numbers."""
    return KVCache.create(
        num_blocks=allocator.num_blocks, block_size=allocator.block_size, num_kv_heads=1, head_dim=8, dtype="float32"
    )


def write(cache, allocator, *tokens, q_len=8):
    """Appends and writes tokens of each sequence. Values are the tokens and keys are zero, so attention is the mean."""
    allocator, slots, ok = allocator.append(counts(*map(len, tokens)), q_len=q_len)
    assert ok.all()
    values = np.full((len(tokens), q_len, 1, 8), np.nan, np.float32)
    for row, new in zip(values, tokens, strict=True):
        row[q_len - len(new) :] = np.reshape(new, (-1, 1, 1))
    return write_kv(cache, jnp.zeros(values.shape), jnp.asarray(values), slots), allocator


def attend(cache, allocator, **options):
    """The mean of each sequence's tokens."""
    q = jnp.ones((len(allocator.lengths), 1, 8))
    out = paged_attention(q, cache.k, cache.v, allocator.block_tables, allocator.lengths, **options)
    return np.asarray(out)[:, 0, 0]
