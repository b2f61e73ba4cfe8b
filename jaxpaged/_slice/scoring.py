"""Scoring: logprobs of given tokens, from the same steps that sample others.

A request's span says which of its tokens are scored. A row of a step scores the token after its own, which the
scheduler knows. The head is applied to one group of rows at a time: to those that are sampled, and to those that are
scored in MOST_GROUPS groups at most. So `[tokens, vocab]` never exists. All groups have the same number of rows: what
is scored and what is sampled go through the same operations on the same shapes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged._scheduler.arrays import first_marked, rows_of
from jaxpaged._scheduler.records import StepPlan
from jaxpaged._scheduler.scheduler import Scheduler
from jaxpaged._slice.kinds import Kind
from jaxpaged._slice.sampling import TopLogprobs, sample, score

MOST_GROUPS = 4  # each is compiled by itself: in a loop the host would start each turn
# Logits [rows, vocab] of rows of the step, int32 [rows]; None: of each row.
Head = Callable[[jax.Array | None], jax.Array]
Drawn = tuple[jax.Array, jax.Array, TopLogprobs | None]  # of rows: tokens, logprobs, the most likely tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """What was scored, in any order: `[rows]` of a step, or `[steps, rows]` of a slice."""

    request_ids: jax.Array  # int32; `max_requests`: nothing
    positions: jax.Array  # int32, of the scored token in its request
    logprobs: jax.Array  # float32
    is_best: jax.Array  # bool, whether no other token has a larger logit
    top_logprobs: TopLogprobs | None  # instead of the scored token; None: nobody can ask for them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """Per-step outputs for the host, besides the scheduler's outbox. A slice keeps them packed, `[steps, words]`."""

    logprobs: jax.Array  # float32, like the tokens of a step in the outbox
    top_logprobs: TopLogprobs | None  # like them; None: nobody can ask for them
    aux: Any  # like them: of the token that each was drawn from, what the model returns as `aux`
    scores: Scores  # [rows]

    @classmethod
    def create(cls, scheduler: Scheduler, kinds: Sequence[Kind], num_top_logprobs: int, aux: Any) -> StepOutputs:
        """Of a step of any kind without tokens. `aux`: the types of a token's."""
        num_drawn = scheduler.outbox_tokens.shape[1]
        most_scored = max(map(num_scored, kinds))
        return cls(
            jnp.zeros(num_drawn, jnp.float32),
            TopLogprobs.create(num_drawn, num_top_logprobs),
            jax.tree.map(lambda x: jnp.zeros((num_drawn, *x.shape), x.dtype), aux),
            Scores(
                request_ids=jnp.full(most_scored, scheduler.max_requests, jnp.int32),
                positions=jnp.zeros(most_scored, jnp.int32),
                logprobs=jnp.zeros(most_scored, jnp.float32),
                is_best=jnp.zeros(most_scored, jnp.bool_),
                top_logprobs=TopLogprobs.create(most_scored, num_top_logprobs),
            ),
        )

    def with_step(
        self,
        kind: Kind,
        logprobs: jax.Array,
        top_logprobs: TopLogprobs | None,
        aux: Any,
        scores: Scores,
        *,
        drafts: int,
    ) -> StepOutputs:
        """With what `score_and_sample` found in a step of this kind, and the `aux` of what its tokens were drawn from.

        `drafts`: the most of a seat.
        """

        def of_each_draw(new: jax.Array) -> jax.Array:
            new = new if kind.draws_all else new[:, None]
            missing = drafts + 1 - new.shape[1]
            new = jnp.pad(new, ((0, 0), (0, missing), *[(0, 0)] * (new.ndim - 2)))
            return new.reshape(-1, *new.shape[2:])

        logprobs, top_logprobs, aux = jax.tree.map(of_each_draw, (logprobs, top_logprobs, aux))
        # Not `.at[: len(new)]`, here and in the allocator: it is a scatter by an array without numbers, over which jax
        # 0.11.2 crashes if caches are on a mesh.
        scores = jax.tree.map(
            lambda nothing, new: lax.dynamic_update_slice_in_dim(nothing, new, 0, axis=0), self.scores, scores
        )
        return StepOutputs(logprobs, top_logprobs, aux, scores)


