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
from jaxpaged._scheduler.arrays import per_seat, rows_of
from jaxpaged._scheduler.records import StepPlan
from jaxpaged._scheduler.scheduler import Scheduler
from jaxpaged._slice.options import EngineOptions

# Weights, the known tokens int32 [seats, max_model_len] of each seat, how many they are, int32 [seats], and hidden
# states, each leaf [seats, ...]: drafts, int32 [seats, drafts]; -1: none.
Draft = Callable[..., jax.Array]

LEAST_SUFFIX, MOST_SUFFIX = 2, 8  # tokens that must occur again, and those that are compared
KEPT = 0.95  # of what is known of a request's drafts, in each of its steps
PRIOR = 0.75  # how often a caller's drafts are right, before anything is known


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafting:
    """What the engine drafts, and what became of the drafts so far.

    Attributes:
        guesses: int32 `[seats, drafts]`, for the next step; the first -1 ends them. Of a caller's, which come with the
            step itself, only whether there will be any.
        families: int32 `[requests]`, the same for completions of one request; -1: none.
        priors: float32 `[seats]`, how likely a guess is to be right if nothing else is known.
        hits: float32 `[requests]`, drafts that were right, those long ago for less.
        tries: float32 `[requests]`, with those that were wrong.
        hidden: each leaf `[seats, ...]`, what the model returned for the token before each seat's newest. None: it is
            not kept.
        owners: int32 `[seats]`, the request that each hidden state is of; -1: none.
        num_drafted: int32 `[]`, so far, modulo 2^32.
        num_accepted: int32 `[]`, of these.
    """

    guesses: jax.Array
    families: jax.Array
    priors: jax.Array
    hits: jax.Array
    tries: jax.Array
    hidden: Any
    owners: jax.Array
    num_drafted: jax.Array
    num_accepted: jax.Array

    @classmethod
    def create(cls, num_seats: int, num_drafts: int, max_requests: int) -> Drafting:
        """It keeps no hidden states: see `with_room`."""
        return cls(
            guesses=jnp.full((num_seats, num_drafts), -1, jnp.int32),
            families=jnp.full(max_requests, -1, jnp.int32),
            priors=jnp.full(num_seats, PRIOR, jnp.float32),
            hits=jnp.zeros(max_requests, jnp.float32),
            tries=jnp.zeros(max_requests, jnp.float32),
            hidden=None,
            owners=jnp.full(num_seats, -1, jnp.int32),
            num_drafted=jnp.zeros((), jnp.int32),
            num_accepted=jnp.zeros((), jnp.int32),
        )

    def with_room(self, hidden: Any) -> Drafting:
        """For the hidden states of tokens of these types; None: they are not kept."""
        num_seats = len(self.owners)
        room = jax.tree.map(lambda x: jnp.zeros((num_seats, *x.shape), x.dtype), hidden)
        return dataclasses.replace(self, hidden=room)

    def reset(self, request_ids: jax.Array, families: jax.Array) -> Drafting:
        """New requests of these families, int32 `[n]` both, of whose drafts nothing is known."""
        is_gone = (self.owners[:, None] == request_ids[None]).any(axis=1)
        return dataclasses.replace(
            self,
            owners=jnp.where(is_gone, -1, self.owners),
            families=self.families.at[request_ids].set(families, mode="drop"),
            hits=self.hits.at[request_ids].set(0.0, mode="drop"),
            tries=self.tries.at[request_ids].set(0.0, mode="drop"),
        )

    def with_drafts(
        self, scheduler: Scheduler, allocator: BlockAllocator, draft: Draft | None, row_cost: float
    ) -> Drafting:
        """With guesses for seats that decode, as far as they are worth a row. `row_cost`: of a step of no rows."""
        num_known = per_seat(scheduler, scheduler.num_known)
        needed = num_known - allocator.lengths
        drafting = dataclasses.replace(self, guesses=jnp.zeros_like(self.guesses))
        if draft is None:
            drafting = self.lookup(scheduler, num_known)
        num_needing = (needed >= 1).sum(dtype=jnp.float32)
        is_worth = (needed == 1)[:, None] & (drafting.chances(scheduler) * (num_needing + row_cost) >= num_needing)
        return dataclasses.replace(drafting, guesses=jnp.where(is_worth, drafting.guesses, -1))

    def lookup(self, scheduler: Scheduler, num_known: jax.Array) -> Drafting:
        """Guesses what followed each seat's newest tokens in its own, or in another completion of its request."""
        tokens, num_drafts = known_tokens(scheduler), self.guesses.shape[1]
        guesses, num_equal = repeated(tokens, num_known, tokens, num_known, num_drafts)
        others = self.companions(scheduler.seated, num_known)
        of_others = rows_of((scheduler.tokens, scheduler.num_known), others)
        guesses_of_others, more_equal = repeated(tokens, num_known, *of_others, num_drafts)
        guesses = jnp.where((more_equal > num_equal)[:, None], guesses_of_others, guesses)
        # What followed 2, 3, 4 and 8 equal tokens is right in 53, 62, 84 and 96% of cases. [cpu/text_drafts.json]
        priors = jnp.where(jnp.maximum(num_equal, more_equal) > LEAST_SUFFIX, 0.8, 0.5).astype(jnp.float32)
        return dataclasses.replace(self, guesses=guesses, priors=priors)

    def companions(self, seated: jax.Array, num_known: jax.Array) -> jax.Array:
        """Another request of each seat's family, each in its turn, int32 `[seats]`; `max_requests`: there is none.

        It may have ended: its tokens stay until another request takes its place.
        """
        num_requests = len(self.families)
        every = jnp.arange(num_requests, dtype=jnp.int32)[None]
        of_seats = self.families.at[seated].get(mode="fill", fill_value=-2)[:, None]
        is_other = (self.families[None] == of_seats) & (every != seated[:, None])
        turn = jnp.where(is_other, (every + num_known[:, None]) % num_requests, -1)
        return jnp.where(is_other.any(axis=1), jnp.argmax(turn, axis=1).astype(jnp.int32), num_requests)

    def chances(self, scheduler: Scheduler) -> jax.Array:
        """How likely it is that each draft counts, float32 `[seats, drafts]`."""
        hits, tries = rows_of((self.hits, self.tries), scheduler.seated)
        chance = (hits + self.priors) / (tries + 1)
        return jnp.cumprod(jnp.broadcast_to(chance[:, None], self.guesses.shape), axis=1)

    def gains(self, scheduler: Scheduler) -> jax.Array:
        """Tokens that each guess is expected to bring, float32 `[seats, drafts]`."""
        return jnp.where(self.guesses >= 0, self.chances(scheduler), 0.0)

    def update(self, step: StepPlan, num_new: jax.Array, is_silent: jax.Array | bool = False) -> Drafting:
        """After a step that gave seats `num_new` tokens. `is_silent`: bool `[seats]`, no draft came for a guess."""
        num_accepted = jnp.maximum(num_new - 1, 0)
        num_tried = jnp.minimum(num_accepted + 1, step.num_drafts + jnp.asarray(is_silent, jnp.int32))
        kept = jnp.where(num_new > 0, KEPT, 1.0)

        def count(of_requests: jax.Array, more: jax.Array) -> jax.Array:
            of_seats = rows_of(of_requests, step.request_ids)
            return of_requests.at[step.request_ids].set(of_seats * kept + more.astype(jnp.float32), mode="drop")

        return dataclasses.replace(
            self,
            hits=count(self.hits, num_accepted),
            tries=count(self.tries, num_tried),
            num_drafted=self.num_drafted + step.num_drafts.sum(dtype=jnp.int32),
            num_accepted=self.num_accepted + num_accepted.sum(dtype=jnp.int32),
        )

    def with_hidden(self, hidden: Any, step: StepPlan, num_new: jax.Array, *, is_mixed: bool) -> Drafting:
        """After a step whose tokens have these hidden states, each leaf `[tokens, ...]`."""
        if self.hidden is None:
            return self
        # Who has left a seat may get tokens in another, and come back.
        owners = jnp.where(self.owners == step.request_ids, self.owners, -1)
        owners = jnp.where(num_new > 0, step.request_ids, owners)
        rows = step.last - step.num_drafts + jnp.maximum(num_new - 1, 0)  # which the newest token was drawn from

        def newest(old: jax.Array, new: jax.Array) -> jax.Array:
            if not is_mixed:
                return old.at[step.seats].set(new, mode="drop")
            return jnp.where(_of_seats(num_new > 0, old), new[rows], old)

        return dataclasses.replace(self, hidden=jax.tree.map(newest, self.hidden, hidden), owners=owners)


