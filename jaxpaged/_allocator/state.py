"""The fields of an allocator, which table entries are blocks, and which rows are granted blocks."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from jaxpaged._allocator.block_pool import BlockPool


@dataclasses.dataclass(frozen=True)
class AllocatorState:
    """The fields of a `BlockAllocator`, whose docstring describes them and their invariants."""

    block_tables: jax.Array
    lengths: jax.Array
    swapped_lengths: jax.Array
    pool: BlockPool
    block_size: int = dataclasses.field(metadata=dict(static=True))

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return self.pool.num_blocks

    @property
    def num_free(self) -> jax.Array:
        """Blocks that can be handed out, int32 `[]`; blocks where a cached prefix waits are among them."""
        return self.pool.num_free

    @property
    def num_held(self) -> jax.Array:
        """Blocks that sequences hold, int32 `[]`; a shared one counts once."""
        return self.num_blocks - 1 - self.num_free

    @property
    def num_waiting(self) -> jax.Array:
        """Free blocks that may still hold a cached prefix, int32 `[]`."""
        return self.pool.num_waiting

    @property
    def num_shared(self) -> jax.Array:
        """Blocks with more than one holder, int32 `[]`."""
        return (self.pool.extra_holders > 0).sum(dtype=jnp.int32)

    @property
    def is_seat_free(self) -> jax.Array:
        """Rows that hold nothing, here or swapped out, bool `[seqs]`."""
        return (self.lengths == 0) & (self.swapped_lengths == 0)

    @property
    def utilization(self) -> jax.Array:
        """The part of the pool that is held, 0 to 1, float32 `[]`."""
        return self.num_held.astype(jnp.float32) / (self.num_blocks - 1)

    @property
    def fragmentation(self) -> jax.Array:
        """The part of the held slots that is empty, after the sequences' last tokens, 0 to 1, float32 `[]`."""
        empty = (self.num_blocks_for(self.lengths) * self.block_size - self.lengths).sum(dtype=jnp.int32)
        held = jnp.maximum(self.num_held, 1).astype(jnp.float32) * self.block_size
        return empty.astype(jnp.float32) / held

    def num_blocks_for(self, lengths: jax.Array) -> jax.Array:
        """Blocks that sequences of these lengths hold."""
        return -(-lengths // self.block_size)

    def is_entry(self, lengths: jax.Array) -> jax.Array:
        """Which table entries are blocks, for sequences of these lengths, bool `[seqs, max_blocks]`."""
        return jnp.arange(self.block_tables.shape[1], dtype=jnp.int32)[None] < self.num_blocks_for(lengths)[:, None]

    def grant(
        self, legal: jax.Array, needed: jax.Array, order: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(rows that get the blocks they need, depth below the top where each row's begin, number of all blocks)."""
        if order is None:
            ends = jnp.cumsum(needed, dtype=jnp.int32)
        else:
            rows = jnp.arange(needed.shape[0], dtype=jnp.int32)
            comes_first = order[None] < order[:, None]
            comes_first |= (order[None] == order[:, None]) & (rows[None] <= rows[:, None])
            ends = jnp.where(comes_first, needed[None], 0).sum(axis=1, dtype=jnp.int32)
        ok = legal & ((needed == 0) | (ends <= self.pool.num_free))
        return ok, ends - needed, jnp.where(ok, needed, 0).sum(dtype=jnp.int32)

    def let_go(self, seqs: jax.Array) -> Self:
        """The marked rows empty, their blocks given back."""
        pool = self.pool.let_go(self.block_tables, seqs[:, None] & self.is_entry(self.lengths))
        return dataclasses.replace(
            self,
            block_tables=jnp.where(seqs[:, None], 0, self.block_tables),
            lengths=jnp.where(seqs, 0, self.lengths),
            swapped_lengths=jnp.where(seqs, 0, self.swapped_lengths),
            pool=pool,
        )

    def with_rows(self, block_tables: jax.Array, lengths: jax.Array, pool: BlockPool) -> Self:
        return dataclasses.replace(self, block_tables=block_tables, lengths=lengths, pool=pool)
