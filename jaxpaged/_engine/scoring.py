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

from jaxpaged._engine.kinds import Kind
from jaxpaged._engine.sampling import Likely, sample, score
from jaxpaged._engine.step_attention import StepAttention
from jaxpaged._scheduler.arrays import first_marked, rows_of
from jaxpaged._scheduler.records import Step
from jaxpaged._scheduler.scheduler import Scheduler

MOST_GROUPS = 4  # each is compiled by itself: in a loop the host would start each turn
Head = Callable[[jax.Array], jax.Array]  # logits [rows, vocab] of rows of the step, int32 [rows]
Drawn = tuple[jax.Array, jax.Array, Likely | None]  # of rows: tokens, logprobs, the most likely tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """What was scored, in any order: `[rows]` of a step, or `[steps, rows]` of a slice."""

    request_ids: jax.Array  # int32; `max_requests`: nothing
    positions: jax.Array  # int32, of the scored token in its request
    logprobs: jax.Array  # float32
    is_best: jax.Array  # bool, whether no other token has a larger logit
    likely: Likely | None  # instead of the scored token; None: nobody can ask for them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Told:
    """What a step tells the host beside the scheduler's outbox. A slice keeps it packed, `[steps, words]`."""

    logprobs: jax.Array  # float32, like the tokens of a step in the outbox
    likely: Likely | None  # like them; None: nobody can ask for them
    scores: Scores  # [rows]

    @classmethod
    def create(cls, scheduler: Scheduler, kinds: Sequence[Kind], num_likely: int) -> Told:
        """Of a step of any of the kinds that tells nothing."""
        num_drawn = scheduler.outbox_tokens.shape[1]
        most_scored = max(map(num_scored, kinds))
        return cls(
            jnp.zeros(num_drawn, jnp.float32),
            Likely.create(num_drawn, num_likely),
            Scores(
                request_ids=jnp.full(most_scored, scheduler.max_requests, jnp.int32),
                positions=jnp.zeros(most_scored, jnp.int32),
                logprobs=jnp.zeros(most_scored, jnp.float32),
                is_best=jnp.zeros(most_scored, jnp.bool_),
                likely=Likely.create(most_scored, num_likely),
            ),
        )

    def with_step(self, kind: Kind, logprobs: jax.Array, likely: Likely | None, scores: Scores, *, drafts: int) -> Told:
        """With what `score_and_sample` found in a step of this kind. `drafts`: the most of a seat."""

        def of_each_draw(new: jax.Array) -> jax.Array:
            new = new if kind.draws_all else new[:, None]
            missing = drafts + 1 - new.shape[1]
            new = jnp.pad(new, ((0, 0), (0, missing), *[(0, 0)] * (new.ndim - 2)))
            return new.reshape(-1, *new.shape[2:])

        logprobs, likely = jax.tree.map(of_each_draw, (logprobs, likely))
        # Not `.at[: len(new)]`, here and in the allocator: it is a scatter by an array without numbers, over which jax
        # 0.11.2 crashes if caches are on a mesh.
        scores = jax.tree.map(
            lambda nothing, new: lax.dynamic_update_slice_in_dim(nothing, new, 0, axis=0), self.scores, scores
        )
        return Told(logprobs, likely, scores)


