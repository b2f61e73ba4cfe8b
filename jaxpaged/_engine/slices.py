"""A slice: many steps of a model in one jit, between what the host sends in and what it gets back."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._allocator.prefix_groups import PrefixGroups
from jaxpaged._attention.attention_step import AttentionStep
from jaxpaged._attention.writes import check_written, watch_writes
from jaxpaged._engine.drafting import Draft, call_draft
from jaxpaged._engine.inputs import caches_in
from jaxpaged._engine.kinds import Kind, count_wait, next_kind
from jaxpaged._engine.options import ResolvedOptions
from jaxpaged._engine.packing import pack, unpack
from jaxpaged._engine.prefix_groups import find_groups, sort_by_group
from jaxpaged._engine.pytrees import difference, in_same_containers
from jaxpaged._engine.scoring import StepOutputs, drawn_rows, score_and_sample
from jaxpaged._engine.state import Inbox, Report, State
from jaxpaged._scheduler.arrays import rows_of
from jaxpaged._scheduler.records import RequestStatus, StepPlan
from jaxpaged._scheduler.scheduler import Scheduler

# Weights, tokens, positions, caches and the step: the new caches, hidden states, and perhaps `aux`.
Apply = Callable[[Any, jax.Array, jax.Array, Any, AttentionStep], tuple[Any, ...]]
ApplyHead = Callable[[Any, Any], jax.Array]  # weights and hidden states of some rows: logits [rows, vocab]


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is the same in all slices of an engine, besides weights and shapes."""

    model: Callable[..., tuple[Any, Any, Any]]  # `apply_model` of the model, jitted: traced once for a kind of steps
    head: ApplyHead | None
    kinds: tuple[Kind, ...]
    options: ResolvedOptions
    draft: Draft | None = None
    row_cost: float = 0.0  # of a step without rows, as in `Kind.cost`
    aux: Any = None  # the types of what `apply` returns as such for a token


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


def model_outputs(setup: Setup, weights: Any, state: State) -> tuple[Any, Any]:
    """The types of what the model returns for a token: hidden states, and `aux`."""
    kind = setup.kinds[-1]
    _, allocator, step = state.scheduler.plan(state.allocator, chunk_tokens=kind.chunk_tokens, width=kind.fewer_rows)
    attention_step = make_attention_step(allocator, step, kind, state.caches)
    return setup.model(weights, step.tokens, step.positions, state.caches, attention_step)[1:]


def one_step(setup: Setup, weights: Any, state: State, *, wants_logprobs: jax.Array, index: int) -> State:
    """A step of the kind `setup.kinds[index]`."""
    kind, drafting = setup.kinds[index], state.drafting
    drafts, is_silent = None, jnp.zeros((), jnp.bool_)
    if kind.draws_all:
        assert drafting is not None
        drafts = drafting.guesses
        if setup.draft is not None:
            drafts = call_draft(setup.draft, weights, state.scheduler, drafting)
            is_silent = (drafting.guesses[:, 0] >= 0) & (drafts[:, 0] < 0)
    scheduler, allocator, step = state.scheduler.plan(
        state.allocator, chunk_tokens=kind.chunk_tokens, width=kind.fewer_rows, drafts=drafts
    )
    seats, groups, num_saved_reads = step.seats if kind.is_narrow else None, None, jnp.zeros((), jnp.int32)
    if kind.least_saved_reads is not None:
        assert state.seat_groups is not None
        step, seats, groups, num_saved_reads = sort_by_group(step, state.seat_groups)
    attention_step = make_attention_step(allocator, step, kind, state.caches, seats, groups)
    caches, hidden, aux = setup.model(weights, step.tokens, step.positions, state.caches, attention_step)
    head = functools.partial(apply_head, setup, weights, hidden)
    tokens, logprobs, top_logprobs, scores = score_and_sample(
        head,
        scheduler,
        state.spans,
        step,
        kind,
        wants_logprobs,
        is_processed=setup.options.processed_logprobs,
        num_top_logprobs=setup.options.max_logprobs,
    )
    index_of_step = scheduler.num_steps
    scheduler, allocator = scheduler.commit(allocator, step, tokens)
    if drafting is not None:
        before, after = (rows_of(s.num_known, step.request_ids) for s in (state.scheduler, scheduler))
        drafting = drafting.update(step, after - before, is_silent)
        drafting = drafting.with_hidden(hidden, step, after - before, is_mixed=kind.is_mixed)

    rows = drawn_rows(step, kind, num_drafts=scheduler.num_drafts)
    aux = jax.tree.map(lambda x: x.at[rows].get(mode="clip"), aux)
    outputs = StepOutputs.create(scheduler, setup.kinds, setup.options.max_logprobs, setup.aux)
    outputs = outputs.with_step(kind, logprobs, top_logprobs, aux, scores, drafts=scheduler.num_drafts)
    num_given = jnp.diff(step.query_starts) - step.num_drafts
    return dataclasses.replace(
        state,
        scheduler=scheduler,
        allocator=allocator,
        caches=caches,
        outputs=state.outputs.at[index_of_step].set(pack(outputs, jnp), mode="drop"),
        num_waited=count_wait(state.num_waited, scheduler.num_pending(allocator), num_given),
        num_of_kind=state.num_of_kind.at[index].add(1),
        num_saved_reads=state.num_saved_reads + num_saved_reads * allocator.block_size,
        drafting=drafting,
    )