def _of_seats(flags: jax.Array, like: jax.Array) -> jax.Array:
    return flags.reshape(-1, *[1] * (like.ndim - 1))


def known_tokens(scheduler: Scheduler) -> jax.Array:
    """int32 `[seats, max_model_len]`, of the request in each seat; behind those that are known, any."""
    return per_seat(scheduler, scheduler.tokens)


def repeated(
    tokens: jax.Array, num_known: jax.Array, text: jax.Array, num_in_text: jax.Array, num_drafts: int
) -> tuple[jax.Array, jax.Array]:
    """What follows in a text where the newest tokens occur before its last token: int32 `[seats, num_drafts]`, or -1.

    The place with most equal tokens before it counts, of several the last. If less than `num_drafts` tokens follow it,
    they are repeated. Also returns how many tokens are equal, int32 `[seats]`; 0 if they are too few.

    Args:
        tokens: int32 `[seats, max_model_len]`.
        num_known: int32 `[seats]`, how many they are.
        text: int32 `[seats, max_model_len]`, of each seat.
        num_in_text: int32 `[seats]`.
        num_drafts: to return.
    """
    index = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
    num_equal, is_equal = jnp.zeros_like(text), index < num_in_text[:, None] - 1
    for i in range(MOST_SUFFIX):
        newest = jnp.take_along_axis(tokens, jnp.maximum(num_known - 1 - i, 0)[:, None], axis=1)
        is_equal &= (jnp.roll(text, i, axis=1) == newest) & (index >= i) & (i < num_known[:, None])
        num_equal += is_equal.astype(jnp.int32)
    num_equal = jnp.where(num_equal >= LEAST_SUFFIX, num_equal, 0)
    place = jnp.argmax(num_equal * text.shape[1] + index, axis=1).astype(jnp.int32)[:, None]
    num_equal = jnp.take_along_axis(num_equal, place, axis=1)
    num_behind = jnp.maximum(num_in_text[:, None] - 1 - place, 1)
    follows = place + 1 + jnp.arange(num_drafts, dtype=jnp.int32)[None] % num_behind
    drafts = jnp.take_along_axis(text, follows, axis=1, mode="clip")
    return jnp.where(num_equal > 0, drafts, -1), num_equal[:, 0]


