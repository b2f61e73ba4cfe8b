"""Changes logits before tokens are drawn: by the requests' parameters, in vLLM's order, then by the caller's function.

All changes by parameters are scatters, which XLA does in place: a branch that changes no logits copies none. If
logprobs are wanted too, the head computes the model's logits again.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged._put import put
from jaxpaged._scheduler.arrays import per_seat, rows_of
from jaxpaged._scheduler.records import Sampling, StepPlan
from jaxpaged._scheduler.scheduler import Scheduler
from jaxpaged._slice.columns import set_columns
from jaxpaged._slice.grammars import FREE, Grammars
from jaxpaged._slice.logit_params import LogitParams
from jaxpaged._slice.logits_context import LogitsContext
from jaxpaged._slice.penalties import has_penalty, penalise
from jaxpaged._slice.pytrees import describe
from jaxpaged._slice.sampling import Drawn
from jaxpaged._slice.token_lists import add_bias, forbid_bad_words, forbid_others

# Logits, float32 [rows, vocab], and the context: the new logits. A row's result must depend on its own sequence only.
ProcessLogits = Callable[[jax.Array, LogitsContext], jax.Array]


def forbid_stops(params: LogitParams, logits: jax.Array, context: LogitsContext) -> jax.Array:
    """Forbids the stop tokens of requests with fewer than `min_tokens` new tokens."""
    stop_ids = rows_of(context.stop_ids, context.seqs)
    num_new = context.lengths - rows_of(context.prompt_lengths, context.seqs)
    is_too_short = (params.min_tokens > 0) & (num_new < params.min_tokens)
    targets = jnp.where(is_too_short[:, None] & (stop_ids >= 0), stop_ids, logits.shape[1])
    return set_columns(logits, targets, -jnp.inf)


def process(params: LogitParams, logits: jax.Array, context: LogitsContext) -> jax.Array:
    """Logits `[rows, vocab]` changed by the parameters of each row, in vLLM's order.

    Only the counts of penalties cost more than a branch. [branches_h200]
    """
    for processor in (forbid_others, forbid_bad_words, forbid_stops, add_bias):
        logits = processor(params, logits, context)
    change = functools.partial(penalise, params, context=context)
    return lax.cond(has_penalty(params).any(), change, lambda logits: logits, logits)


@dataclasses.dataclass(frozen=True)
class Processing:
    """How a step changes logits.

    Attributes:
        scheduler: the scheduler after the plan, with drafts after the known tokens.
        step: the plan.
        params: `[requests, ...]`.
        grammars: the grammars of all requests; None: the engine has no vocabulary.
        function: the caller's function, if any.
        num_drafts: the most drafts of a seat in this kind of step.
    """

    scheduler: Scheduler
    step: StepPlan
    params: LogitParams
    grammars: Grammars | None
    function: ProcessLogits | None
    num_drafts: int

    def draw(
        self,
        sample: Callable[..., Drawn],
        model_logits: Callable[[], jax.Array],
        seats: jax.Array,
        sampling: Sampling,
        positions: jax.Array,
        given: jax.Array,
    ) -> Drawn:
        """`sample` from the changed logits. Given tokens see the model's logits. [branches_h200]

        Args:
            sample: `sampling.sample` with options.
            model_logits: computes the model's logits, `[rows, vocab]`.
            seats: int32 `[rows]`, the seat of each row; for padding, at least the number of seats.
            sampling: the parameters of each row.
            positions: int32 `[rows]`, position of the token that each row's logits are for.
            given: int32 `[rows]`, tokens whose logprobs are returned; -1: draw one.
        """
        logits = model_logits() if self.function is None else model_logits().astype(jnp.float32)
        is_used = (per_seat(self.scheduler, self.params.is_used) & self.step.is_sampled).any()

        def by_params(logits: jax.Array) -> jax.Array:
            context = self.context(seats, positions)
            changed = process(self.params_of_rows(seats, given), logits, context)
            return changed if self.grammars is None else self.restrict(changed, logits, given, context)

        changed = lax.cond(is_used, by_params, lambda logits: logits, logits)
        if self.function is None:

            def with_model_logits(function: Callable[[jax.Array], Any]) -> Any:
                return lax.cond(is_used, lambda: function(model_logits()), lambda: function(changed))

            return sample(changed, sampling, positions, given=given, with_model_logits=with_model_logits)
        by_function = self.function(changed, self.context(seats, positions))
        if describe(by_function) != (wanted := describe(changed)):
            raise ValueError(f"process_logits must return the new logits, {wanted}; got {describe(by_function)}.")
        changed = jnp.where((given >= 0)[:, None], changed, by_function)
        return sample(
            changed, sampling, positions, given=given, with_model_logits=lambda function: function(model_logits())
        )

    def restrict(
        self, logits: jax.Array, model_logits: jax.Array, given: jax.Array, context: LogitsContext
    ) -> jax.Array:
        """The logits with -inf for tokens that the grammars forbid."""
        grammars = self.grammars
        assert grammars is not None
        if (num_tokens := len(grammars.token_lengths)) != (vocab_size := logits.shape[1]):
            raise ValueError(f"vocabulary must have a token for each of the {vocab_size} logits; got {num_tokens}.")
        states = jnp.where(given < 0, grammars.states_of_rows(self.scheduler, context), FREE)

        def restrict(logits: jax.Array) -> jax.Array:
            restricted = grammars.restrict(logits, model_logits, states, context)
            return put(logits, jnp.arange(len(logits), dtype=jnp.int32), states != FREE, restricted)

        return lax.cond((states != FREE).any(), restrict, lambda logits: logits, logits)

    def params_of_rows(self, seats: jax.Array, given: jax.Array) -> LogitParams:
        """`[rows, ...]`, zeros for padding and given tokens."""
        request_ids = self.step.request_ids.at[seats].get(mode="fill", fill_value=self.scheduler.max_requests)
        return rows_of(self.params, jnp.where(given < 0, request_ids, self.scheduler.max_requests))

    def context(self, seats: jax.Array, positions: jax.Array) -> LogitsContext:
        scheduler, params = self.scheduler, self.params
        of_requests = dict(
            tokens=scheduler.tokens,
            num_known=scheduler.num_known,
            prompt_lengths=scheduler.prompt_lengths,
            stop_ids=scheduler.stop_ids,
            ints=params.ints,
            floats=params.floats,
        )
        return LogitsContext(
            **jax.tree.map(lambda values: per_seat(scheduler, values), of_requests),
            adapters=self.step.sampling.adapter,
            seqs=jnp.minimum(seats, scheduler.num_seqs - 1),
            lengths=positions,
            num_drafts=self.num_drafts,
        )
