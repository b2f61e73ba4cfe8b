"""A scheduler on the host: the invariants that it breaks, and its text."""

import jax
import numpy as np

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._allocator.inspection import broken_names
from jaxpaged._allocator.state import most_blocks
from jaxpaged._scheduler.records import RequestStatus
from jaxpaged._scheduler.state import SchedulerState

SHOWN_SEATS = 16  # lines of a printed scheduler


def broken_invariants(scheduler: SchedulerState, allocator: BlockAllocator) -> tuple[str, ...]:
    """Names of the broken invariants, one a line below. Those that build on a broken one are not tested."""
    scheduler, allocator = jax.tree.map(np.asarray, (scheduler, allocator))
    num_requests, max_length = scheduler.tokens.shape
    seats, statuses, order = scheduler.seated, scheduler.statuses, scheduler.order
    first = {
        "seats_name_requests": ((seats >= 0) & (seats <= num_requests)).all(),
        "statuses_are_known": np.isin(statuses, list(RequestStatus)).all(),
        "order_has_each_request_once": (np.sort(order) == np.arange(num_requests)).all(),
        "outbox_holds_its_steps": 0 <= int(scheduler.num_steps) <= len(scheduler.outbox),
    }
    if not all(first.values()):
        return broken_names(first)

    known, limits, lengths, live = scheduler.num_known, scheduler.limits, allocator.lengths, scheduler.is_live
    is_seated = seats < num_requests
    prefixes = scheduler.prefixes
    left = num_requests if prefixes is None else prefixes.left  # these rows still hold blocks
    seated, served = seats[is_seated], order[live[order]]
    ranked = list(zip(scheduler.keys[served].tolist(), scheduler.arrivals[served].tolist(), strict=True))
    num_blocks = -(-(limits[live] - 1) // allocator.block_size)
    most = [most_blocks(allocator.windows, n, allocator.block_size) for n in num_blocks.tolist()]
    unused = scheduler.outbox_request_ids[int(scheduler.num_steps) :]
    return broken_names(
        {
            "nobody_has_two_seats": len(set(seated.tolist())) == len(seated),
            "the_seated_run": set(seated.tolist()) == set(np.flatnonzero(statuses == RequestStatus.RUNNING).tolist()),
            "free_seats_hold_no_tokens": not lengths[~is_seated & (left == num_requests)].any(),
            "what_is_computed_is_known": (lengths[is_seated] <= known[seated]).all(),
            "the_live_may_grow": ((known >= 1) & (known < limits) & (limits <= max_length))[live].all(),
            "prompts_are_known": ((scheduler.prompt_lengths >= 1) & (scheduler.prompt_lengths <= known))[live].all(),
            "the_live_fit_the_pool": (num_blocks <= allocator.block_tables.shape[-1]).all()
            and all(n < allocator.num_blocks for n in most),
            "ranks_are_places_in_the_order": (scheduler.ranks[order] == np.arange(num_requests)).all(),
            "the_live_stand_in_order": ranked == sorted(set(ranked)),
            "unused_rows_of_the_outbox_are_empty": (unused == num_requests).all(),
        }
        | prefix_figures(scheduler, allocator)
    )


def prefix_figures(scheduler: SchedulerState, allocator: BlockAllocator) -> dict[str, object]:
    prefixes = scheduler.prefixes
    if prefixes is None:
        return {}
    seats, left, block_size = scheduler.seated, prefixes.left, allocator.block_size
    holder, cached = np.minimum(seats, left), prefixes.cache.cached.tokens
    are_theirs = True
    for seat in np.flatnonzero(holder < scheduler.max_requests):
        full = allocator.rows[seat, : allocator.lengths[seat] // block_size]
        tokens = scheduler.tokens[holder[seat], : full.size * block_size].reshape(full.size, block_size)
        is_cached = allocator.pool.cached_at[full] == allocator.num_blocks
        if allocator.num_passed is not None:  # the entries before may be anything
            is_cached &= np.arange(full.size) >= allocator.num_passed[0, seat]
        are_theirs &= bool((cached[full] == tokens)[is_cached].all())
    return {
        "who_left_has_no_seat": ((seats == scheduler.max_requests) | (left == scheduler.max_requests)).all(),
        "a_change_is_due_where_somebody_left": bool(prefixes.is_due) or (left == scheduler.max_requests).all(),
        "cached_blocks_have_the_tokens_of_those_who_hold_them": are_theirs,
    }


def describe(scheduler: SchedulerState) -> str:
    """A line for all requests and one for each of the first occupied seats."""
    if np.ndim(scheduler.seated) != 1 or isinstance(scheduler.seated, jax.core.Tracer):
        return repr(scheduler)  # under vmap, or while tracing: there are no numbers to show
    seats, statuses = np.asarray(scheduler.seated), np.asarray(scheduler.statuses)
    known, limits = np.asarray(scheduler.num_known), np.asarray(scheduler.limits)
    taken = np.flatnonzero(seats < scheduler.max_requests)
    num_waiting = int((statuses == RequestStatus.WAITING).sum())
    num_finished = int((statuses > RequestStatus.RUNNING).sum())
    lines = [
        f"Scheduler: {len(taken)} of {len(seats)} seats taken, {num_waiting} requests waiting, {num_finished} finished "
        f"(of {len(statuses)}), {int(scheduler.num_steps)} of {len(scheduler.outbox)} steps in the outbox"
    ]
    lines += [
        f"  seat {seat}: request {seats[seat]}, {known[seats[seat]]} of at most {limits[seats[seat]]} tokens known"
        for seat in taken[:SHOWN_SEATS].tolist()
    ]
    if len(taken) > SHOWN_SEATS:
        lines.append(f"  and {len(taken) - SHOWN_SEATS} more seats")
    return "\n".join(lines)
