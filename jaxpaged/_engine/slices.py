"""A slice: many steps of a model in one jit, between what the host sends in and what it gets back."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._engine.pytrees import difference, in_same_containers
from jaxpaged._engine.sampling import sample
from jaxpaged._engine.step_attention import StepAttention
from jaxpaged._scheduler import planning
from jaxpaged._scheduler.records import Outbox, Sampling, Step
from jaxpaged._scheduler.scheduler import Scheduler

Apply = Callable[[Any, jax.Array, jax.Array, Any, StepAttention], tuple[Any, jax.Array]]

# Prompts wait until they fill a chunk, so that steps with chunks are few. They are computed sooner if fewer than
# BUSY_EIGHTHS of the seats have a token to decode, or after LONGEST_WAIT steps.
BUSY_EIGHTHS, LONGEST_WAIT = 7, 16
NARROW = 4  # if at most this part of the seats is taken, steps have places for no more


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What stays on the device from slice to slice; donated to each."""

    scheduler: Scheduler
    allocator: BlockAllocator
    caches: Any
    logprobs: jax.Array  # float32 [steps, seats], beside the tokens of the scheduler's outbox
    num_waited: jax.Array  # int32 [], steps since prompts wait for a step with a chunk
    num_of_kind: jax.Array  # int32 [kinds], steps of each kind so far, modulo 2^32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inbox:
    """What the host sends in with a slice. A row without a request has a prompt length of 0."""

    prompts: Any  # int32 [rows, max_length]
    prompt_lengths: Any  # int32 [rows]
    max_new_tokens: Any  # int32 [rows]
    priorities: Any  # int32 [rows]
    stop_ids: Any  # int32 [rows, stop_ids]
    sampling: Sampling  # of each row
    aborts: Any  # bool [requests]
    forgets: Any  # bool [], whether the weights have changed since the slice before
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
    num_of_kind: jax.Array  # int32 [kinds], steps so far, as the next four
    num_computed: jax.Array
    num_found: jax.Array
    num_recomputed: jax.Array
    num_preempted: jax.Array


def run_slice(
    apply: Apply, weights: Any, state: State, inbox: Inbox, *, kinds: tuple["Kind", ...]
) -> tuple[State, Report]:
    scheduler, allocator = state.scheduler.abort(state.allocator, inbox.aborts)
    prefixes = scheduler.prefixes
    if prefixes is not None:
        scheduler = scheduler.forget_prefixes(inbox.forgets)
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

    def is_change_due(state: State) -> jax.Array:
        return state.scheduler.is_change_due

    def loop(state: State, index: int) -> State:
        def condition(state: State) -> jax.Array:
            return goes_on(state) & ~is_change_due(state) & (next_kind(state, kinds) == index)

        def body(state: State) -> State:
            return one_step(apply, weights, state, inbox.wants_logprobs, kinds, index)

        return lax.while_loop(condition, body, state)

    # A loop for each kind, which may run no step, instead of a branch: on a GPU a branch copies the caches.
    def one_event(state: State) -> State:
        if prefixes is not None:
            state = lax.while_loop(is_change_due, change_seats, state)
        return functools.reduce(loop, range(len(kinds)), state)

    # A change that is due after the last step is made too: what ended is to be drained, and its blocks free.
    state = lax.while_loop(lambda state: goes_on(state) | is_change_due(state), one_event, state)

    scheduler, outbox = state.scheduler.drain()
    report = Report(
        request_ids=request_ids,
        refusals=refusals,
        outbox=outbox,
        logprobs=state.logprobs,
        num_running=(scheduler.seated < scheduler.max_requests).sum(dtype=jnp.int32),
        num_free=state.allocator.num_free,
        num_of_kind=state.num_of_kind,
        num_computed=scheduler.num_computed,
        num_found=num_found(scheduler, state.allocator),
        num_recomputed=scheduler.num_recomputed,
        num_preempted=scheduler.num_preempted,
    )
    return dataclasses.replace(state, scheduler=scheduler, logprobs=jnp.zeros_like(state.logprobs)), report


def change_seats(state: State) -> State:
    scheduler, allocator = state.scheduler.change_seats(state.allocator)
    return dataclasses.replace(state, scheduler=scheduler, allocator=allocator)


