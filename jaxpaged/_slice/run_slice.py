"""A slice: many steps of a model in one jitted program, from an inbox to a report."""

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
from jaxpaged._slice.prefix_groups import SeatGroups, find_groups
from jaxpaged._slice.prompt_aux import FoundBlocks
from jaxpaged._slice.scoring import StepOutputs
from jaxpaged._slice.state import Inbox, Report, State
from jaxpaged._slice.step import one_step


def run_packed(
    setup: Setup, no_input: Inbox, weights: Any, state: State, last: jax.Array, words: Any
) -> tuple[State, jax.Array]:
    """`run_slice` from a packed inbox to a packed report.

    `no_input` has the shapes of the inbox. `last` is the last report, whose buffer the new one gets.
    """
    state, report = run_slice(setup, weights, state, unpack(words, no_input))
    return state, pack(report, jnp)


def run_slice(setup: Setup, weights: Any, state: State, inbox: Inbox) -> tuple[State, Report]:
    scheduler, allocator = state.scheduler.abort(state.allocator, inbox.aborts)
    if scheduler.prefixes is not None:
        scheduler = scheduler.forget_prefixes(inbox.forgets)
    scheduler, request_ids, submit_statuses = scheduler.submit(allocator, inbox.requests)
    spans, logit_params = jax.tree.map(
        lambda old, new: old.at[request_ids].set(new, mode="drop"),
        (state.spans, state.logit_params),
        (inbox.spans, inbox.logit_params),
    )
    drafting = None if state.drafting is None else state.drafting.reset(request_ids, jnp.asarray(inbox.families))
    if (grammars := state.grammars) is not None:
        states = grammars.states.at[request_ids].set(inbox.grammar_states, mode="drop")
        state = dataclasses.replace(state, grammars=dataclasses.replace(grammars, states=states))
    state = dataclasses.replace(
        state, scheduler=scheduler, allocator=allocator, spans=spans, logit_params=logit_params, drafting=drafting
    )

    steps = [
        functools.partial(one_step, setup, weights, wants_logprobs=inbox.wants_logprobs, index=i)
        for i in range(len(setup.kinds))
    ]
    is_open = inbox.num_steps > 0  # a slice without steps only submits: more requests follow before any gets a seat

    def one_event(_: Any, state: State) -> State:
        """Changes seats if due, admits requests, and runs a step if there is work."""
        state = change_seats_if_due(state, is_open)
        scheduler, allocator = state.scheduler.admit(state.allocator, is_open=is_open), state.allocator
        state = dataclasses.replace(state, scheduler=scheduler)
        num_saved_reads, gains = 0 if state.seat_groups is None else state.seat_groups.num_saved_reads, None
        if state.drafting is not None:
            drafting = state.drafting.with_drafts(scheduler, allocator, setup.draft, setup.row_cost)
            state, gains = dataclasses.replace(state, drafting=drafting), drafting.gains(scheduler)
        kind = next_kind(scheduler, allocator, state.num_waited, setup.kinds, num_saved_reads, gains)
        goes_on = scheduler.has_work & (scheduler.num_steps < inbox.num_steps)
        return lax.switch(jnp.where(goes_on, kind, len(steps)), [*steps, lambda state: state], state)

    # The trip count is static, and only the model or its attention can add loops to a step. So XLA captures each
    # iteration as one CUDA graph, and the call returns before the steps are done. [slices_h100] [slices_h200]
    state = lax.fori_loop(0, len(state.outputs), one_event, state)
    # Also after the last step, so that finished requests can be drained and their blocks are free.
    state = change_seats_if_due(state, is_open)
    return make_report(setup, state, request_ids, submit_statuses)