def make_attention_step(
    allocator: BlockAllocator,
    step: StepPlan,
    kind: Kind,
    caches: Any,
    seats: jax.Array | None = None,  # of the step's sequences; None: each seat in its order
    groups: PrefixGroups | None = None,
) -> AttentionStep:
    if seats is not None:
        allocator = allocator.of_seqs(seats)
    kv_heads = {cache.k.shape[-2] for cache in caches_in(caches)}
    return AttentionStep.create(
        allocator,
        step.slots,
        positions=step.positions,
        query_starts=step.query_starts if kind.is_mixed else None,
        prefix_groups=groups,
        adapters=step.sampling.adapter.at[step.seats].get(mode="fill", fill_value=-1),
        num_kv_heads=kv_heads.pop() if len(kv_heads) == 1 else None,
        num_partitions=kind.num_partitions,
    )


def apply_model(
    apply: Apply, weights: Any, tokens: jax.Array, positions: jax.Array, caches: Any, step: AttentionStep
) -> tuple[Any, Any, Any]:
    """The model over a step's tokens: the new caches, hidden states and `aux`, whose leaves are `[tokens, ...]`."""
    try:
        with watch_writes(caches):
            returned = apply(weights, tokens, positions, caches, step)
    except StopIteration as failure:
        raise ValueError(
            f"apply asked for more caches than the engine's {len(caches_in(caches))}: one for each layer."
        ) from failure
    if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
        num_returned = len(returned) if isinstance(returned, tuple | list) else 1
        raise ValueError(f"apply must return (caches, hidden) or (caches, hidden, aux); got {num_returned} values.")
    new_caches, hidden, aux = returned if len(returned) == 3 else (*returned, None)
    for name, tree in (("hidden", hidden), ("aux", aux)):
        for path, leaf in jax.tree.leaves_with_path(tree):
            if not isinstance(leaf, jax.Array) or leaf.shape[:1] != tokens.shape:
                received = list(leaf.shape) if isinstance(leaf, jax.Array) else type(leaf).__name__
                raise ValueError(
                    f"apply must return {name} [{len(tokens)}, ...], one row for each token; got {received} at "
                    f"{jax.tree_util.keystr(path) or 'its root'}. The engine picks the rows that the head needs."
                )
    if not jax.tree.leaves(hidden):
        raise ValueError(f"apply must return hidden states, or logits if the engine has no head; got {hidden!r}.")
    new_caches = in_same_containers(caches, new_caches)
    if changed := difference(caches, new_caches):
        raise ValueError(f"apply must return caches like those it was given; {changed}.")
    check_written(caches, new_caches)
    return new_caches, hidden, aux


def apply_head(setup: Setup, weights: Any, hidden: Any, rows: jax.Array | None) -> jax.Array:
    """The logits of some rows of a step, `[rows, vocab]`; None: of all."""
    of_rows = hidden if rows is None else jax.tree.map(lambda x: x[rows], hidden)
    logits = of_rows if setup.head is None else setup.head(weights, of_rows)
    num_rows, vocab_size = len(jax.tree.leaves(of_rows)[0]), setup.options.vocab_size
    shape = logits.shape if isinstance(logits, jax.Array) else None
    if shape is None or len(shape) != 2 or shape[0] != num_rows or vocab_size not in (None, shape[1]):
        received = type(logits).__name__ if shape is None else list(shape)
        who = "head" if setup.head is not None else "apply of an engine with head=None"
        raise ValueError(f"{who} must return logits [{num_rows}, {vocab_size or 'vocab'}]; got {received}.")
    return logits
