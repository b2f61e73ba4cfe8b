"""Drafts: guesses of a request's next tokens, so that one step can yield several tokens.

A step computes each running request's newest token and its drafts. At each of these places it draws a token, with the
request's seed and the position, exactly as a step without drafts would draw it there. The drawn tokens count up to the
first that differs from its draft, which still counts. So the tokens are the same as without drafts, at any temperature,
whatever the drafts are.

A draft costs a row. The acceptance rate of a request's drafts says how much a row is worth, and `kinds` chooses the
next step by it.
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
from jaxpaged._slice.pytrees import describe

# Called with the weights; tokens, int32 [seats, max_model_len]; the number of known ones among them, int32 [seats]; and
# hidden states, each leaf [seats, ...]. Returns drafts, int32 [seats, drafts]; -1: no draft.
Draft = Callable[..., jax.Array]

LEAST_SUFFIX, MOST_SUFFIX = 2, 8  # tokens: the shortest suffix that must recur, the longest that is compared
KEPT = 0.95  # weight of a request's earlier drafts after each of its steps
PRIOR = 0.75  # acceptance rate of a caller's drafts before any is known


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafting:
    """Guesses for the next step, and a record of the drafts so far.

    Attributes:
        guesses: int32 `[seats, drafts]`, for the next step; the first -1 ends them. With a caller's draft function,
            which runs in the step itself, they only mark the places that get a draft.
        families: int32 `[requests]`, the same number for completions of one request; -1: none.
        priors: float32 `[seats]`, acceptance rate assumed for the guesses before any draft of the request is known.
        hits: float32 `[requests]`, accepted drafts; earlier ones weigh less.
        tries: float32 `[requests]`, accepted and rejected drafts, weighted in the same way.
        hidden: each leaf `[seats, ...]`, hidden states of the token before each seat's newest. None: not kept.
        owners: int32 `[seats]`, the request whose hidden states these are; -1: none.
        num_drafted: int32 `[]`, drafts so far, modulo 2^32.
        num_accepted: int32 `[]`, accepted drafts so far, modulo 2^32.
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
        """Keeps no hidden states; `with_room` adds them."""
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
        """Adds room for hidden states. `hidden`: their shapes and dtypes for one token; None: keep none."""
        num_seats = len(self.owners)
        room = jax.tree.map(lambda x: jnp.zeros((num_seats, *x.shape), x.dtype), hidden)
        return dataclasses.replace(self, hidden=room)

    def reset(self, request_ids: jax.Array, families: jax.Array) -> Drafting:
        """Resets the statistics of new requests and sets their families, int32 `[n]` both. See `families`."""
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
        """Guesses for the seats that decode, if worth a row. `row_cost`: time of a step without rows."""
        num_known = per_seat(scheduler, scheduler.num_known)
        needed = num_known - allocator.lengths
        if draft is None:
            drafting = self.lookup(scheduler, num_known)
        else:
            drafting = dataclasses.replace(self, guesses=jnp.zeros_like(self.guesses))
        num_needing = (needed >= 1).sum(dtype=jnp.float32)
        is_worth = (needed == 1)[:, None] & (drafting.chances(scheduler) * (num_needing + row_cost) >= num_needing)
        return dataclasses.replace(drafting, guesses=jnp.where(is_worth, drafting.guesses, -1))

    def lookup(self, scheduler: Scheduler, num_known: jax.Array) -> Drafting:
        """Guesses that a seat's newest tokens continue as they did before, in its own text or in another completion of
        its request."""
        tokens, num_drafts = per_seat(scheduler, scheduler.tokens), self.guesses.shape[1]
        own, own_equal = repeated(tokens, num_known, tokens, num_known, num_drafts)
        companions = self.companions(scheduler.seated, num_known)
        texts = rows_of((scheduler.tokens, scheduler.num_known), companions)
        others, others_equal = repeated(tokens, num_known, *texts, num_drafts)
        guesses = jnp.where((others_equal > own_equal)[:, None], others, own)
        # After 2, 3, 4 and 8 equal tokens, 53, 62, 84 and 96% of the guesses are right. [cpu/text_drafts.json]
        priors = jnp.where(jnp.maximum(own_equal, others_equal) > LEAST_SUFFIX, 0.8, 0.5).astype(jnp.float32)
        return dataclasses.replace(self, guesses=guesses, priors=priors)

    def companions(self, seated: jax.Array, num_known: jax.Array) -> jax.Array:
        """Another request of each seat's family, all in turn, int32 `[seats]`; `max_requests`: none.

        It may be finished: its tokens stay until another request gets its id.
        """
        num_requests = len(self.families)
        ids = jnp.arange(num_requests, dtype=jnp.int32)[None]
        families = self.families.at[seated].get(mode="fill", fill_value=-2)[:, None]
        is_other = (self.families[None] == families) & (ids != seated[:, None])
        turn = jnp.where(is_other, (ids + num_known[:, None]) % num_requests, -1)
        return jnp.where(is_other.any(axis=1), jnp.argmax(turn, axis=1).astype(jnp.int32), num_requests)

    def chances(self, scheduler: Scheduler) -> jax.Array:
        """The probability that each draft is accepted, float32 `[seats, drafts]`."""
        hits, tries = rows_of((self.hits, self.tries), scheduler.seated)
        chance = (hits + self.priors) / (tries + 1)
        return jnp.cumprod(jnp.broadcast_to(chance[:, None], self.guesses.shape), axis=1)

    def gains(self, scheduler: Scheduler) -> jax.Array:
        """The expected number of tokens from each guess, float32 `[seats, drafts]`."""
        return jnp.where(self.guesses >= 0, self.chances(scheduler), 0.0)

    def update(self, step: StepPlan, num_new: jax.Array, is_silent: jax.Array | bool = False) -> Drafting:
        """Records a step that gave seats `num_new` tokens. `is_silent`: bool `[seats]`, a guess got no draft."""
        num_accepted = jnp.maximum(num_new - 1, 0)
        num_tried = jnp.minimum(num_accepted + 1, step.num_drafts + jnp.asarray(is_silent, jnp.int32))
        kept = jnp.where(num_new > 0, KEPT, 1.0)

        def count(counts: jax.Array, more: jax.Array) -> jax.Array:
            new = rows_of(counts, step.request_ids) * kept + more.astype(jnp.float32)
            return counts.at[step.request_ids].set(new, mode="drop")

        return dataclasses.replace(
            self,
            hits=count(self.hits, num_accepted),
            tries=count(self.tries, num_tried),
            num_drafted=self.num_drafted + step.num_drafts.sum(dtype=jnp.int32),
            num_accepted=self.num_accepted + num_accepted.sum(dtype=jnp.int32),
        )

    def with_hidden(self, hidden: Any, step: StepPlan, num_new: jax.Array, *, is_mixed: bool) -> Drafting:
        """Keeps what later drafts need of a step's hidden states, each leaf `[tokens, ...]`."""
        if self.hidden is None:
            return self
        # A request that leaves a seat may get tokens in another seat and come back.
        owners = jnp.where(self.owners == step.request_ids, self.owners, -1)
        owners = jnp.where(num_new > 0, step.request_ids, owners)
        rows = step.last - step.num_drafts + jnp.maximum(num_new - 1, 0)  # that the newest tokens were drawn from

        def newest(old: jax.Array, new: jax.Array) -> jax.Array:
            if not is_mixed:
                return old.at[step.seats].set(new, mode="drop")
            return jnp.where(_to_rank(num_new > 0, old), new[rows], old)

        return dataclasses.replace(self, hidden=jax.tree.map(newest, self.hidden, hidden), owners=owners)


