"""Grammars on the device: the states of their automata in one pool, and the state of each request.

In a step, a row may only draw tokens that its state allows. A token moves the state by its bytes, one at a time: a
table of the state after each token would need 500 times the memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged._grammar.vocabulary import Vocabulary
from jaxpaged._scheduler.arrays import per_seat, rows_of
from jaxpaged._scheduler.records import StepPlan
from jaxpaged._scheduler.scheduler import Scheduler
from jaxpaged._slice.columns import get_columns, set_columns
from jaxpaged._slice.logits_context import LogitsContext

FREE = 0  # the state of requests without a grammar: it allows all tokens, and all bytes lead back to it
BITS = 32  # tokens in a word of a mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GrammarPool:
    """Automata one after another, as NumPy or JAX arrays. State FREE and mask 0 belong to no grammar."""

    next_states: Any  # int32 [states, 256], the state after each byte; FREE after a forbidden one
    mask_of_state: Any  # int32 [states]
    is_end: Any  # bool [states], whether the answer may end
    masks: Any  # uint32 [masks, words], the allowed tokens, as in `Grammar`

    @classmethod
    def create(cls, vocab_size: int, *, num_states: int, num_masks: int) -> GrammarPool:
        masks = jnp.zeros((num_masks, -(-vocab_size // BITS)), jnp.uint32)
        return cls(
            next_states=jnp.zeros((num_states, 256), jnp.int32),
            mask_of_state=jnp.zeros(num_states, jnp.int32),
            is_end=jnp.zeros(num_states, jnp.bool_).at[FREE].set(True),
            masks=masks.at[0].set(jnp.iinfo(jnp.uint32).max),
        )

    def with_part(self, part: GrammarPool, states: jax.Array, masks: jax.Array) -> GrammarPool:
        """The pool with rows of `part` at these states and masks, int32. Rows past the end are dropped."""
        at = dataclasses.replace(self, next_states=states, mask_of_state=states, is_end=states, masks=masks)
        put = lambda old, new, rows: old.at[rows].set(new, mode="drop", unique_indices=True)  # noqa: E731
        return jax.tree.map(put, self, part, at)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grammars:
    """The grammars of all requests.

    Attributes:
        pool: the grammars.
        token_bytes: uint8 `[vocab, width]`, as in `Vocabulary`.
        token_lengths: uint8 `[vocab]`, the number of bytes of each token.
        states: int32 `[requests]`, the state after the known tokens of each request.
    """

    pool: GrammarPool
    token_bytes: jax.Array
    token_lengths: jax.Array
    states: jax.Array

    @classmethod
    def create(cls, vocabulary: Vocabulary, *, num_states: int, num_masks: int, max_requests: int) -> Grammars:
        return cls(
            pool=GrammarPool.create(len(vocabulary), num_states=num_states, num_masks=num_masks),
            token_bytes=jnp.asarray(vocabulary.token_bytes),
            token_lengths=jnp.asarray(vocabulary.token_lengths),
            states=jnp.full(max_requests, FREE, jnp.int32),
        )

    def walk(self, states: jax.Array, tokens: jax.Array) -> jax.Array:
        """The states after a token each, int32 `[n]`."""
        of_token, lengths = rows_of((self.token_bytes, self.token_lengths), tokens)
        for i in range(of_token.shape[1]):
            after = self.pool.next_states[states, of_token[:, i]]
            states = jnp.where(i < lengths, after, states)
        return states

    def advance(self, step: StepPlan, before: Scheduler, after: Scheduler) -> Grammars:
        """The states after the tokens that a step added to the known tokens of its requests."""
        seated = rows_of(self.states, step.request_ids)
        num_before, num_after = (rows_of(scheduler.num_known, step.request_ids) for scheduler in (before, after))

        def walked() -> jax.Array:
            states = seated
            for i in range(before.num_drafts + 1):
                tokens = get_columns(after.tokens, (num_before + i)[:, None], step.request_ids)[:, 0]
                states = jnp.where(num_before + i < num_after, self.walk(states, tokens), states)
            return states

        states = jax.lax.cond((seated != FREE).any(), walked, lambda: seated)
        return dataclasses.replace(self, states=self.states.at[step.request_ids].set(states, mode="drop"))

    def states_of_rows(self, scheduler: Scheduler, context: LogitsContext) -> jax.Array:
        """The state of each row, after the tokens before it, int32 `[rows]`. After a forbidden draft it is FREE."""
        states = [per_seat(scheduler, self.states)]
        for i in range(context.num_drafts):
            draft = get_columns(context.tokens, (context.num_known + i)[:, None])[:, 0]
            states.append(self.walk(states[-1], draft))
        num_drafts = jnp.clip(context.lengths - rows_of(context.num_known, context.seqs), 0, context.num_drafts)
        return jnp.stack(states)[num_drafts, context.seqs]

    def restrict(
        self, logits: jax.Array, model_logits: jax.Array, states: jax.Array, context: LogitsContext
    ) -> jax.Array:
        """`logits` `[rows, vocab]` with -inf for the tokens that the states of the rows do not allow.

        Stop tokens are allowed where the answer may end. If all tokens that the grammar allows are forbidden already,
        by `min_tokens` for instance, the grammar counts: they get their `model_logits`.
        """
        pool, vocab_size = self.pool, logits.shape[1]
        words = pool.masks[pool.mask_of_state[states]]
        bits = words[:, :, None] >> jnp.arange(BITS, dtype=jnp.uint32)[None, None] & jnp.uint32(1)
        is_allowed = bits.reshape(len(states), -1)[:, :vocab_size] != 0
        stop_ids = rows_of(context.stop_ids, context.seqs)
        is_restricted = (stop_ids >= 0) & (states != FREE)[:, None]
        stop_ids = jnp.where(is_restricted, stop_ids, vocab_size)
        is_allowed = set_columns(is_allowed, stop_ids, pool.is_end[states][:, None])
        restricted = jnp.where(is_allowed, logits, -jnp.inf)
        is_stuck = (restricted == -jnp.inf).all(axis=1, keepdims=True)
        return jnp.where(is_stuck, jnp.where(is_allowed, model_logits, -jnp.inf), restricted)