def num_found(scheduler: Scheduler, allocator: BlockAllocator) -> jax.Array:
    """Tokens found in the prefix cache so far, int32 `[]`, modulo 2^32."""
    if scheduler.prefixes is None:
        return jnp.zeros((), jnp.int32)
    return scheduler.prefixes.cache.num_hits * allocator.block_size


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of step, by its static shape. Single tokens of a few seats, single tokens of all, or those and a chunk.

    Attributes:
        num_places: tokens that it has room for.
        num_seats: of the scheduler.
        num_partitions: the default of each call of attention.
    """

    num_places: int
    num_seats: int
    num_partitions: int | None = None

    @property
    def has_chunk(self) -> bool:
        return self.num_places > self.num_seats

    @property
    def is_narrow(self) -> bool:
        return self.num_places < self.num_seats


def kinds_of_steps(num_seats: int, chunk_tokens: int, *, exact: bool = False) -> tuple[Kind, ...]:
    """The kinds, from few places to many; the last has a chunk. An exact engine has only the last."""
    narrow, mixed = max(1, num_seats // NARROW), num_seats + chunk_tokens
    if exact:
        return (Kind(mixed, num_seats, num_partitions=1),)
    return tuple(Kind(num_places, num_seats) for num_places in (narrow, num_seats, mixed))


def next_kind(state: State, kinds: tuple[Kind, ...]) -> jax.Array:
    """Which of the kinds the next step has, int32 `[]`."""
    if len(kinds) == 1:
        return jnp.zeros((), jnp.int32)
    narrow, _, mixed = kinds
    scheduler, allocator = state.scheduler, state.allocator
    num_pending = scheduler.num_pending(allocator)
    num_decoding = (planning.per_seat(scheduler, scheduler.num_known) - allocator.lengths == 1).sum(dtype=jnp.int32)
    is_idle = 8 * num_decoding < BUSY_EIGHTHS * scheduler.num_seats
    is_due = is_idle | (state.num_waited >= LONGEST_WAIT)
    wants_chunk = (num_pending >= mixed.num_places - mixed.num_seats) | (is_due & (num_pending > 0))
    is_full = (scheduler.seated < scheduler.max_requests).sum(dtype=jnp.int32) > narrow.num_places
    return jnp.where(wants_chunk, 2, is_full.astype(jnp.int32))


def one_step(
    apply: Apply, weights: Any, state: State, wants_logprobs: jax.Array, kinds: tuple[Kind, ...], index: int
) -> State:
    kind = kinds[index]
    plan = functools.partial(state.scheduler.plan, state.allocator)
    if kind.is_narrow:
        scheduler, allocator, step = plan(num_places=kind.num_places)
    else:
        scheduler, allocator, step = plan(chunk_tokens=kind.num_places - kind.num_seats)
    attend = step_attention(allocator, step, kind)
    caches, logits = apply_model(apply, weights, state.caches, step, attend)
    sampling = planning.rows_of(step.sampling, step.seats) if kind.is_narrow else step.sampling
    tokens, logprobs = sample(logits, sampling, attend.allocator.lengths, wants_logprobs)
    if kind.is_narrow:
        tokens, logprobs = (
            jnp.zeros(kind.num_seats, values.dtype).at[step.seats].set(values, mode="drop")
            for values in (tokens, logprobs)
        )
    logprobs = state.logprobs.at[scheduler.num_steps].set(logprobs, mode="drop")
    scheduler, allocator = scheduler.commit(allocator, step, tokens)
    is_waiting = scheduler.num_pending(allocator) > 0
    return State(
        scheduler=scheduler,
        allocator=allocator,
        caches=caches,
        logprobs=logprobs,
        num_waited=jnp.zeros_like(state.num_waited)
        if kind.has_chunk
        else jnp.where(is_waiting, state.num_waited + 1, 0),
        num_of_kind=state.num_of_kind.at[index].add(1),
    )


def step_attention(allocator: BlockAllocator, step: Step, kind: Kind) -> StepAttention:
    query_starts = step.query_starts if kind.has_chunk else None
    if kind.is_narrow:
        rows = planning.rows_of((allocator.block_tables, allocator.lengths), step.seats)
        allocator = dataclasses.replace(allocator, block_tables=rows[0], lengths=rows[1])
    return StepAttention(allocator, step.positions, step.slots, query_starts, step.last, kind.num_partitions)


def apply_model(apply: Apply, weights: Any, caches: Any, step: Step, attend: StepAttention) -> tuple[Any, jax.Array]:
    """The model over a step's tokens: the new caches, and logits `[seqs, vocab]`."""
    returned = apply(weights, step.tokens, step.positions, caches, attend)
    num_returned = len(returned) if isinstance(returned, tuple | list) else 1
    if num_returned != 2:
        raise ValueError(f"apply must return two values, (caches, logits); got {num_returned}.")
    new_caches, logits = returned
    if not isinstance(logits, jax.Array):
        raise ValueError(f"apply must return (caches, logits); got {type(logits).__name__} for the logits.")
    if logits.ndim != 2 or logits.shape[0] != attend.num_seqs:
        raise ValueError(
            f"apply must return logits [{attend.num_seqs}, vocab], one row for each sequence; got "
            f"{list(logits.shape)}. Take attend.newest(x) before the head."
        )
    new_caches = in_same_containers(caches, new_caches)
    if found := difference(caches, new_caches):
        raise ValueError(f"apply must return caches like those it was given; {found}.")
    if all(map(operator.is_, jax.tree.leaves(caches), jax.tree.leaves(new_caches))):
        raise ValueError("apply must return the new caches, which `cache, out = attend(q, k, v, cache)` gives it.")
    return new_caches, logits