def _to_rank(flags: jax.Array, like: jax.Array) -> jax.Array:
    return flags.reshape(-1, *[1] * (like.ndim - 1))


def repeated(
    tokens: jax.Array, num_known: jax.Array, text: jax.Array, num_in_text: jax.Array, num_drafts: int
) -> tuple[jax.Array, jax.Array]:
    """Finds each sequence's newest tokens in a text and returns the tokens that follow them there.

    The longest match counts, of equally long ones the last. If fewer than `num_drafts` tokens follow it, they are
    repeated.

    Args:
        tokens: int32 `[seats, max_model_len]`.
        num_known: int32 `[seats]`, the length of each sequence.
        text: int32 `[seats, max_model_len]`, one for each sequence.
        num_in_text: int32 `[seats]`, the length of each text. Its last token has no successor.
        num_drafts: drafts to return.

    Returns:
        drafts: int32 `[seats, num_drafts]`; -1: no match.
        num_equal: int32 `[seats]`, the length of the match; 0: none of at least LEAST_SUFFIX tokens.
    """
    index = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
    num_equal, is_equal = jnp.zeros_like(text), index < num_in_text[:, None] - 1
    for i in range(MOST_SUFFIX):
        newest = jnp.take_along_axis(tokens, jnp.maximum(num_known - 1 - i, 0)[:, None], axis=1)
        is_equal &= (jnp.roll(text, i, axis=1) == newest) & (index >= i) & (i < num_known[:, None])
        num_equal += is_equal.astype(jnp.int32)
    num_equal = jnp.where(num_equal >= LEAST_SUFFIX, num_equal, 0)
    end = jnp.argmax(num_equal * text.shape[1] + index, axis=1).astype(jnp.int32)[:, None]
    num_equal = jnp.take_along_axis(num_equal, end, axis=1)
    num_after = jnp.maximum(num_in_text[:, None] - 1 - end, 1)
    index = end + 1 + jnp.arange(num_drafts, dtype=jnp.int32)[None] % num_after
    drafts = jnp.take_along_axis(text, index, axis=1, mode="clip")
    return jnp.where(num_equal > 0, drafts, -1), num_equal[:, 0]


def call_draft(draft: Draft, weights: Any, scheduler: Scheduler, drafting: Drafting) -> jax.Array:
    """The caller's drafts, where `drafting` has guesses."""
    guesses = drafting.guesses
    is_own = drafting.owners == scheduler.seated
    hidden = jax.tree.map(lambda x: jnp.where(_to_rank(is_own, x), x, jnp.zeros_like(x)), drafting.hidden)
    drafts = draft(weights, *(per_seat(scheduler, x) for x in (scheduler.tokens, scheduler.num_known)), hidden)
    if describe(drafts) != (wanted := f"int32 {list(guesses.shape)}"):
        raise ValueError(f"draft must return {wanted}, the drafts of each running request; got {describe(drafts)}.")
    return jnp.where(guesses >= 0, drafts, -1)


def check_draft(draft: Draft | None, options: EngineOptions) -> None:
    num_speculative_tokens = options.num_speculative_tokens
    if draft is not None and not (callable(draft) and num_speculative_tokens):
        raise ValueError(
            "draft must be a function, and goes with num_speculative_tokens of at least 1; got "
            f"{draft=}, {num_speculative_tokens=}."
        )
