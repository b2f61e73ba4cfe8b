"""Progress of requests: commit, preemption, abort and drain."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._put import put
from jaxpaged._scheduler import planning, seats
from jaxpaged._scheduler.arrays import per_seat
from jaxpaged._scheduler.records import Outbox, RequestStatus, StepPlan
from jaxpaged._scheduler.state import STEPS, SchedulerState, empty_outbox


def commit[S: SchedulerState](
    scheduler: S, allocator: BlockAllocator, step: StepPlan, tokens: jax.Array
) -> tuple[S, BlockAllocator]:
    num_requests, most = scheduler.max_requests, scheduler.num_drafts + 1
    is_here = scheduler.seated < num_requests  # not aborted since the plan
    is_sampled = step.is_sampled & is_here
    tokens = tokens.reshape(scheduler.num_seqs, -1)
    tokens = jnp.pad(tokens, ((0, 0), (0, most - tokens.shape[1])))
    num_known = per_seat(scheduler, scheduler.num_known)
    columns = num_known[:, None] + jnp.arange(most, dtype=jnp.int32)[None]

    # 1. Which sampled tokens count.
    is_new, is_stop = which_count(scheduler, step, tokens, is_sampled, num_known, columns)

    # 2. These become known tokens.
    num_known += is_new.sum(axis=1, dtype=jnp.int32)
    news = jnp.stack([jnp.where(is_new, tokens, -1), jnp.where(is_new, scheduler.seated[:, None], num_requests)])
    scheduler = dataclasses.replace(
        scheduler,
        tokens=planning.put_tokens(scheduler, is_new, columns, tokens),
        num_known=put(scheduler.num_known, scheduler.seated, is_sampled, num_known),
        outbox=scheduler.outbox.at[scheduler.num_steps].set(news.reshape(2, -1), mode="drop"),
    )
    if most > 1:
        lengths = jnp.where(is_sampled, num_known - 1, allocator.lengths)
        allocator = allocator.let_go_behind(lengths, most - 1)

    # 3. Requests end, or wait again after preemption.
    is_stopped = (is_new & is_stop).any(axis=1)
    is_exhausted = is_sampled & ~is_stopped & (num_known >= per_seat(scheduler, scheduler.limits))
    is_preempted = step.is_victim & is_here & ~is_stopped & ~is_exhausted
    leaves = is_stopped | is_exhausted | is_preempted
    becomes = jnp.where(is_exhausted, RequestStatus.EXHAUSTED, RequestStatus.WAITING).astype(jnp.int32)
    becomes = jnp.where(is_stopped, RequestStatus.STOPPED, becomes)
    given_up = jnp.where(is_preempted, allocator.lengths, 0).sum(dtype=jnp.int32)
    more = (~scheduler.is_outbox_full).astype(jnp.int32), jnp.int32(0), given_up, is_preempted.sum(dtype=jnp.int32)
    prefixes = scheduler.prefixes
    if prefixes is None:
        allocator = allocator.free(leaves)
    else:
        prefixes = seats.after_commit(prefixes, allocator, scheduler.seated, leaves, is_sampled)
    scheduler = dataclasses.replace(
        scheduler,
        statuses=put(scheduler.statuses, scheduler.seated, leaves, becomes),
        seated=jnp.where(leaves, num_requests, scheduler.seated),
        prefixes=prefixes,
        counters=scheduler.counters + jnp.stack(more),
    )
    return scheduler, allocator


def which_count(
    scheduler: SchedulerState,
    step: StepPlan,
    tokens: jax.Array,
    is_sampled: jax.Array,
    num_known: jax.Array,
    columns: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Which sampled tokens count: those up to the first that differs from its draft or ends the request.

    Args:
        scheduler: the scheduler, with the drafts after the known tokens.
        step: the planned step.
        tokens: int32 `[seats, drafts + 1]`, the sampled ones.
        is_sampled: bool `[seats]`.
        num_known: int32 `[seats]`.
        columns: int32 `[seats, drafts + 1]`, where the sampled tokens go in the rows of `scheduler.tokens`.

    Returns:
        is_new, is_stop: bool `[seats, drafts + 1]`, tokens that count, and stop tokens.
    """
    stop_ids = per_seat(scheduler, scheduler.stop_ids)[:, None]
    is_stop = ((stop_ids == tokens[..., None]) & (stop_ids >= 0)).any(axis=2)
    is_new = is_sampled[:, None]
    if tokens.shape[1] > 1:
        drafts = scheduler.tokens.at[scheduler.seated[:, None], columns[:, :-1]].get(mode="fill", fill_value=-1)
        goes_on = (tokens[:, :-1] == drafts) & ~is_stop[:, :-1]
        goes_on &= columns[:, :-1] < (num_known + step.num_drafts)[:, None]
        is_new = jnp.cumprod(jnp.concatenate([is_new, goes_on], axis=1), axis=1, dtype=jnp.int32) > 0
    return is_new, is_stop


def abort[S: SchedulerState](scheduler: S, allocator: BlockAllocator, marked: jax.Array) -> tuple[S, BlockAllocator]:
    marked &= scheduler.is_live
    leaves = per_seat(scheduler, marked)
    aborted = dataclasses.replace(
        planning.with_due(scheduler, marked.any()),
        statuses=jnp.where(marked, RequestStatus.ABORTED, scheduler.statuses),
        seated=jnp.where(leaves, scheduler.max_requests, scheduler.seated),
    )
    return aborted, allocator.free(leaves)


def drain[S: SchedulerState](scheduler: S) -> tuple[S, Outbox]:
    is_finished = ~scheduler.is_live  # free places too, whose status is 0 anyway
    if scheduler.prefixes is not None:  # its tokens are needed until `change_seats`
        is_finished = is_finished.at[scheduler.prefixes.left].set(False, mode="drop")
        # A waiting request may fit now although none has left: windows free blocks.
        has_seat = (scheduler.seated == scheduler.max_requests).any()
        scheduler = planning.with_due(scheduler, has_seat & (scheduler.statuses == RequestStatus.WAITING).any())
    outbox = Outbox(
        tokens=scheduler.outbox_tokens,
        request_ids=scheduler.outbox_request_ids,
        num_steps=scheduler.num_steps,
        finished=jnp.where(is_finished, scheduler.statuses, RequestStatus.FREE),
    )
    max_steps, _, num_draws = scheduler.outbox.shape
    scheduler = dataclasses.replace(
        scheduler,
        statuses=jnp.where(is_finished, RequestStatus.FREE, scheduler.statuses),
        outbox=empty_outbox(max_steps, num_draws, scheduler.max_requests),
        counters=scheduler.counters.at[STEPS].set(0),
    )
    return scheduler, outbox
