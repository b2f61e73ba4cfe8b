"""One step: plan, run the model, draw tokens, commit."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._allocator.prefix_groups import PrefixGroups
from jaxpaged._attention.attention_step import AttentionStep
from jaxpaged._cache.kv_cache import caches_in
from jaxpaged._scheduler.arrays import rows_of
from jaxpaged._scheduler.records import StepPlan
from jaxpaged._slice.drafting import call_draft
from jaxpaged._slice.kinds import Kind, count_wait
from jaxpaged._slice.model import Setup, apply_head
from jaxpaged._slice.packing import pack
from jaxpaged._slice.prefix_groups import sort_by_group
from jaxpaged._slice.process_logits import Processing
from jaxpaged._slice.scoring import StepOutputs, drawn_rows, score_and_sample
from jaxpaged._slice.state import State


def model_outputs(setup: Setup, weights: Any, state: State) -> tuple[Any, Any]:
    """The hidden states and `aux` of a step of the widest kind, of interest for their types alone."""
    kind = setup.kinds[-1]
    _, allocator, step = state.scheduler.plan(state.allocator, **kind.plan_options)
    attention_step = make_attention_step(allocator, step, kind, state.caches)
    return setup.model(weights, step.tokens, step.positions, state.caches, attention_step)[1:]


def one_step(setup: Setup, weights: Any, state: State, *, wants_logprobs: jax.Array, index: int) -> State:
    """A step of the kind `setup.kinds[index]`."""
    kind, drafting = setup.kinds[index], state.drafting
    drafts, is_silent = None, jnp.bool_(False)
    if kind.draws_all:
        assert drafting is not None
        drafts = drafting.guesses
        if setup.draft is not None:
            drafts = call_draft(setup.draft, weights, state.scheduler, drafting)
            is_silent = (drafting.guesses[:, 0] >= 0) & (drafts[:, 0] < 0)
    scheduler, allocator, step = state.scheduler.plan(state.allocator, **kind.plan_options, drafts=drafts)
    seats, groups, num_saved_reads = step.seats if kind.is_narrow else None, None, jnp.int32(0)
    if kind.least_saved_reads is not None:
        assert state.seat_groups is not None
        step, seats, groups, num_saved_reads = sort_by_group(step, state.seat_groups)
    attention_step = make_attention_step(allocator, step, kind, state.caches, seats, groups)
    caches, hidden, aux = setup.model(weights, step.tokens, step.positions, state.caches, attention_step)
    head = functools.partial(apply_head, setup, weights, hidden)
    num_drafts = scheduler.num_drafts if kind.draws_all else 0
    processing = Processing(scheduler, step, state.logit_params, state.grammars, setup.process_logits, num_drafts)
    (tokens, logprobs, top_logprobs), scores = score_and_sample(
        head, setup.options, processing, state.spans, kind, wants_logprobs
    )
    num_steps = scheduler.num_steps
    scheduler, allocator = scheduler.commit(allocator, step, tokens)
    grammars = None if state.grammars is None else state.grammars.advance(step, state.scheduler, scheduler)
    if drafting is not None:
        before, after = (rows_of(s.num_known, step.request_ids) for s in (state.scheduler, scheduler))
        drafting = drafting.update(step, after - before, is_silent)
        drafting = drafting.with_hidden(hidden, step, after - before, is_mixed=kind.is_mixed)

    rows = drawn_rows(step, kind, num_drafts=scheduler.num_drafts)
    drawn_aux = jax.tree.map(lambda x: x.at[rows].get(mode="clip"), aux)
    outputs = StepOutputs.create(setup, scheduler)
    rows_aux = outputs.rows_aux
    if rows_aux is not None:
        rows_aux = rows_aux.with_step(step, scheduler, allocator.windows, aux)
    outputs = outputs.with_step(kind, index, logprobs, top_logprobs, drawn_aux, scores, rows_aux)
    had_chunk = (jnp.diff(step.query_starts) - step.num_drafts > 1).any() if kind.is_mixed else False
    return dataclasses.replace(
        state,
        scheduler=scheduler,
        allocator=allocator,
        caches=caches,
        outputs=state.outputs.at[num_steps].set(pack(outputs, jnp), mode="drop"),
        num_waited=count_wait(state.num_waited, scheduler.num_pending(allocator), had_chunk),
        num_saved_reads=state.num_saved_reads + num_saved_reads * allocator.block_size,
        grammars=grammars,
        drafting=drafting,
    )


def make_attention_step(
    allocator: BlockAllocator,
    step: StepPlan,
    kind: Kind,
    caches: Any,
    seats: jax.Array | None = None,  # int32 [seqs], the seat of each sequence; None: all seats in order
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
