"""Which requests begin with the same blocks, so that a step reads them once: found whenever seats change."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._allocator.prefix_groups import PrefixGroups
from jaxpaged._scheduler.arrays import first_marked, rows_of
from jaxpaged._scheduler.records import StepPlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SeatGroups:
    """Groups of at least two seats that begin with the same full blocks. They hold until seats change: until then no
    request gives up a block, and a step's tokens come after them.

    Attributes:
        leaders: int32 `[seats]`, the first seat of each seat's group; `num_seats`: none.
        num_blocks: int32 `[seats]`, the blocks that the seat shares with all of its group; 0: none.
        num_saved_reads: int32 `[]`, tokens that a step of all seats need not read again.
    """

    leaders: jax.Array
    num_blocks: jax.Array
    num_saved_reads: jax.Array

    @classmethod
    def create(cls, num_seats: int) -> SeatGroups:
        seats = jnp.full(num_seats, num_seats, jnp.int32)
        return cls(seats, jnp.zeros(num_seats, jnp.int32), jnp.zeros((), jnp.int32))


def find_groups(allocator: BlockAllocator) -> SeatGroups:
    """The groups of an allocator whose rows are the seats."""
    tables, num_seats = allocator.block_tables, allocator.lengths.shape[0]
    seats = jnp.arange(num_seats, dtype=jnp.int32)
    counts = jnp.arange(1, tables.shape[1] + 1, dtype=jnp.int32)[None]  # of blocks

    # 1. Of n blocks that m requests begin with, each skips reading n - n / m: the n for which that is most, and the
    # last of these blocks, which only those m hold.
    is_full = counts <= (allocator.lengths // allocator.block_size)[:, None]
    holders = 1 + allocator.pool.extra_holders[tables]
    saved = jnp.where(is_full, counts.astype(jnp.float32) * (1 - 1 / holders), 0.0)
    num_blocks = jnp.where(saved.max(axis=1) > 0, jnp.argmax(saved, axis=1).astype(jnp.int32) + 1, 0)
    last = jnp.where(num_blocks > 0, tables[seats, num_blocks - 1], -1 - seats)

    # 2. The first seat with that block leads those that have the same blocks before it.
    same = last[:, None] == last[None]
    leaders = jnp.argmax(same, axis=1).astype(jnp.int32)
    shares = ((tables == tables[leaders]) | (counts > num_blocks[:, None])).all(axis=1) & (num_blocks > 0)
    shares &= (same & shares[None]).sum(axis=1) > 1
    num_blocks = jnp.where(shares, num_blocks, 0)
    read = jnp.where(shares & (leaders == seats), num_blocks, 0)
    num_saved_reads = (num_blocks - read).sum(dtype=jnp.int32) * allocator.block_size
    return SeatGroups(jnp.where(shares, leaders, num_seats), num_blocks, num_saved_reads)


def sort_by_group(step: StepPlan, groups: SeatGroups) -> tuple[StepPlan, jax.Array, PrefixGroups, jax.Array]:
    """The step with the seats of each group together, and those that share nothing behind them.

    Returns:
        step: its rows, `query_starts` and `last` follow the new order of the seats.
        seats: int32 `[seats]`, that order.
        groups: of the seats in that order.
        num_saved_reads: int32 `[]`, blocks that the step need not read again.
    """
    num_seats, width = groups.leaders.shape[0], step.tokens.shape[0]
    every = jnp.arange(num_seats, dtype=jnp.int32)

    # 1. The rows of a seat stay together. Padding is behind them.
    seats = jnp.argsort(groups.leaders).astype(jnp.int32)
    counts = jnp.diff(step.query_starts)[seats]
    starts = jnp.pad(jnp.cumsum(counts, dtype=jnp.int32), (1, 0))
    rows = jnp.arange(width, dtype=jnp.int32)
    owner = jnp.searchsorted(starts[1:], rows, side="right", method="compare_all")
    order = rows + rows_of(step.query_starts[seats] - starts[:-1], owner)
    by_row = {name: getattr(step, name)[order] for name in ("tokens", "positions", "seats", "slots")}
    last = jnp.zeros_like(step.last).at[seats].set(jnp.clip(starts[1:] - 1, 0), unique_indices=True)
    step = dataclasses.replace(step, **by_row, query_starts=starts, last=last)

    # 2. A group begins with its leader, and ends with the next group or the last member of any.
    leaders, num_blocks = groups.leaders[seats], groups.num_blocks[seats]
    num_members = (leaders < num_seats).sum(dtype=jnp.int32)
    first = first_marked(every, leaders == seats, size=max(1, num_seats // 2), fill_value=num_seats)
    first = jnp.minimum(first, num_members)
    group_starts = starts[jnp.append(first, num_members)]

    # 3. All members with rows but one skip reading its blocks.
    saved = jnp.where(counts > 0, num_blocks, 0).sum(dtype=jnp.int32)
    first = jnp.minimum(first, num_seats - 1)
    saved -= jnp.where(jnp.diff(group_starts) > 0, num_blocks[first], 0).sum(dtype=jnp.int32)
    return step, seats, PrefixGroups(group_starts, first, num_blocks), saved