def call_draft(draft: Draft, weights: Any, scheduler: Scheduler, drafting: Drafting) -> jax.Array:
    """A caller's drafts, where there are guesses."""
    guesses = drafting.guesses
    is_own = drafting.owners == scheduler.seated
    hidden = jax.tree.map(lambda x: jnp.where(_of_seats(is_own, x), x, jnp.zeros_like(x)), drafting.hidden)
    drafts = draft(weights, known_tokens(scheduler), per_seat(scheduler, scheduler.num_known), hidden)
    if not isinstance(drafts, jax.Array) or drafts.shape != guesses.shape or drafts.dtype != jnp.int32:
        received = f"{drafts.dtype} {list(drafts.shape)}" if isinstance(drafts, jax.Array) else type(drafts).__name__
        raise ValueError(
            f"draft must return int32 {list(guesses.shape)}, the drafts of each running request; got {received}."
        )
    return jnp.where(guesses >= 0, drafts, -1)


def check_draft(draft: Draft | None, options: EngineOptions) -> None:
    num_speculative_tokens = options.num_speculative_tokens
    if draft is not None and not (callable(draft) and num_speculative_tokens):
        raise ValueError(
            "draft must be a function, and goes with num_speculative_tokens of at least 1; got "
            f"{draft=}, {num_speculative_tokens=}."
        )