def group_size(kind: Kind) -> int:
    """The rows to which the head is applied at a time."""
    return max(kind.num_seats, -(-kind.width // MOST_GROUPS))


def num_scored(kind: Kind) -> int:
    """The rows of all groups that are scored."""
    return -(-kind.width // group_size(kind)) * group_size(kind)


@dataclasses.dataclass(frozen=True, repr=False)
class Recorder(StepAttention):
    """Keeps what the head is applied to."""

    recorded: list[jax.Array] = dataclasses.field(default_factory=list)

    def newest(self, x: jax.Array) -> jax.Array:
        # Of an inner function's trace it could not be used after it. JAX has no public name for a tracer's trace.
        if isinstance(x, jax.core.Tracer) and getattr(x, "_trace", 0) is not getattr(self.positions, "_trace", 0):
            raise ValueError("call attend.newest(x) in apply itself, not in a function that it gives to jit or scan.")
        self.recorded.append(x)
        return super().newest(x)


@dataclasses.dataclass(frozen=True, repr=False)
class Replay(StepAttention):
    """For a second run of the model of which only the head is used: it is applied to other rows."""

    rows: list[jax.Array] = dataclasses.field(default_factory=list)
    num_rows: int = 0

    @property
    def num_newest(self) -> int:
        return self.num_rows

    def newest(self, x: jax.Array) -> jax.Array:
        return self.rows.pop(0)


def with_head(
    model: Callable[[StepAttention], tuple[Any, ...]], attend: StepAttention
) -> tuple[Any, Head, jax.Array | None]:
    """The new caches of a step, the head, which can be applied to any of its rows, and what else the model returns.

    Each call of the head traces the model once more; all but the head is dead code then.
    """
    recorder = Recorder(**vars(attend))
    caches, logits, *rest = model(recorder)
    hidden = rest[0] if rest else None
    if attend.query_starts is None or attend.last is None:
        return caches, lambda rows: logits, hidden
    if not recorder.recorded:
        raise ValueError("apply never called attend.newest(x); apply the head to what it returns.")

    def head(rows: jax.Array) -> jax.Array:
        replay = Replay(**vars(attend), rows=[x[rows] for x in recorder.recorded], num_rows=len(rows))
        return model(replay)[1]

    return caches, head, hidden


@dataclasses.dataclass(frozen=True)
class Rows:
    """Of each row of a step: the token behind its own."""

    request_ids: jax.Array  # int32; `max_requests`: it is not scored
    positions: jax.Array  # int32, in its request
    is_scored: jax.Array  # bool
    given: jax.Array  # int32, the scored token; -1: none

    @classmethod
    def of(cls, step: Step, kind: Kind, scheduler: Scheduler, spans: jax.Array) -> Rows:
        request_ids = rows_of(step.request_ids, step.seats)
        request_ids = jnp.where(step.seats < kind.num_seats, request_ids, scheduler.max_requests)
        positions = step.positions + 1
        begin, end = rows_of(spans, request_ids).T
        is_scored = (begin <= positions) & (positions < end)
        known = scheduler.tokens.at[request_ids, positions].get(mode="fill", fill_value=0)
        given = jnp.where(is_scored, known, -1)
        return cls(jnp.where(is_scored, request_ids, scheduler.max_requests), positions, is_scored, given)


def score_and_sample(
    head: Head,
    scheduler: Scheduler,
    spans: jax.Array,  # int32 [requests, 2], where the scored tokens of each request begin and end
    step: Step,
    kind: Kind,
    wants_logprobs: jax.Array,
    *,
    is_processed: bool,
    num_likely: int,
) -> tuple[jax.Array, jax.Array, Likely | None, Scores]:
    """The next token of each seat, int32 `[seats]`, its logprob, float32 `[seats]`, the most likely tokens there, and
    the scores of the step's rows.

    If a seat's next token is scored, it is not sampled but given. If seats may have drafts, what is of a seat's next
    token is of its last known token and of its drafts, `[seats, drafts + 1]`.
    """
    rows = Rows.of(step, kind, scheduler, spans)
    draw = functools.partial(sample, wants_logprobs=wants_logprobs, is_processed=is_processed, num_likely=num_likely)
    if not kind.is_mixed or kind.draws_all:
        return _of_each_row(head, step, kind, rows, draw, num_drafts=scheduler.num_drafts)
    judge = functools.partial(score, wants_logprobs=wants_logprobs, num_likely=num_likely)
    return _of_groups(head, step, kind, rows, draw, judge, num_likely=num_likely, nobody=scheduler.max_requests)


def _of_each_row(
    head: Head, step: Step, kind: Kind, rows: Rows, draw: Callable[..., Drawn], *, num_drafts: int
) -> tuple[jax.Array, jax.Array, Likely | None, Scores]:
    """Where each row is sampled or scored."""
    sampling = rows_of(step.sampling, step.seats) if kind.is_by_row else step.sampling
    drawn, logprobs, likely = draw(head(step.last), sampling, rows.positions, given=rows.given)
    scores = Scores(rows.request_ids, rows.positions, logprobs, drawn == rows.given, likely)
    of_rows = jnp.where(rows.is_scored, rows.given, drawn), logprobs, likely
    if kind.draws_all:
        theirs = (step.last - step.num_drafts)[:, None] + jnp.arange(num_drafts + 1, dtype=jnp.int32)[None]
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
    step: Step,
    kind: Kind,
    rows: Rows,
    draw: Callable[..., Drawn],
    judge: Callable[..., Drawn],
    *,
    num_likely: int,
    nobody: int,
) -> tuple[jax.Array, jax.Array, Likely | None, Scores]:
    """Where few rows are: a group of those that are sampled, and groups of those that are scored."""
    size, every = group_size(kind), jnp.arange(kind.width, dtype=jnp.int32)
    scored = first_marked(every, rows.is_scored, size=num_scored(kind), fill_value=kind.width)
    last, of_last = jax.tree.map(lambda x: jnp.pad(x, (0, size - len(x))), (step.last, step.sampling))

    def draw_group(group: jax.Array) -> Drawn:
        return draw(head(group), of_last, rows.positions[group], given=rows.given[group])

    def score_group(group: jax.Array) -> Drawn:
        return judge(head(group), rows.given[group])

    def skip_group(group: jax.Array) -> Drawn:
        return jnp.zeros_like(group), jnp.zeros(size, jnp.float32), Likely.create(size, num_likely)

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
    tokens, logprobs, likely = jax.tree.map(lambda x: x[: kind.num_seats], of_group)
    tokens = jnp.where(rows.is_scored[step.last], rows.given[step.last], tokens)
    return tokens, logprobs, likely, scores