def make_report(setup: Setup, state: State, request_ids: jax.Array, submit_statuses: jax.Array) -> tuple[State, Report]:
    """The state for the next slice, and the report of this one."""
    (scheduler, outbox), allocator, drafting = state.scheduler.drain(), state.allocator, state.drafting
    prefixes, zero = scheduler.prefixes, jnp.int32(0)
    no_outputs = StepOutputs.create(setup, scheduler)
    outputs = jax.vmap(lambda words: unpack(words, no_outputs))(state.outputs)
    is_step = jnp.arange(len(state.outputs), dtype=jnp.int32) < outbox.num_steps
    kinds = jnp.arange(len(state.num_of_kind), dtype=jnp.int32)[None]
    num_of_kind = state.num_of_kind + (is_step[:, None] & (outputs.kind[:, None] == kinds)).sum(axis=0, dtype=jnp.int32)
    scored = jnp.where(is_step[:, None], outputs.scores.request_ids, scheduler.max_requests)
    report = Report(
        request_ids=request_ids,
        submit_statuses=submit_statuses,
        outbox=outbox,
        logprobs=outputs.logprobs,
        top_logprobs=outputs.top_logprobs,
        aux=outputs.aux,
        scores=dataclasses.replace(outputs.scores, request_ids=scored),
        rows_aux=outputs.rows_aux,
        found_blocks=state.found_blocks,
        num_running=(scheduler.seated < scheduler.max_requests).sum(dtype=jnp.int32),
        num_free=allocator.num_free,
        num_of_kind=num_of_kind,
        num_saved_reads=state.num_saved_reads,
        num_drafted=zero if drafting is None else drafting.num_drafted,
        num_accepted=zero if drafting is None else drafting.num_accepted,
        num_computed=scheduler.num_computed,
        num_found=zero if prefixes is None else prefixes.cache.num_hits * allocator.block_size,
        num_recomputed=scheduler.num_recomputed,
        num_preempted=scheduler.num_preempted,
        num_cached=None if prefixes is None else prefixes.num_found,
    )
    if setup.options.host_cache_bytes is not None:
        assert prefixes is not None
        is_cached = allocator.pool.is_cached(jnp.arange(allocator.num_blocks, dtype=jnp.int32))
        is_held = allocator.pool.cached_at == allocator.num_blocks
        serials = prefixes.cache.cached.serials
        serials = jnp.where(is_held, serials, -serials)
        most = jnp.minimum(scheduler.num_known + setup.options.growth, scheduler.limits - 1)
        # A waiting request counts twice: until it begins, blocks that come in for others may displace its own.
        num_times = jnp.where(scheduler.statuses == RequestStatus.WAITING, 2, jnp.where(scheduler.is_live, 1, 0))
        num_needed = (num_times * allocator.num_blocks_for(most)).sum(dtype=jnp.int32)
        report = dataclasses.replace(
            report,
            serials=jnp.where(is_cached, serials, 0),
            salts=prefixes.salt,
            room=allocator.num_free + allocator.num_held_by_each().sum(dtype=jnp.int32) - num_needed,
        )
    found = None if state.found_blocks is None else state.found_blocks.cleared()
    return dataclasses.replace(state, scheduler=scheduler, num_of_kind=num_of_kind, found_blocks=found), report


def change_seats_if_due(state: State, is_open: jax.Array) -> State:
    """Changes seats, and with them the groups that share blocks, if a change is due and `is_open`."""
    if state.scheduler.prefixes is None:
        return state

    def change_seats(
        scheduler: Scheduler, allocator: BlockAllocator, groups: SeatGroups | None, found: FoundBlocks | None
    ) -> tuple[Any, ...]:
        before = scheduler, allocator
        scheduler, allocator = scheduler.change_seats(allocator)
        groups = None if groups is None else find_groups(allocator)
        return scheduler, allocator, groups, None if found is None else found.update(before, scheduler, allocator)

    own = state.scheduler, state.allocator, state.seat_groups, state.found_blocks
    is_due = is_open & state.scheduler.is_change_due
    scheduler, allocator, groups, found = lax.cond(is_due, change_seats, lambda *same: same, *own)
    return dataclasses.replace(state, scheduler=scheduler, allocator=allocator, seat_groups=groups, found_blocks=found)
