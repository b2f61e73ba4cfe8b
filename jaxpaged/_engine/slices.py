"""A slice: many steps of a model in one jit, between what the host sends in and what it gets back."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._engine.sampling import sample
from jaxpaged._engine.step_attention import StepAttention
from jaxpaged._scheduler import planning
from jaxpaged._scheduler.records import Outbox, Sampling, Step
from jaxpaged._scheduler.scheduler import Scheduler

Apply = Callable[[Any, jax.Array, jax.Array, Any, StepAttention], tuple[Any, jax.Array]]

# Prompts are computed once they fill a chunk, so that steps with chunks are few; or before, where that leaves too many
# seats without a token to decode, or one has waited for so many steps.
BUSY_EIGHTHS, LONGEST_WAIT = 7, 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What stays on the device from slice to slice; donated to each."""

    scheduler: Scheduler
    allocator: BlockAllocator
    caches: Any
    logprobs: jax.Array  # float32 [steps, seats], beside the tokens of the scheduler's outbox
    num_waited: jax.Array  # int32 [], steps since prompts wait for a step with a chunk
    num_mixed: jax.Array  # int32 [], steps with a chunk so far, modulo 2^32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inbox:
    """What the host sends in with a slice. Rows without a request have a prompt length of 0."""

    prompts: Any  # int32 [rows, max_tokens]
    prompt_lengths: Any  # int32 [rows]
    max_new_tokens: Any  # int32 [rows]
    priorities: Any  # int32 [rows]
    stop_ids: Any  # int32 [rows, stop_ids]
    sampling: Sampling  # of each row
    aborts: Any  # bool [requests]
    wants_logprobs: Any  # bool []
    num_steps: Any  # int32 [], the most steps of this slice


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """What the host gets back. It shares no buffer with the state, so that it can be read during the next slice."""

    request_ids: jax.Array  # int32 [rows], of the inbox
    refusals: jax.Array  # int32 [rows]
    outbox: Outbox
    logprobs: jax.Array  # float32 [steps, seats]
    num_running: jax.Array  # int32 []
    num_free: jax.Array  # int32 [], blocks
    num_mixed: jax.Array  # int32 [], so far, as the next three
    num_computed: jax.Array
    num_recomputed: jax.Array
    num_preempted: jax.Array


def run_slice(apply: Apply, weights: Any, state: State, inbox: Inbox, *, chunk_tokens: int) -> tuple[State, Report]:
    scheduler, allocator = state.scheduler.abort(state.allocator, inbox.aborts)
    scheduler, request_ids, refusals = scheduler.submit(
        allocator,
        inbox.prompts,
        inbox.prompt_lengths,
        inbox.max_new_tokens,
        priorities=inbox.priorities,
        stop_ids=inbox.stop_ids,
        **{field.name: getattr(inbox.sampling, field.name) for field in dataclasses.fields(Sampling)},
    )
    state = dataclasses.replace(state, scheduler=scheduler, allocator=allocator)

    def goes_on(state: State) -> jax.Array:
        return state.scheduler.has_work & (state.scheduler.num_steps < inbox.num_steps)

    def loop(state: State, *, with_chunk: bool) -> State:
        def condition(state: State) -> jax.Array:
            return goes_on(state) & (wants_chunk(state, chunk_tokens) == with_chunk)

        def body(state: State) -> State:
            return one_step(apply, weights, state, inbox.wants_logprobs, chunk_tokens if with_chunk else 0)

        return lax.while_loop(condition, body, state)

    # Two loops, one of which may run no step, instead of a branch: on a GPU a branch copies the caches.
    state = lax.while_loop(goes_on, lambda state: loop(loop(state, with_chunk=False), with_chunk=True), state)

    scheduler, outbox = state.scheduler.drain()
    report = Report(
        request_ids=request_ids,
        refusals=refusals,
        outbox=outbox,
        logprobs=state.logprobs,
        num_running=(scheduler.seated < scheduler.max_requests).sum(dtype=jnp.int32),
        num_free=state.allocator.num_free,
        num_mixed=state.num_mixed,
        num_computed=scheduler.num_computed,
        num_recomputed=scheduler.num_recomputed,
        num_preempted=scheduler.num_preempted,
    )
    return dataclasses.replace(state, scheduler=scheduler, logprobs=jnp.zeros_like(state.logprobs)), report


def wants_chunk(state: State, chunk_tokens: int) -> jax.Array:
    """Whether the next step has a chunk of prompts, bool `[]`."""
    scheduler, allocator = state.scheduler, state.allocator
    num_pending = scheduler.num_pending(allocator)
    num_decoding = (planning.of_seats(scheduler, scheduler.num_known) - allocator.lengths == 1).sum(dtype=jnp.int32)
    is_idle = 8 * num_decoding < BUSY_EIGHTHS * scheduler.num_seats
    is_due = is_idle | (state.num_waited >= LONGEST_WAIT)
    return (num_pending >= chunk_tokens) | (is_due & (num_pending > 0))


def one_step(apply: Apply, weights: Any, state: State, wants_logprobs: jax.Array, chunk_tokens: int) -> State:
    scheduler, allocator, step = state.scheduler.plan(state.allocator, chunk_tokens=chunk_tokens)
    caches, logits = apply_model(apply, weights, state.caches, allocator, step, is_packed=chunk_tokens > 0)
    tokens, logprobs = sample(logits, step.sampling, allocator.lengths, wants_logprobs)
    logprobs = state.logprobs.at[scheduler.num_steps].set(logprobs, mode="drop")
    scheduler, allocator = scheduler.commit(allocator, step, tokens)
    is_waiting = scheduler.num_pending(allocator) > 0
    return State(
        scheduler=scheduler,
        allocator=allocator,
        caches=caches,
        logprobs=logprobs,
        num_waited=jnp.zeros_like(state.num_waited) if chunk_tokens else jnp.where(is_waiting, state.num_waited + 1, 0),
        num_mixed=state.num_mixed + int(chunk_tokens > 0),
    )


def apply_model(
    apply: Apply, weights: Any, caches: Any, allocator: BlockAllocator, step: Step, *, is_packed: bool
) -> tuple[Any, jax.Array]:
    """The model over a step's tokens: the new caches, and the logits of each seat, `[seats, vocab]`."""
    query_starts = step.query_starts if is_packed else None
    attend = StepAttention(allocator, step.positions, step.slots, query_starts, step.last)
    new_caches, logits = apply(weights, step.tokens, step.positions, caches, attend)
    num_seats = step.last.shape[0]
    if logits.ndim != 2 or logits.shape[0] != num_seats:
        raise ValueError(
            f"apply must return logits [{num_seats}, vocab], one row for each seat; got {list(logits.shape)}. "
            "Take attend.newest(x) before the head."
        )
    before, after = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (caches, new_caches))
    if before != after:
        raise ValueError(f"apply must return the caches as it was given them; got {after} for {before}.")
    return new_caches, logits