def group_size(kind: Kind) -> int:
    """The rows to which the head is applied at a time."""
    return max(kind.num_seats, -(-kind.width // MOST_GROUPS))


def num_scored(kind: Kind) -> int:
    """The rows of all groups that are scored."""
    return -(-kind.width // group_size(kind)) * group_size(kind)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Of each row of a step: the token behind its own."""

    request_ids: jax.Array  # int32; `max_requests`: it is not scored
    positions: jax.Array  # int32, in its request
    is_scored: jax.Array  # bool
    given: jax.Array  # int32, the scored token; -1: none

    @classmethod
    def of(cls, step: StepPlan, kind: Kind, scheduler: Scheduler, spans: jax.Array) -> Rows:
        request_ids = rows_of(step.request_ids, step.seats)
        request_ids = jnp.where(step.seats < kind.num_seats, request_ids, scheduler.max_requests)
        positions = step.positions + 1
        begin, end = rows_of(spans, request_ids).T
        is_scored = (begin <= positions) & (positions < end)
        known = scheduler.tokens.at[request_ids, positions].get(mode="fill", fill_value=0)
        given = jnp.where(is_scored, known, -1)
        return cls(jnp.where(is_scored, request_ids, scheduler.max_requests), positions, is_scored, given)


def drawn_rows(step: StepPlan, kind: Kind, *, num_drafts: int) -> jax.Array:
    """The row that each token of `score_and_sample` is drawn from, int32 `[seats]`, or `[seats, drafts + 1]`."""
    if kind.draws_all:
        return (step.last - step.num_drafts)[:, None] + jnp.arange(num_drafts + 1, dtype=jnp.int32)[None]
    if kind.is_mixed:
        return step.last
    rows = jnp.arange(len(step.seats), dtype=jnp.int32)
    return jnp.zeros(kind.num_seats, jnp.int32).at[step.seats].set(rows, mode="drop")


def score_and_sample(
    head: Head,
    scheduler: Scheduler,
    spans: jax.Array,  # int32 [requests, 2], where the scored tokens of each request begin and end
    step: StepPlan,
    kind: Kind,
    wants_logprobs: jax.Array,
    *,
    is_processed: bool,
    num_top_logprobs: int,
) -> tuple[jax.Array, jax.Array, TopLogprobs | None, Scores]:
    """The next token of each seat, int32 `[seats]`, its logprob, float32 `[seats]`, the most likely tokens there, and
    the scores of the step's rows.

    If a seat's next token is scored, it is not sampled but given. If seats may have drafts, what is of a seat's next
    token is of its last known token and of its drafts, `[seats, drafts + 1]`.
    """
    rows = Rows.of(step, kind, scheduler, spans)
    draw = functools.partial(
        sample, wants_logprobs=wants_logprobs, is_processed=is_processed, num_top_logprobs=num_top_logprobs
    )
    if not kind.is_mixed or kind.draws_all:
        return _of_each_row(head, step, kind, rows, draw, num_drafts=scheduler.num_drafts)
    judge = functools.partial(score, wants_logprobs=wants_logprobs, num_top_logprobs=num_top_logprobs)
    return _of_groups(
        head, step, kind, rows, draw, judge, num_top_logprobs=num_top_logprobs, nobody=scheduler.max_requests
    )


def _of_each_row(
    head: Head, step: StepPlan, kind: Kind, rows: Rows, draw: Callable[..., Drawn], *, num_drafts: int
) -> tuple[jax.Array, jax.Array, TopLogprobs | None, Scores]:
    """Where each row is sampled or scored."""
    sampling = rows_of(step.sampling, step.seats) if kind.is_by_row else step.sampling
    drawn, logprobs, top_logprobs = draw(head(None), sampling, rows.positions, given=rows.given)
    scores = Scores(rows.request_ids, rows.positions, logprobs, drawn == rows.given, top_logprobs)
    of_rows = jnp.where(rows.is_scored, rows.given, drawn), logprobs, top_logprobs
    if kind.draws_all:
        theirs = drawn_rows(step, kind, num_drafts=num_drafts)
        of_rows = jax.tree.map(lambda values: values.at[theirs].get(mode="clip"), of_rows)
    elif kind.is_by_row:
        of_rows = jax.tree.map(
            lambda values: (
                jnp.zeros((kind.num_seats, *values.shape[1:]), values.dtype).at[step.seats].set(values, mode="drop")
            ),
            of_rows,
        )
    return *of_rows, scores


def _of_groups(
    head: Head,
    step: StepPlan,
    kind: Kind,
    rows: Rows,
    draw: Callable[..., Drawn],
    judge: Callable[..., Drawn],
    *,
    num_top_logprobs: int,
    nobody: int,
) -> tuple[jax.Array, jax.Array, TopLogprobs | None, Scores]:
    """Where few rows are: a group of those that are sampled, and groups of those that are scored."""
    size, every = group_size(kind), jnp.arange(kind.width, dtype=jnp.int32)
    scored = first_marked(every, rows.is_scored, size=num_scored(kind), fill_value=kind.width)
    last, of_last = jax.tree.map(lambda x: jnp.pad(x, (0, size - len(x))), (step.last, step.sampling))

    def draw_group(group: jax.Array) -> Drawn:
        return draw(head(group), of_last, rows.positions[group], given=rows.given[group])

    def score_group(group: jax.Array) -> Drawn:
        return judge(head(group), rows.given[group])

    def skip_group(group: jax.Array) -> Drawn:
        return jnp.zeros_like(group), jnp.zeros(size, jnp.float32), TopLogprobs.create(size, num_top_logprobs)

    # Not a loop that ends by a condition: a GPU's call would wait for the model. [slices_h100]
    is_used = jnp.arange(0, len(scored), size) < rows.is_scored.sum(dtype=jnp.int32)
    _, of_groups = lax.scan(
        lambda _, group: (None, lax.cond(group[0], score_group, skip_group, group[1])),
        None,
        (is_used, scored.reshape(-1, size)),
        unroll=MOST_GROUPS,
    )
    best, *of_scored = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), of_groups)
    request_ids, positions, given = rows_of((rows.request_ids, rows.positions, rows.given), scored)
    request_ids = jnp.where(scored < kind.width, request_ids, nobody)
    scores = Scores(request_ids, positions, of_scored[0], best == given, of_scored[1])

    is_drawn = (step.is_sampled & ~rows.is_scored[step.last]).any()
    of_group = lax.cond(is_drawn, draw_group, skip_group, last)
    tokens, logprobs, top_logprobs = jax.tree.map(lambda x: x[: kind.num_seats], of_group)
    tokens = jnp.where(rows.is_scored[step.last], rows.given[step.last], tokens)
    return tokens, logprobs, top_logprobs, scores
