"""Drafts: guesses of a request's next tokens, so that one step may yield several of them.

A step computes the drafts behind the newest token and draws a token at each of these places, by the request's seed and
the position, as a step without drafts would when it came there. While what is drawn is the draft, it counts. So the
tokens are those of an engine without drafts, at any temperature, whatever is drafted.

A draft costs a row. How often drafts of a request were right says what one is worth, and `kinds` which step is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._scheduler import planning
from jaxpaged._scheduler.records import Step
from jaxpaged._scheduler.scheduler import Scheduler

# Weights, the known tokens int32 [seats, max_length] of each seat, and how many they are, int32 [seats]: drafts, int32
# [seats, drafts]; -1: none.
Draft = Callable[[Any, jax.Array, jax.Array], jax.Array]

LEAST_SUFFIX, MOST_SUFFIX = 2, 8  # tokens that must occur again, and those that are compared
KEPT = 0.95  # of what is known of a request's drafts, in each of its steps
PRIOR = 0.5  # how often drafts are right, before anything is known


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafting:
    """What the engine drafts, and what became of the drafts so far.

    Attributes:
        guesses: int32 `[seats, drafts]`, for the next step; the first -1 ends them. Of a caller's, which come with the
            step itself, only whether there will be any.
        hits: float32 `[requests]`, drafts that were right, those long ago for less.
        tries: float32 `[requests]`, with those that were wrong.
        num_drafted: int32 `[]`, so far, modulo 2^32.
        num_accepted: int32 `[]`, of these.
    """

    guesses: jax.Array
    hits: jax.Array
    tries: jax.Array
    num_drafted: jax.Array
    num_accepted: jax.Array

    @classmethod
    def create(cls, num_seats: int, num_drafts: int, max_requests: int) -> Drafting:
        return cls(
            guesses=jnp.full((num_seats, num_drafts), -1, jnp.int32),
            hits=jnp.zeros(max_requests, jnp.float32),
            tries=jnp.zeros(max_requests, jnp.float32),
            num_drafted=jnp.zeros((), jnp.int32),
            num_accepted=jnp.zeros((), jnp.int32),
        )

    def begun(self, request_ids: jax.Array) -> Drafting:
        """Nothing is known of these requests."""
        forget = [of_each.at[request_ids].set(0.0, mode="drop") for of_each in (self.hits, self.tries)]
        return dataclasses.replace(self, hits=forget[0], tries=forget[1])

    def guessed(
        self, scheduler: Scheduler, allocator: BlockAllocator, draft: Draft | None, row_cost: float
    ) -> Drafting:
        """With guesses for seats that decode, as far as they are worth a row. `row_cost`: of a step of no rows."""
        num_known = planning.per_seat(scheduler, scheduler.num_known)
        needed = num_known - allocator.lengths
        if draft is None:
            guesses = repeated(known_tokens(scheduler), num_known, self.guesses.shape[1])
        else:
            guesses = jnp.zeros_like(self.guesses)
        num_needing = (needed >= 1).sum(dtype=jnp.float32)
        is_worth = (needed == 1)[:, None] & (self.chances(scheduler) * (num_needing + row_cost) >= num_needing)
        return dataclasses.replace(self, guesses=jnp.where(is_worth, guesses, -1))

    def chances(self, scheduler: Scheduler) -> jax.Array:
        """How likely it is that each draft counts, float32 `[seats, drafts]`."""
        hits, tries = planning.rows_of((self.hits, self.tries), scheduler.seated)
        chance = (hits + PRIOR) / (tries + 1)
        return jnp.cumprod(jnp.broadcast_to(chance[:, None], self.guesses.shape), axis=1)

    def gains(self, scheduler: Scheduler) -> jax.Array:
        """Tokens that each guess is expected to bring, float32 `[seats, drafts]`."""
        return jnp.where(self.guesses >= 0, self.chances(scheduler), 0.0)

    def learnt(self, step: Step, num_new: jax.Array, is_silent: jax.Array | bool = False) -> Drafting:
        """After a step that gave seats `num_new` tokens. `is_silent`: bool `[seats]`, no draft came for a guess."""
        num_accepted = jnp.maximum(num_new - 1, 0)
        num_tried = jnp.minimum(num_accepted + 1, step.num_drafts + jnp.asarray(is_silent, jnp.int32))
        kept = jnp.where(num_new > 0, KEPT, 1.0)

        def count(of_requests: jax.Array, more: jax.Array) -> jax.Array:
            of_seats = planning.rows_of(of_requests, step.request_ids)
            return of_requests.at[step.request_ids].set(of_seats * kept + more.astype(jnp.float32), mode="drop")

        return dataclasses.replace(
            self,
            hits=count(self.hits, num_accepted),
            tries=count(self.tries, num_tried),
            num_drafted=self.num_drafted + step.num_drafts.sum(dtype=jnp.int32),
            num_accepted=self.num_accepted + num_accepted.sum(dtype=jnp.int32),
        )


def known_tokens(scheduler: Scheduler) -> jax.Array:
    """int32 `[seats, max_length]`, of the request in each seat; behind those that are known, any."""
    return planning.per_seat(scheduler, scheduler.tokens)


def repeated(tokens: jax.Array, num_known: jax.Array, num_drafts: int) -> jax.Array:
    """What followed when the newest tokens occurred before, int32 `[seats, num_drafts]`; -1 if they did not.

    The place with most equal tokens before it counts, of several the last. If less than `num_drafts` tokens follow it,
    they are repeated.
    """
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    num_equal, is_equal = jnp.zeros_like(tokens), index < num_known[:, None] - 1
    for i in range(MOST_SUFFIX):
        newest = jnp.take_along_axis(tokens, jnp.maximum(num_known - 1 - i, 0)[:, None], axis=1)
        is_equal &= (jnp.roll(tokens, i, axis=1) == newest) & (index >= i)
        num_equal += is_equal.astype(jnp.int32)
    worth = jnp.where(num_equal >= LEAST_SUFFIX, num_equal * tokens.shape[1] + index, -1)
    place = jnp.argmax(worth, axis=1).astype(jnp.int32)[:, None]
    period = jnp.maximum(num_known[:, None] - 1 - place, 1)
    follows = place + 1 + jnp.arange(num_drafts, dtype=jnp.int32)[None] % period
    is_found = jnp.take_along_axis(worth, place, axis=1) >= 0
    return jnp.where(is_found, jnp.take_along_axis(tokens, follows, axis=1), -1)


def drafted(draft: Draft, weights: Any, scheduler: Scheduler, guesses: jax.Array) -> jax.Array:
    """A caller's drafts, where there are guesses."""
    drafts = draft(weights, known_tokens(scheduler), planning.per_seat(scheduler, scheduler.num_known))
    if not isinstance(drafts, jax.Array) or drafts.shape != guesses.shape or drafts.dtype != jnp.int32:
        received = f"{drafts.dtype} {list(drafts.shape)}" if isinstance(drafts, jax.Array) else type(drafts).__name__
        raise ValueError(f"draft must return int32 {list(guesses.shape)}, the drafts of each seat; got {received}.")
    return jnp.where(guesses >= 0, drafts, -1)
