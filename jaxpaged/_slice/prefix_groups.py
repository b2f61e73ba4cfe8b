"""Groups of requests that begin with the same blocks, which a step reads once. Recomputed when seats change."""

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
    """Groups of at least two seats that begin with the same full blocks. They are valid until seats change: until then
    no request gives up a block, and a step appends its tokens after the shared blocks.

    Attributes:
        leaders: int32 `[seats]`, the first seat of each seat's group; `num_seats`: no group.
        num_blocks: int32 `[seats]`, the blocks that the seat shares with its whole group; 0: none.
        num_saved_reads: int32 `[]`, tokens that a step with all seats need not read again.
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
    tables, num_seats = allocator.block_tables, len(allocator.lengths)
    seats = jnp.arange(num_seats, dtype=jnp.int32)
    counts = jnp.arange(1, tables.shape[1] + 1, dtype=jnp.int32)[None]  # block counts

    # 1. If m requests share their first n blocks, each skips n - n / m block reads on average. Each seat picks the n
    # with the most skipped reads. The n-th block identifies the group: only these m requests hold it.
    is_full = counts <= (allocator.lengths // allocator.block_size)[:, None]
    holders = 1 + allocator.pool.extra_holders[tables]
    saved = jnp.where(is_full, counts.astype(jnp.float32) * (1 - 1 / holders), 0.0)
    num_blocks = jnp.where(saved.max(axis=1) > 0, jnp.argmax(saved, axis=1).astype(jnp.int32) + 1, 0)
    last = jnp.where(num_blocks > 0, tables[seats, num_blocks - 1], -1 - seats)

    # 2. The first seat with that block leads the seats that also have the same blocks before it.
    same = last[:, None] == last[None]
    leaders = jnp.argmax(same, axis=1).astype(jnp.int32)
    shares = ((tables == tables[leaders]) | (counts > num_blocks[:, None])).all(axis=1) & (num_blocks > 0)
    shares &= (same & shares[None]).sum(axis=1) > 1
    num_blocks = jnp.where(shares, num_blocks, 0)
    read = jnp.where(shares & (leaders == seats), num_blocks, 0)
    num_saved_reads = (num_blocks - read).sum(dtype=jnp.int32) * allocator.block_size
    return SeatGroups(jnp.where(shares, leaders, num_seats), num_blocks, num_saved_reads)


def sort_by_group(step: StepPlan, groups: SeatGroups) -> tuple[StepPlan, jax.Array, PrefixGroups, jax.Array]:
    """Reorders the step: the seats of each group are adjacent, seats without a group come last.

    Returns:
        step: with its rows, `query_starts` and `last` in the new order.
        seats: int32 `[seats]`, the new order.
        groups: in the new order.
        num_saved_reads: int32 `[]`, blocks that the step need not read again.
    """
    num_seats = len(groups.leaders)
    places = jnp.arange(num_seats, dtype=jnp.int32)

    # 1. The rows of a seat stay together. Padding comes last.
    seats = jnp.argsort(groups.leaders).astype(jnp.int32)
    counts = jnp.diff(step.query_starts)[seats]
    starts = jnp.pad(jnp.cumsum(counts, dtype=jnp.int32), (1, 0))
    rows = jnp.arange(len(step.tokens), dtype=jnp.int32)
    owner = jnp.searchsorted(starts[1:], rows, side="right", method="compare_all")
    order = rows + rows_of(step.query_starts[seats] - starts[:-1], owner)
    by_row = {name: getattr(step, name)[order] for name in ("tokens", "positions", "seats", "slots")}
    last = jnp.zeros_like(step.last).at[seats].set(jnp.clip(starts[1:] - 1, 0), unique_indices=True)
    step = dataclasses.replace(step, **by_row, query_starts=starts, last=last)

    # 2. A group begins with its leader. It ends where the next group begins, the last one with the last member.
    leaders, num_blocks = groups.leaders[seats], groups.num_blocks[seats]
    num_members = (leaders < num_seats).sum(dtype=jnp.int32)
    first = first_marked(places, leaders == seats, size=max(1, num_seats // 2), fill_value=num_seats)
    first = jnp.minimum(first, num_members)
    group_starts = starts[jnp.append(first, num_members)]

    # 3. Of the members of a group that have rows, all except one skip reading the shared blocks.
    saved = jnp.where(counts > 0, num_blocks, 0).sum(dtype=jnp.int32)
    first = jnp.minimum(first, num_seats - 1)
    saved -= jnp.where(jnp.diff(group_starts) > 0, num_blocks[first], 0).sum(dtype=jnp.int32)
    return step, seats, PrefixGroups(group_starts, first, num_blocks), saved
