"""The policy: which requests get seats and tokens of a step, which is preempted, and the step as packed tokens."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._put import put
from jaxpaged._scheduler.arrays import first_marked, per_seat, rows_of
from jaxpaged._scheduler.records import RequestStatus, StepPlan
from jaxpaged._scheduler.state import COMPUTED, SchedulerState


def plan[S: SchedulerState](
    scheduler: S, allocator: BlockAllocator, width: int, *, is_mixed: bool, drafts: jax.Array | None = None
) -> tuple[S, BlockAllocator, StepPlan]:
    """Plans a step. `is_mixed`: whether a seat may get several tokens."""
    is_open = ~scheduler.is_outbox_full
    is_seated = scheduler.seated < scheduler.max_requests
    needed = jnp.where(is_seated & is_open, per_seat(scheduler, scheduler.num_known) - allocator.lengths, 0)
    ranks = seat_ranks(scheduler)
    given = share(needed, ranks, width, is_mixed=is_mixed)
    if allocator.num_passed is not None:
        # The pool has blocks for one token of the first request in rank, but perhaps not for its chunk.
        given = jnp.where(ranks == ranks.min(), jnp.minimum(given, num_fitting(allocator)), given)
    is_sampled = (given > 0) & (given == needed)
    num_drafts = jnp.zeros_like(given)
    if drafts is not None:
        num_drafts = granted_drafts(scheduler, allocator, drafts, given, is_sampled, width - given.sum(dtype=jnp.int32))
        scheduler = with_drafts(scheduler, drafts, num_drafts)
    given += num_drafts
    allocator, _, ok = allocator.append(given, q_len=width if is_mixed else 1, order=ranks)
    given, num_drafts, is_sampled = jnp.where(ok, given, 0), jnp.where(ok, num_drafts, 0), ok & is_sampled
    was_refused = jnp.where(is_open, ~ok.all(), scheduler.was_refused)
    scheduler = dataclasses.replace(
        with_due(scheduler, scheduler.was_refused & ~was_refused),
        was_refused=was_refused,
        counters=scheduler.counters.at[COMPUTED].add(given.sum(dtype=jnp.int32)),
    )
    is_victim = ~ok.all() & last_in_rank(is_seated, allocator.lengths > 0, ranks)
    # With one row per seat, row i belongs to seat i: attention needs neither packed queries nor gathered tables.
    taken = given if is_mixed or width < scheduler.num_seqs else None
    return scheduler, allocator, pack(scheduler, allocator, given, taken, num_drafts, is_sampled, is_victim, width)


def seat_ranks(scheduler: SchedulerState) -> jax.Array:
    """The rank of the request in each seat, int32 `[seats]`; free seats come last."""
    return scheduler.ranks.at[scheduler.seated].get(mode="fill", fill_value=scheduler.max_requests)


def with_due[S: SchedulerState](scheduler: S, is_due: jax.Array | bool) -> S:
    """Makes `change_seats` due if `is_due`, with a prefix cache."""
    if scheduler.prefixes is None:
        return scheduler
    prefixes = dataclasses.replace(scheduler.prefixes, is_due=scheduler.prefixes.is_due | is_due)
    return dataclasses.replace(scheduler, prefixes=prefixes)


def admit[S: SchedulerState](scheduler: S, allocator: BlockAllocator, is_open: ArrayLike) -> S:
    candidates = jnp.where(is_open, first_waiting(scheduler), scheduler.max_requests)
    return give_seats(scheduler, allocator, candidates)[0]


def first_waiting(scheduler: SchedulerState) -> jax.Array:
    """The first waiting requests in rank, int32 `[seats]`, padded with `max_requests`."""
    is_waiting = (scheduler.statuses == RequestStatus.WAITING)[scheduler.order]
    return first_marked(scheduler.order, is_waiting, size=scheduler.num_seqs, fill_value=scheduler.max_requests)


def give_seats[S: SchedulerState](
    scheduler: S, allocator: BlockAllocator, candidates: jax.Array, num_begun: ArrayLike = 0, num_woken: ArrayLike = 0
) -> tuple[S, jax.Array]:
    """Gives seats to candidates, in their order, while seats and blocks suffice.

    Args:
        scheduler: the scheduler, with the free seats.
        allocator: the allocator, with the free blocks.
        candidates: int32 `[seats]`, waiting requests, padded with `max_requests`.
        num_begun: int32 `[seats]`, cached blocks that each candidate begins with, in all groups.
        num_woken: int32 `[seats]`, the number of these that are free blocks until the candidate enters.

    Returns:
        scheduler: the new one.
        entered: int32 `[seats]`, the index of the candidate that got each seat; the number of seats: none.
    """
    num_requests, num_seqs = scheduler.max_requests, scheduler.num_seqs
    seats = jnp.arange(num_seqs, dtype=jnp.int32)

    # 1. The number that fit. Each needs blocks for its known tokens and one more token, in addition to the reserves of
    # seated requests and of earlier candidates. A request reserves at least what it needs to enter, so once a candidate
    # does not fit, no later one does.
    is_free = scheduler.seated == num_requests
    owed = reserved_blocks(scheduler, allocator, scheduler.seated) - allocator.num_held_by_each()
    owed = jnp.where(is_free, 0, jnp.maximum(owed, 0))  # with a window, a request may hold more until its next append
    reserved = reserved_blocks(scheduler, allocator, candidates) - num_begun
    reserved = jnp.where(candidates < num_requests, reserved, 0)
    before = jnp.cumsum(reserved + num_woken, dtype=jnp.int32) - reserved + owed.sum(dtype=jnp.int32)
    num_known, limits = rows_of((scheduler.num_known, scheduler.limits), candidates)
    entry = allocator.most_blocks(allocator.num_blocks_for(jnp.minimum(num_known + 1, limits - 1))) - num_begun
    fits = (candidates < num_requests) & (seats < is_free.sum(dtype=jnp.int32))
    fits &= (before + entry <= allocator.num_free) & ~scheduler.was_refused

    # 2. The i-th candidate gets the i-th free seat.
    turn = jnp.cumsum(is_free, dtype=jnp.int32) - 1
    is_taken = is_free & (turn < fits.sum(dtype=jnp.int32))
    taken_by = jnp.where(is_taken, candidates.at[turn].get(mode="clip"), scheduler.seated)
    statuses = put(scheduler.statuses, taken_by, is_taken, RequestStatus.RUNNING)
    entered = jnp.where(is_taken, turn, num_seqs)
    return dataclasses.replace(scheduler, seated=taken_by, statuses=statuses), entered


def reserved_blocks(scheduler: SchedulerState, allocator: BlockAllocator, request_ids: jax.Array) -> jax.Array:
    """Blocks reserved for requests: blocks of their known tokens and a spare one, at most what they ever need."""
    num_known, limits = rows_of((scheduler.num_known, scheduler.limits), request_ids)
    # The last token is sampled and never computed.
    num_blocks = jnp.minimum(allocator.num_blocks_for(num_known) + 1, allocator.num_blocks_for(limits - 1))
    return allocator.most_blocks(num_blocks)


def num_fitting(allocator: BlockAllocator) -> jax.Array:
    """The tokens, at least one, that each sequence could append with all free blocks."""
    num_blocks = allocator.num_blocks_for(allocator.lengths) + allocator.num_free // allocator.num_groups
    return jnp.maximum(num_blocks * allocator.block_size - allocator.lengths, 1)


def share(needed: jax.Array, ranks: jax.Array, width: int, *, is_mixed: bool) -> jax.Array:
    """Tokens for each seat, by rank: one for each that needs any, then, in a mixed step, more while there are rows."""

    def before(counts: jax.Array) -> jax.Array:
        return jnp.where(ranks[None] < ranks[:, None], counts[None], 0).sum(axis=1, dtype=jnp.int32)

    one, num_seqs = jnp.minimum(needed, 1), needed.shape[0]
    if width < num_seqs:
        one = jnp.where(before(one) < width, one, 0)
    if not is_mixed:
        return one
    more = needed - one
    return one + jnp.clip(width - one.sum(dtype=jnp.int32) - before(more), 0, more)


def granted_drafts(
    scheduler: SchedulerState,
    allocator: BlockAllocator,
    drafts: jax.Array,  # int32 [seats, drafts]
    given: jax.Array,  # int32 [seats], known tokens
    is_sampled: jax.Array,
    num_rows: jax.Array,  # rows left over
) -> jax.Array:
    """The number of drafts of each seat, int32 `[seats]`: first drafts of all seats, then second ones, while there are
    rows.

    If the free blocks do not suffice for all, drafts only use the free slots of blocks that the known tokens need.
    """
    turn = jnp.arange(1, drafts.shape[1] + 1, dtype=jnp.int32)[None]
    # The token sampled after the last draft must be within the limit.
    room = per_seat(scheduler, scheduler.limits) - per_seat(scheduler, scheduler.num_known) - 1
    is_wanted = is_sampled[:, None] & (turn <= room[:, None]) & (jnp.cumsum(drafts < 0, axis=1) == 0)
    num_drafts = have_rows(is_wanted, num_rows).sum(axis=1, dtype=jnp.int32)

    known = allocator.lengths + given
    held, needed, in_all = (allocator.num_blocks_for(n) for n in (allocator.lengths, known, known + num_drafts))
    fits = allocator.num_groups * (in_all - held).sum(dtype=jnp.int32) <= allocator.num_free
    return jnp.where(fits, num_drafts, jnp.minimum(num_drafts, needed * allocator.block_size - known))


def have_rows(is_wanted: jax.Array, num_rows: jax.Array) -> jax.Array:
    """Which wanted drafts get a row: first drafts of all seats, then second ones.

    Args:
        is_wanted: bool `[seats, drafts]`.
        num_rows: int32 `[]`.

    Returns:
        bool `[seats, drafts]`.
    """
    order = jnp.cumsum(is_wanted.T.reshape(-1), dtype=jnp.int32).reshape(is_wanted.shape[::-1]).T
    return is_wanted & (order <= num_rows)


def with_drafts[S: SchedulerState](scheduler: S, drafts: jax.Array, num_drafts: jax.Array) -> S:
    """Writes the drafts after the known tokens, where `pack` and `commit` find them."""
    ordinals = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None]
    columns = per_seat(scheduler, scheduler.num_known)[:, None] + ordinals
    return dataclasses.replace(scheduler, tokens=put_tokens(scheduler, ordinals < num_drafts[:, None], columns, drafts))


def put_tokens(scheduler: SchedulerState, is_wanted: jax.Array, columns: jax.Array, tokens: jax.Array) -> jax.Array:
    """`scheduler.tokens` with the wanted ones of `tokens`, `[seats, n]`, written to `columns`."""
    dropped = scheduler.max_requests + jnp.arange(scheduler.num_seqs, dtype=jnp.int32)
    rows = jnp.where(is_wanted, scheduler.seated[:, None], dropped[:, None])
    return scheduler.tokens.at[rows, columns].set(tokens, mode="drop", unique_indices=True)


def last_in_rank(is_seated: jax.Array, has_blocks: jax.Array, ranks: jax.Array) -> jax.Array:
    """The seat to preempt, bool `[seats]`: the last in rank that holds blocks, but never the first in rank."""
    is_candidate = is_seated & has_blocks & (ranks != ranks.min())
    return is_candidate & (ranks == jnp.where(is_candidate, ranks, -1).max())


def pack(
    scheduler: SchedulerState,
    allocator: BlockAllocator,
    given: jax.Array,
    taken: jax.Array | None,  # int32 [seats], rows of each seat; None: one each
    num_drafts: jax.Array,
    is_sampled: jax.Array,
    is_victim: jax.Array,
    width: int,
) -> StepPlan:
    num_seqs = scheduler.num_seqs
    rows = jnp.arange(width, dtype=jnp.int32)
    if taken is None:
        ends, seats, offsets = rows + 1, rows, jnp.zeros_like(rows)
    else:
        seats = jnp.arange(num_seqs, dtype=jnp.int32)
        ends = jnp.where(seats[None] <= seats[:, None], taken[None], 0).sum(axis=1, dtype=jnp.int32)
        seats = (ends[None] <= rows[:, None]).sum(axis=1, dtype=jnp.int32)
        offsets = rows - rows_of(ends - taken, seats)
    is_token = offsets < rows_of(given, seats)
    computed = rows_of(allocator.lengths - given, seats)
    seats = jnp.where(is_token, seats, num_seqs)
    positions = jnp.where(is_token, computed + offsets, 0)
    tokens = scheduler.tokens.at[rows_of(scheduler.seated, seats), positions].get(mode="clip")
    return StepPlan(
        tokens=jnp.where(is_token, tokens, 0),
        positions=positions,
        seats=seats,
        slots=allocator.slots(seats, positions),
        query_starts=jnp.pad(ends, (1, 0)),
        last=jnp.clip(ends - 1, 0),
        num_drafts=num_drafts,
        is_sampled=is_sampled,
        is_victim=is_victim,
        request_ids=scheduler.seated,
        sampling=jax.tree.map(lambda values: per_seat(scheduler, values), scheduler.sampling),
    )
