"""Scoring: logprobs of given tokens, computed in the steps that sample other requests.

A request's span says which of its tokens are scored. A row of a step scores the token after its own, which the
scheduler knows. To avoid logits `[tokens, vocab]`, the head is applied to one group of rows at a time: one group of
sampled rows, and at most MOST_GROUPS groups of scored rows. All groups have the same number of rows, so that scored and
sampled rows go through the same operations on the same shapes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged._scheduler.arrays import first_marked, rows_of
from jaxpaged._scheduler.records import StepPlan
from jaxpaged._scheduler.scheduler import Scheduler
from jaxpaged._slice.kinds import Kind
from jaxpaged._slice.model import Setup
from jaxpaged._slice.options import ResolvedOptions
from jaxpaged._slice.process_logits import Processing
from jaxpaged._slice.prompt_aux import RowsAux
from jaxpaged._slice.sampling import Drawn, TopLogprobs, sample, score

MOST_GROUPS = 4  # each is compiled separately: in a loop the host would start each iteration
Head = Callable[[jax.Array | None], jax.Array]  # row indices, int32 [rows], or None for all: logits [rows, vocab]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores in any order: `[rows]` in a step, `[steps, rows]` in a slice."""

    request_ids: jax.Array  # int32; `max_requests`: no score
    positions: jax.Array  # int32, position of the scored token in its request
    logprobs: jax.Array  # float32
    is_best: jax.Array  # bool, no other token has a larger logit
    top_logprobs: TopLogprobs | None  # the most likely tokens at the position; None: max_logprobs is 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """Per-step outputs for the host, in addition to the scheduler's outbox. A slice keeps them packed, `[steps,
    words]`."""

    logprobs: jax.Array  # float32 [draws], one for each token of a step in the outbox
    top_logprobs: TopLogprobs | None  # [draws]; None: max_logprobs is 0
    aux: Any  # each leaf [draws, ...], the model's `aux` for the row that each token was drawn from
    scores: Scores  # [rows]
    rows_aux: RowsAux | None  # None: without prompt_aux
    kind: jax.Array  # int32 [], index of the step's kind

    @classmethod
    def create(cls, setup: Setup, scheduler: Scheduler) -> StepOutputs:
        """Outputs of a step without tokens."""
        num_drawn, most_scored = scheduler.outbox.shape[-1], max(map(num_scored, setup.kinds))
        return cls(
            jnp.zeros(num_drawn, jnp.float32),
            TopLogprobs.create(num_drawn, setup.options.max_logprobs),
            jax.tree.map(lambda x: jnp.zeros((num_drawn, *x.shape), x.dtype), setup.aux),
            Scores(
                request_ids=jnp.full(most_scored, scheduler.max_requests, jnp.int32),
                positions=jnp.zeros(most_scored, jnp.int32),
                logprobs=jnp.zeros(most_scored, jnp.float32),
                is_best=jnp.zeros(most_scored, jnp.bool_),
                top_logprobs=TopLogprobs.create(most_scored, setup.options.max_logprobs),
            ),
            rows_aux=RowsAux.create(setup.kinds[-1].width, setup.aux, setup.options)
            if setup.options.prompt_aux
            else None,
            kind=jnp.zeros((), jnp.int32),
        )

    def with_step(
        self,
        kind: Kind,
        index: int,
        logprobs: jax.Array,
        top_logprobs: TopLogprobs | None,
        aux: Any,
        scores: Scores,
        rows_aux: RowsAux | None,
    ) -> StepOutputs:
        """Adds the results of `score_and_sample` for a step of this kind, the kind's index, and the `aux` of the
        sampled rows and of all rows."""

        def pad(new: jax.Array) -> jax.Array:
            new = new if kind.draws_all else new[:, None]
            missing = len(self.logprobs) // len(new) - new.shape[1]
            new = jnp.pad(new, ((0, 0), (0, missing), *[(0, 0)] * (new.ndim - 2)))
            return new.reshape(-1, *new.shape[2:])

        # Not `.at[: len(new)]`, here and in the allocator: it is a scatter with an empty index array, over which jax
        # 0.11.2 crashes if caches are on a mesh.
        scores = jax.tree.map(
            lambda old, new: lax.dynamic_update_slice_in_dim(old, new, 0, axis=0), self.scores, scores
        )
        logprobs, top_logprobs, aux = jax.tree.map(pad, (logprobs, top_logprobs, aux))
        return StepOutputs(logprobs, top_logprobs, aux, scores, rows_aux, jnp.int32(index))


def group_size(kind: Kind) -> int:
    """Rows to which the head is applied at a time."""
    return max(kind.num_seats, -(-kind.width // MOST_GROUPS))


def num_scored(kind: Kind) -> int:
    """Rows in all groups of scored rows."""
    return -(-kind.width // group_size(kind)) * group_size(kind)


@dataclasses.dataclass(frozen=True)
class Rows:
    """For each row of a step, the token after the row's own."""

    request_ids: jax.Array  # int32; `max_requests`: not scored
    positions: jax.Array  # int32, position in the request
    is_scored: jax.Array  # bool
    given: jax.Array  # int32, the scored token; -1: none

    @classmethod
    def create(cls, step: StepPlan, kind: Kind, scheduler: Scheduler, spans: jax.Array) -> Rows:
        request_ids = rows_of(step.request_ids, step.seats)
        request_ids = jnp.where(step.seats < kind.num_seats, request_ids, scheduler.max_requests)
        positions = step.positions + 1
        begin, end = rows_of(spans, request_ids).T
        is_scored = (begin <= positions) & (positions < end)
        known = scheduler.tokens.at[request_ids, positions].get(mode="clip")
        given = jnp.where(is_scored, known, -1)
        return cls(jnp.where(is_scored, request_ids, scheduler.max_requests), positions, is_scored, given)


def drawn_rows(step: StepPlan, kind: Kind, *, num_drafts: int) -> jax.Array:
    """The row that each token of `score_and_sample` is drawn from, int32 `[seats]`, or `[seats, drafts + 1]`."""
    if not kind.draws_all:
        return step.last
    return (step.last - step.num_drafts)[:, None] + jnp.arange(num_drafts + 1, dtype=jnp.int32)[None]


def score_and_sample(
    head: Head,
    options: ResolvedOptions,
    processing: Processing,
    spans: jax.Array,  # int32 [requests, 2], where the scored tokens of each request begin and end
    kind: Kind,
    wants_logprobs: jax.Array,
) -> tuple[Drawn, Scores]:
    """The next token of each seat, `[seats]`, and the scores of the step's rows.

    Where the next token is one to score, it is the given one, and nothing is sampled. Scores are the model's: only rows
    to sample from are processed. A kind of step that draws at
    every row returns `[seats, drafts + 1]` instead: the tokens after a seat's last known token and after each of its
    drafts.
    """
    scheduler, step = processing.scheduler, processing.step
    rows = Rows.create(step, kind, scheduler, spans)
    how: Any = dict(wants_logprobs=wants_logprobs, num_top_logprobs=options.max_logprobs)
    draw = functools.partial(processing.draw, functools.partial(sample, is_processed=options.processed_logprobs, **how))
    if not kind.is_mixed or kind.draws_all:
        return _by_row(head, scheduler, step, kind, rows, draw)
    judge = functools.partial(score, **how)
    return _by_group(head, scheduler, step, kind, rows, draw, judge, options.max_logprobs)


def _by_row(
    head: Head, scheduler: Scheduler, step: StepPlan, kind: Kind, rows: Rows, draw: Callable[..., Drawn]
) -> tuple[Drawn, Scores]:
    """Samples or scores every row."""
    sampling = rows_of(step.sampling, step.seats) if kind.is_by_row else step.sampling
    tokens, logprobs, top_logprobs = draw(
        functools.partial(head, None), step.seats, sampling, rows.positions, rows.given
    )
    scores = Scores(rows.request_ids, rows.positions, logprobs, tokens == rows.given, top_logprobs)
    drawn = jnp.where(rows.is_scored, rows.given, tokens), logprobs, top_logprobs

    if kind.is_by_row:
        index = drawn_rows(step, kind, num_drafts=scheduler.num_drafts)
        drawn = jax.tree.map(lambda x: x.at[index].get(mode="clip"), drawn)
    return drawn, scores


def _by_group(
    head: Head,
    scheduler: Scheduler,
    step: StepPlan,
    kind: Kind,
    rows: Rows,
    draw: Callable[..., Drawn],
    judge: Callable[..., Drawn],
    num_top_logprobs: int,
) -> tuple[Drawn, Scores]:
    """Samples one group of rows, and scores others in groups of the same size."""
    size, index = group_size(kind), jnp.arange(kind.width, dtype=jnp.int32)
    scored = first_marked(index, rows.is_scored, size=num_scored(kind), fill_value=kind.width)
    last, sampling = jax.tree.map(lambda x: jnp.pad(x, (0, size - len(x))), (step.last, step.sampling))
    seats = jnp.arange(size, dtype=jnp.int32)  # more than there are: padding

    def draw_group(group: jax.Array) -> Drawn:
        return draw(functools.partial(head, group), seats, sampling, rows.positions[group], rows.given[group])

    def score_group(group: jax.Array) -> Drawn:
        return judge(head(group), rows.given[group])

    def skip_group(group: jax.Array) -> Drawn:
        return jnp.zeros_like(group), jnp.zeros(size, jnp.float32), TopLogprobs.create(size, num_top_logprobs)

    # Not a loop with a traced end: on a GPU the call would wait for the model. [slices_h100]
    is_used = jnp.arange(0, len(scored), size) < rows.is_scored.sum(dtype=jnp.int32)
    _, groups = lax.scan(
        lambda _, group: (None, lax.cond(group[0], score_group, skip_group, group[1])),
        None,
        (is_used, scored.reshape(-1, size)),
        unroll=MOST_GROUPS,
    )
    best, logprobs, top_logprobs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), groups)
    request_ids, positions, given = rows_of((rows.request_ids, rows.positions, rows.given), scored)
    request_ids = jnp.where(scored < kind.width, request_ids, scheduler.max_requests)
    scores = Scores(request_ids, positions, logprobs, best == given, top_logprobs)

    is_given = rows.is_scored[step.last]
    drawn = lax.cond((step.is_sampled & ~is_given).any(), draw_group, skip_group, last)
    tokens, logprobs, top_logprobs = jax.tree.map(lambda x: x[: kind.num_seats], drawn)
    return (jnp.where(is_given, rows.given[step.last], tokens), logprobs, top_logprobs), scores
