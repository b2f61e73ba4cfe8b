"""The fields of an allocator, and how it grants and releases blocks."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxpaged._allocator.block_pool import BlockPool
from jaxpaged._integers import checked_size, checked_tuple
from jaxpaged._one_program import one_program
from pallas_kernels.common.sizes import ceil_div

Window = int | None


def checked_windows(windows: Any) -> tuple[Window, ...]:
    """Checks the windows of groups or layers, and returns them as a tuple. Raises `ValueError`."""
    windows = checked_tuple("windows", windows)
    return tuple(None if window is None else checked_size("a window", window) for window in windows)


def num_passed_blocks(window: Window, lengths: jax.Array, block_size: int) -> jax.Array:
    """Number of blocks at the start of each sequence that no query at position `lengths` or later sees."""
    return jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window + 1, 0) // block_size


def most_blocks[T: (int, jax.Array)](
    windows: Sequence[Window], num_blocks: T, block_size: int, chunk_tokens: int = 1
) -> T:
    """Maximum number of blocks that a sequence of `num_blocks` blocks holds in all groups together, if it grows by at
    most `chunk_tokens` at a time."""
    minimum = min if isinstance(num_blocks, int) else jnp.minimum
    shown = [w if w is None else w - 1 + chunk_tokens - 1 for w in windows]  # tokens before the newest one
    most = [num_blocks if tokens is None else minimum(num_blocks, -(-tokens // block_size) + 1) for tokens in shown]
    return sum(most[1:], start=most[0])


@dataclasses.dataclass(frozen=True)
class AllocatorState:
    """The fields of a `BlockAllocator`, whose docstring describes them and their invariants."""

    block_tables: jax.Array
    lengths: jax.Array
    pool: BlockPool
    block_size: int = dataclasses.field(metadata=dict(static=True))
    windows: tuple[Window, ...] = dataclasses.field(default=(None,), metadata=dict(static=True))
    num_passed: jax.Array | None = None

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def rows(self) -> jax.Array:
        """Table rows of all groups, group by group, int32 `[groups * seqs, max_blocks]`."""
        return self.block_tables.reshape(-1, self.block_tables.shape[-1])

    def per_row(self, per_seq: jax.Array) -> jax.Array:
        """Repeats `[seqs, ...]` for each group: `[groups * seqs, ...]`."""
        return per_seq if self.num_groups == 1 else jnp.concatenate([per_seq] * self.num_groups)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, including the null block."""
        return self.pool.num_blocks

    @property
    def num_free(self) -> jax.Array:
        """Number of free blocks, int32 `[]`, including those that hold a cached prefix."""
        return self.pool.num_free

    @property
    def num_held(self) -> jax.Array:
        """Number of blocks that sequences hold, int32 `[]`. A shared block counts once."""
        return self.num_blocks - 1 - self.num_free

    @property
    def num_waiting(self) -> jax.Array:
        """Number of free blocks that may still hold a cached prefix, int32 `[]`."""
        return self.pool.num_waiting

    @property
    def num_shared(self) -> jax.Array:
        """Number of blocks with more than one holder, int32 `[]`."""
        return (self.pool.extra_holders > 0).sum(dtype=jnp.int32)

    @property
    def utilization(self) -> jax.Array:
        """Fraction of the pool's blocks that are held, 0 to 1, float32 `[]`."""
        return self.num_held.astype(jnp.float32) / (self.num_blocks - 1)

    @property
    def fragmentation(self) -> jax.Array:
        """Fraction of the held slots that are empty, after the last tokens of sequences, 0 to 1, float32 `[]`."""
        empty = (self.num_blocks_for(self.lengths) * self.block_size - self.lengths).sum(dtype=jnp.int32)
        empty *= self.num_groups
        held = jnp.maximum(self.num_held, 1).astype(jnp.float32) * self.block_size
        return empty.astype(jnp.float32) / held

    def num_blocks_for(self, lengths: jax.Array) -> jax.Array:
        """Number of blocks for sequences of these lengths, per group, without regard to windows."""
        return ceil_div(lengths, self.block_size)

    def is_entry(self, lengths: jax.Array) -> jax.Array:
        """Which table entries hold a block, for sequences of these lengths, bool `[groups * seqs, max_blocks]`."""
        column = jnp.arange(self.block_tables.shape[-1], dtype=jnp.int32)[None]
        is_entry = column < self.per_row(self.num_blocks_for(lengths))[:, None]
        return is_entry if self.num_passed is None else is_entry & (column >= self.num_passed.reshape(-1, 1))

    def num_held_by_each(self) -> jax.Array:
        """Number of blocks that each sequence holds in all groups together, int32 `[seqs]`."""
        num_blocks = self.num_groups * self.num_blocks_for(self.lengths)
        return num_blocks if self.num_passed is None else num_blocks - self.num_passed.sum(axis=0, dtype=jnp.int32)

    def most_blocks(self, num_blocks: jax.Array) -> jax.Array:
        """Maximum number of blocks that sequences of `num_blocks` blocks hold in all groups together, if they grow by
        single tokens."""
        return most_blocks(self.windows, num_blocks, self.block_size)

    def of_seqs(self, seqs: jax.Array) -> Self:
        """A read-only view of the rows `seqs`, int32 `[n]`. An index past the end gives an empty row."""

        def rows(values: jax.Array, axis: int) -> jax.Array:
            return jnp.take(values, seqs, axis=axis, mode="fill", fill_value=0)

        return dataclasses.replace(
            self,
            block_tables=rows(self.block_tables, -2),
            lengths=rows(self.lengths, 0),
            num_passed=None if self.num_passed is None else rows(self.num_passed, 1),
        )

    def num_passed_at(self, lengths: jax.Array) -> jax.Array:
        """Number of blocks of each row that no query at position `lengths` or later sees, int32 `[groups, seqs]`."""
        return jnp.stack([num_passed_blocks(window, lengths, self.block_size) for window in self.windows])

    def grant(
        self, legal: jax.Array, needed: jax.Array, order: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Decides which sequences get the blocks that they need in all groups.

        Args:
            legal: bool `[seqs]`, sequences that may get blocks.
            needed: int32 `[groups * seqs]`, number of blocks that each row needs.
            order: int32 `[seqs]`, as in `append`.

        Returns:
            ok: bool `[seqs]`, sequences that get their blocks, or are legal and need none.
            starts: int32 `[groups * seqs]`, depth of each row's first block below the top of the free blocks.
            total: int32 `[]`, number of blocks granted.
        """
        per_group = needed.reshape(self.num_groups, -1)
        needed = per_group.sum(axis=0, dtype=jnp.int32)
        if order is None:
            ends = jnp.cumsum(needed, dtype=jnp.int32)
        else:
            seqs = jnp.arange(needed.shape[0], dtype=jnp.int32)
            comes_first = order[None] < order[:, None]
            comes_first |= (order[None] == order[:, None]) & (seqs[None] <= seqs[:, None])
            ends = jnp.where(comes_first, needed[None], 0).sum(axis=1, dtype=jnp.int32)
        ok = legal & ((needed == 0) | (ends <= self.pool.num_free))
        starts = (ends - needed)[None] + jnp.cumsum(per_group, axis=0, dtype=jnp.int32) - per_group
        return ok, starts.ravel(), jnp.where(ok, needed, 0).sum(dtype=jnp.int32)

    @one_program()
    def let_go(self, seqs: jax.Array) -> Self:
        """Empties the marked sequences and releases their blocks.

        Not a branch: on a GPU that would cost more than the few kernels. [branches_h200]
        """
        are_marked = self.per_row(seqs)[:, None]
        pool = self.pool.let_go(self.rows, are_marked & self.is_entry(self.lengths))
        return self.with_rows(
            jnp.where(are_marked, 0, self.rows),
            jnp.where(seqs, 0, self.lengths),
            pool,
            None if self.num_passed is None else jnp.where(seqs[None], 0, self.num_passed),
        )

    def let_go_passed(self, seqs: jax.Array, most: int) -> Self:
        """Releases blocks of the marked sequences that their windows have passed, at most `most` per row."""
        if self.num_passed is None:
            return self
        passed = self.num_passed_at(self.lengths)
        passed = jnp.where(seqs[None], jnp.clip(passed, self.num_passed, self.num_passed + most), self.num_passed)
        columns = self.num_passed.reshape(-1, 1) + jnp.arange(most, dtype=jnp.int32)[None]
        rows = jnp.arange(len(columns), dtype=jnp.int32)[:, None]
        ids = self.rows.at[rows, columns].get(mode="clip")
        pool = self.pool.let_go(ids, columns < passed.reshape(-1, 1))
        return dataclasses.replace(self, pool=pool, num_passed=passed)

    def let_go_behind(self, lengths: jax.Array, most: int) -> Self:
        """Shortens sequences to `lengths`, by at most `most` tokens, which must be in blocks with one holder."""
        ends = self.per_row(self.num_blocks_for(lengths))[:, None]
        rank = jnp.arange(-(-most // self.block_size), dtype=jnp.int32)[None]
        is_behind = ends + rank < self.per_row(self.num_blocks_for(self.lengths))[:, None]
        rows = jnp.arange(len(ends), dtype=jnp.int32)[:, None]
        pool = self.pool.let_go(self.rows.at[rows, ends + rank].get(mode="clip"), is_behind)
        entries = jnp.where(is_behind, ends + rank, self.rows.shape[1] + rank)
        tables = self.rows.at[rows, entries].set(0, mode="drop", unique_indices=True)
        return self.with_rows(tables, lengths, pool)

    def with_rows(
        self, rows: jax.Array, lengths: jax.Array, pool: BlockPool, num_passed: jax.Array | None = None
    ) -> Self:
        num_passed = self.num_passed if num_passed is None else num_passed
        tables = rows.reshape(self.block_tables.shape)
        return dataclasses.replace(self, block_tables=tables, lengths=lengths, pool=pool, num_passed=num_passed)
