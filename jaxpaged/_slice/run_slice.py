"""A slice: many steps of a model in one jit, between what the host sends in and what it gets back."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._scheduler.records import RequestStatus
from jaxpaged._scheduler.scheduler import Scheduler
from jaxpaged._slice.kinds import next_kind
from jaxpaged._slice.model import Setup
from jaxpaged._slice.packing import pack, unpack
from jaxpaged._slice.prefix_groups import find_groups
from jaxpaged._slice.scoring import StepOutputs
from jaxpaged._slice.state import Inbox, Report, State
from jaxpaged._slice.step import one_step


def run_packed(
    setup: Setup, no_input: Inbox, weights: Any, state: State, last: jax.Array, words: Any
) -> tuple[State, jax.Array]:
    """`run_slice` between a packed inbox with the shapes of `no_input` and a packed report, which replaces the last."""
    state, report = run_slice(setup, weights, state, unpack(words, no_input))
    return state, pack(report, jnp)


def run_slice(setup: Setup, weights: Any, state: State, inbox: Inbox) -> tuple[State, Report]:
    kinds = setup.kinds
    scheduler, allocator = state.scheduler.abort(state.allocator, inbox.aborts)
    prefixes = scheduler.prefixes
    if prefixes is not None:
        scheduler = scheduler.forget_prefixes(inbox.forgets)
    scheduler, request_ids, submit_statuses = scheduler.submit(allocator, inbox.requests)
    spans = state.spans.at[request_ids].set(inbox.spans, mode="drop")
    drafting = None if state.drafting is None else state.drafting.reset(request_ids, jnp.asarray(inbox.families))
    state = dataclasses.replace(state, scheduler=scheduler, allocator=allocator, spans=spans, drafting=drafting)

    def goes_on(state: State) -> jax.Array:
        return state.scheduler.has_work & (state.scheduler.num_steps < inbox.num_steps)

    steps = [
        functools.partial(one_step, setup, weights, wants_logprobs=inbox.wants_logprobs, index=i)
        for i in range(len(kinds))
    ]

    is_open = inbox.num_steps > 0  # else nobody gets a seat before those who come with the slices behind this one

    def one_event(state: State) -> State:
        """Changes seats and gives out free ones, and takes a step of the kind that is due, if any."""
        state = change_seats_if_due(state, is_open)
        state = dataclasses.replace(state, scheduler=state.scheduler.admit(state.allocator, is_open=is_open))
        num_saved_reads, gains = 0 if state.seat_groups is None else state.seat_groups.num_saved_reads, None
        if state.drafting is not None:
            drafting = state.drafting.with_drafts(state.scheduler, state.allocator, setup.draft, setup.row_cost)
            state, gains = dataclasses.replace(state, drafting=drafting), drafting.gains(state.scheduler)
        kind = next_kind(state.scheduler, state.allocator, state.num_waited, kinds, num_saved_reads, gains)
        return lax.switch(jnp.where(goes_on(state), kind, len(kinds)), [*steps, lambda state: state], state)

    # Their number is known, and no step has a loop, unless the model or its attention has: XLA puts all of an event
    # into a CUDA graph, and a call waits for no step. [slices_h100] [slices_h200]
    state = lax.fori_loop(0, len(state.outputs), lambda _, state: one_event(state), state)
    # A change that is due after the last step is made too: what ended is to be drained, and its blocks free.
    state = change_seats_if_due(state, is_open)
    return make_report(setup, state, request_ids, submit_statuses)


def make_report(setup: Setup, state: State, request_ids: jax.Array, submit_statuses: jax.Array) -> tuple[State, Report]:
    """Behind the last step: the state for the next slice, and the report of this one."""
    scheduler, outbox = state.scheduler.drain()
    nothing = StepOutputs.create(scheduler, setup.kinds, setup.options.max_logprobs, setup.aux)
    outputs = jax.vmap(lambda words: unpack(words, nothing))(state.outputs)
    is_step = jnp.arange(len(state.outputs), dtype=jnp.int32) < outbox.num_steps
    scored = jnp.where(is_step[:, None], outputs.scores.request_ids, scheduler.max_requests)
    report = Report(
        request_ids=request_ids,
        submit_statuses=submit_statuses,
        outbox=outbox,
        logprobs=outputs.logprobs,
        top_logprobs=outputs.top_logprobs,
        aux=outputs.aux,
        scores=dataclasses.replace(outputs.scores, request_ids=scored),
        num_running=(scheduler.seated < scheduler.max_requests).sum(dtype=jnp.int32),
        num_free=state.allocator.num_free,
        num_of_kind=state.num_of_kind,
        num_saved_reads=state.num_saved_reads,
        num_drafted=jnp.zeros((), jnp.int32) if state.drafting is None else state.drafting.num_drafted,
        num_accepted=jnp.zeros((), jnp.int32) if state.drafting is None else state.drafting.num_accepted,
        num_computed=scheduler.num_computed,
        num_found=num_found(scheduler, state.allocator),
        num_recomputed=scheduler.num_recomputed,
        num_preempted=scheduler.num_preempted,
        num_cached=None if scheduler.prefixes is None else jnp.array(scheduler.prefixes.num_found),
    )
    if setup.options.host_cache_bytes is not None:
        assert scheduler.prefixes is not None
        allocator, cache = state.allocator, scheduler.prefixes.cache
        is_listed = allocator.pool.is_cached(jnp.arange(allocator.num_blocks, dtype=jnp.int32))
        serials = cache.listing.serials
        serials = jnp.where(allocator.pool.cached_at == allocator.num_blocks, serials, -serials)
        most = jnp.minimum(scheduler.num_known + setup.options.growth, scheduler.limits - 1)
        # A request that waits counts twice: until it begins, as much may come in behind it, in the place of its blocks.
        num_times = jnp.where(scheduler.statuses == RequestStatus.WAITING, 2, jnp.where(scheduler.is_live, 1, 0))
        num_needed = (num_times * allocator.num_blocks_for(most)).sum(dtype=jnp.int32)
        report = dataclasses.replace(
            report,
            serials=jnp.where(is_listed, serials, 0),
            salts=jnp.array(scheduler.prefixes.salt),
            room=allocator.num_free + allocator.num_held_by_each().sum(dtype=jnp.int32) - num_needed,
        )
    return dataclasses.replace(state, scheduler=scheduler), report


def change_seats_if_due(state: State, is_open: jax.Array) -> State:
    """With the change of seats that is due, if any, and if `is_open`."""
    if state.scheduler.prefixes is None:
        return state

    def change_seats(scheduler: Scheduler, allocator: BlockAllocator, groups: Any) -> tuple[Any, ...]:
        scheduler, allocator = scheduler.change_seats(allocator)
        return scheduler, allocator, None if groups is None else find_groups(allocator)

    own = state.scheduler, state.allocator, state.seat_groups
    is_due = is_open & state.scheduler.is_change_due
    scheduler, allocator, groups = lax.cond(is_due, change_seats, lambda *same: same, *own)
    return dataclasses.replace(state, scheduler=scheduler, allocator=allocator, seat_groups=groups)


def num_found(scheduler: Scheduler, allocator: BlockAllocator) -> jax.Array:
    """Tokens found in the prefix cache so far, int32 `[]`, modulo 2^32."""
    if scheduler.prefixes is None:
        return jnp.zeros((), jnp.int32)
    return scheduler.prefixes.cache.num_hits * allocator.block_size
