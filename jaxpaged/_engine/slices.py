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
from jaxpaged._allocator.prefix_groups import PrefixGroups
from jaxpaged._attention.plan import plan_step
from jaxpaged._engine.drafting import Draft, drafted
from jaxpaged._engine.inputs import caches_in
from jaxpaged._engine.kinds import Kind, count_wait, next_kind
from jaxpaged._engine.packing import pack, unpack
from jaxpaged._engine.prefix_groups import find_groups, sort_by_group
from jaxpaged._engine.pytrees import difference, in_same_containers
from jaxpaged._engine.scoring import Told, score_and_sample, with_head
from jaxpaged._engine.state import Inbox, Report, State
from jaxpaged._engine.step_attention import StepAttention
from jaxpaged._scheduler import planning
from jaxpaged._scheduler.records import RequestStatus, Sampling, Step
from jaxpaged._scheduler.scheduler import Scheduler

Apply = Callable[[Any, jax.Array, jax.Array, Any, StepAttention], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is the same in all slices of an engine, besides weights and shapes."""

    apply: Apply
    kinds: tuple[Kind, ...]
    growth: int | None = None  # tokens of a request until a host tier's next one begins; None: there is none
    draft: Draft | None = None
    row_cost: float = 0.0  # of a step without rows, as in `Kind.cost`
    is_processed: bool = False  # as in `sample`
    num_likely: int = 0  # as in `sample`
    hidden: jax.ShapeDtypeStruct | None = None  # of a token, what `apply` returns third


def run_packed(
    setup: Setup, no_news: Inbox, weights: Any, state: State, last: jax.Array, words: Any
) -> tuple[State, jax.Array]:
    """`run_slice` between a packed inbox with the shapes of `no_news` and a packed report, in the place of the last."""
    state, report = run_slice(setup, weights, state, unpack(words, no_news))
    return state, pack(report, jnp)


def run_slice(setup: Setup, weights: Any, state: State, inbox: Inbox) -> tuple[State, Report]:
    kinds = setup.kinds
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
        findable=jnp.where(inbox.spans[:, 1] > 0, inbox.spans[:, 0] - 1, inbox.prompts.shape[1]),
        **{field.name: getattr(inbox.sampling, field.name) for field in dataclasses.fields(Sampling)},
    )
    spans = state.spans.at[request_ids].set(inbox.spans, mode="drop")
    drafting = None if state.drafting is None else state.drafting.begun(request_ids, jnp.asarray(inbox.families))
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
        state = settled(state, is_open)
        admitted = planning.admit_waiting(state.scheduler, state.allocator, is_open=is_open)
        state = dataclasses.replace(state, scheduler=admitted)
        num_spared, gains = 0 if state.seat_groups is None else state.seat_groups.num_spared, None
        if state.drafting is not None:
            drafting = state.drafting.guessed(state.scheduler, state.allocator, setup.draft, setup.row_cost)
            state, gains = dataclasses.replace(state, drafting=drafting), drafting.gains(state.scheduler)
        kind = next_kind(state.scheduler, state.allocator, state.num_waited, kinds, num_spared, gains)
        return lax.switch(jnp.where(goes_on(state), kind, len(kinds)), [*steps, lambda state: state], state)

    # Their number is known, and no step has a loop, unless the model or its attention has: XLA puts all of an event
    # into a CUDA graph, and a call waits for no step. [slices_h100] [slices_h200]
    state = lax.fori_loop(0, len(state.told), lambda _, state: one_event(state), state)
    # A change that is due after the last step is made too: what ended is to be drained, and its blocks free.
    state = settled(state, is_open)
    return tell(setup, state, request_ids, refusals)


def tell(setup: Setup, state: State, request_ids: jax.Array, refusals: jax.Array) -> tuple[State, Report]:
    """Behind the last step: the state for the next slice, and the report of this one."""
    scheduler, outbox = state.scheduler.drain()
    nothing = Told.create(scheduler, setup.kinds, setup.num_likely)
    told = jax.vmap(lambda words: unpack(words, nothing))(state.told)
    is_told = jnp.arange(len(state.told), dtype=jnp.int32) < outbox.num_steps
    scored = jnp.where(is_told[:, None], told.scores.request_ids, scheduler.max_requests)
    report = Report(
        request_ids=request_ids,
        refusals=refusals,
        outbox=outbox,
        logprobs=told.logprobs,
        likely=told.likely,
        scores=dataclasses.replace(told.scores, request_ids=scored),
        num_running=(scheduler.seated < scheduler.max_requests).sum(dtype=jnp.int32),
        num_free=state.allocator.num_free,
        num_of_kind=state.num_of_kind,
        num_spared=state.num_spared,
        num_drafted=jnp.zeros((), jnp.int32) if state.drafting is None else state.drafting.num_drafted,
        num_accepted=jnp.zeros((), jnp.int32) if state.drafting is None else state.drafting.num_accepted,
        num_computed=scheduler.num_computed,
        num_found=num_found(scheduler, state.allocator),
        num_recomputed=scheduler.num_recomputed,
        num_preempted=scheduler.num_preempted,
        num_cached=None if scheduler.prefixes is None else jnp.array(scheduler.prefixes.num_found),
    )
    if setup.growth is not None:
        assert scheduler.prefixes is not None
        allocator, cache = state.allocator, scheduler.prefixes.cache
        is_listed = allocator.pool.is_cached(jnp.arange(allocator.num_blocks, dtype=jnp.int32))
        serials = cache.listing.serials
        serials = jnp.where(allocator.pool.cached_at == allocator.num_blocks, serials, -serials)
        most = jnp.minimum(scheduler.num_known + setup.growth, scheduler.limits - 1)
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


def settled(state: State, is_open: jax.Array) -> State:
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


def one_step(setup: Setup, weights: Any, state: State, *, wants_logprobs: jax.Array, index: int) -> State:
    """A step of the kind `setup.kinds[index]`."""
    kind, drafting = setup.kinds[index], state.drafting
    drafts, is_silent = None, jnp.zeros((), jnp.bool_)
    if kind.draws_all:
        assert drafting is not None
        drafts = drafting.guesses
        if setup.draft is not None:
            drafts = drafted(setup.draft, weights, state.scheduler, drafting)
            is_silent = (drafting.guesses[:, 0] >= 0) & (drafts[:, 0] < 0)
    scheduler, allocator, step = planning.plan(
        state.scheduler, state.allocator, kind.width, is_mixed=kind.is_mixed, drafts=drafts
    )
    seats, groups, num_spared = step.seats if kind.is_narrow else None, None, jnp.zeros((), jnp.int32)
    if kind.least_spared is not None:
        assert state.seat_groups is not None
        step, seats, groups, num_spared = sort_by_group(step, state.seat_groups)
    attend = step_attention(allocator, step, kind, state.caches, seats, groups)
    model = functools.partial(apply_model, setup.apply, weights, state.caches, step, hidden=setup.hidden)
    caches, head, hidden = with_head(model, attend)
    tokens, logprobs, likely, scores = score_and_sample(
        head,
        scheduler,
        state.spans,
        step,
        kind,
        wants_logprobs,
        is_processed=setup.is_processed,
        num_likely=setup.num_likely,
    )
    index_of_step = scheduler.num_steps
    scheduler, allocator = scheduler.commit(allocator, step, tokens)
    if drafting is not None:
        before, after = (planning.rows_of(s.num_known, step.request_ids) for s in (state.scheduler, scheduler))
        drafting = drafting.learnt(step, after - before, is_silent)
        drafting = drafting.with_hidden(hidden, step, after - before, is_mixed=kind.is_mixed)

    told = Told.create(scheduler, setup.kinds, setup.num_likely)
    told = told.with_step(kind, logprobs, likely, scores, drafts=scheduler.num_drafts)
    num_given = jnp.diff(step.query_starts) - step.num_drafts
    return dataclasses.replace(
        state,
        scheduler=scheduler,
        allocator=allocator,
        caches=caches,
        told=state.told.at[index_of_step].set(pack(told, jnp), mode="drop"),
        num_waited=count_wait(state.num_waited, scheduler.num_pending(allocator), num_given),
        num_of_kind=state.num_of_kind.at[index].add(1),
        num_spared=state.num_spared + num_spared * allocator.block_size,
        drafting=drafting,
    )


def step_attention(
    allocator: BlockAllocator,
    step: Step,
    kind: Kind,
    caches: Any,
    seats: jax.Array | None = None,  # of the step's sequences; None: each seat in its order
    groups: PrefixGroups | None = None,
) -> StepAttention:
    query_starts = step.query_starts if kind.is_mixed else None
    if seats is not None:
        allocator = allocator.of_seqs(seats)
    # Made here once: in a scan over layers each would make its own.
    kv_heads = {cache.k.shape[-2] for cache in caches_in(caches)}
    plan = None
    if query_starts is None and kind.num_partitions is None and len(kv_heads) == 1:
        capacity = allocator.block_tables.shape[-1] * allocator.block_size
        lengths = allocator.lengths
        if groups is not None:
            lengths -= groups.num_blocks * allocator.block_size
        plan = plan_step(lengths, num_kv_heads=kv_heads.pop(), capacity=capacity)
    adapters = step.sampling.adapter.at[step.seats].get(mode="fill", fill_value=-1)
    last = None if kind.draws_all else step.last
    own = step.positions, step.slots, query_starts, last, adapters
    return StepAttention(allocator, *own, kind.num_partitions, plan, groups)


def apply_model(
    apply: Apply,
    weights: Any,
    caches: Any,
    step: Step,
    attend: StepAttention,
    *,
    hidden: jax.ShapeDtypeStruct | None = None,
) -> tuple[Any, ...]:
    """The model over a step's tokens: the new caches, and logits `[seqs, vocab]`, or `[tokens, vocab]` with drafts.

    `hidden`: that of a token; the third value is then `[tokens, ...]`, that of each.
    """
    returned = apply(weights, step.tokens, step.positions, caches, attend)
    num_returned = len(returned) if isinstance(returned, tuple | list) else 1
    if hidden is None and num_returned != 2:
        raise ValueError(f"apply must return two values, (caches, logits); got {num_returned}.")
    if hidden is not None and num_returned != 3:
        raise ValueError(f"apply must return (caches, logits, hidden), as the engine has hidden; got {num_returned}.")
    new_caches, logits, *rest = returned
    if hidden is not None:
        wanted = jax.ShapeDtypeStruct((len(step.tokens), *hidden.shape), hidden.dtype)
        if found := difference(wanted, rest[0]):
            raise ValueError(f"the third value that apply returns must be the hidden state of each token; {found}.")
    if not isinstance(logits, jax.Array):
        raise ValueError(f"apply must return (caches, logits); got {type(logits).__name__} for the logits.")
    if logits.ndim != 2 or logits.shape[0] != attend.num_newest:
        raise ValueError(
            f"apply must return logits [{attend.num_newest}, vocab], one row for each of attend.newest(x); got "
            f"{list(logits.shape)}. Take attend.newest(x) before the head, and attend.num_newest for its rows."
        )
    new_caches = in_same_containers(caches, new_caches)
    if found := difference(caches, new_caches):
        raise ValueError(f"apply must return caches like those it was given; {found}.")
    if all(map(operator.is_, jax.tree.leaves(caches), jax.tree.leaves(new_caches))):
        raise ValueError("apply must return the new caches, which `cache, out = attend(q, k, v, cache)` gives it.")
    return new_caches, logits, *rest
