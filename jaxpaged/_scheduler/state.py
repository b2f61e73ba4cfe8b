"""The state of a scheduler, and properties that its operations share."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxpaged._allocator.prefix_cache import PrefixCache
from jaxpaged._public_state import public_state
from jaxpaged._scheduler.records import RequestStatus, Sampling


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefixes:
    """The state of a scheduler that a prefix cache adds.

    Attributes:
        cache: the prefix cache.
        salt: int32 `[1 + adapters]`, the salts of requests that start now, without an adapter and with each adapter.
            `forget_prefixes` changes them.
        salts: int32 `[seats]`, the salt of the request in each seat.
        num_inserted: int32 `[seats]`, full blocks that are cached already. `NOTHING_TO_INSERT` if none is to be cached
            before the request leaves.
        left: int32 `[seats]`, the request that left the seat, whose blocks the row still holds; `max_requests`: none.
        findable: int32 `[requests]`, how many of its first tokens a request may find in the cache.
        num_found: int32 `[requests]`, tokens that each request found when it first started; -1: it has not started.
        is_due: bool `[]`, whether `change_seats` may have something to do.
    """

    cache: PrefixCache
    salt: jax.Array
    salts: jax.Array
    num_inserted: jax.Array
    left: jax.Array
    findable: jax.Array
    num_found: jax.Array
    is_due: jax.Array

    @classmethod
    def create(cls, cache: PrefixCache, *, max_requests: int, num_seqs: int, num_adapters: int) -> Prefixes:
        return cls(
            cache=cache,
            salt=jnp.arange(1 + num_adapters, dtype=jnp.int32),
            salts=jnp.zeros(num_seqs, jnp.int32),
            num_inserted=jnp.zeros(num_seqs, jnp.int32),
            left=jnp.full(num_seqs, max_requests, jnp.int32),
            findable=jnp.zeros(max_requests, jnp.int32),
            num_found=jnp.full(max_requests, -1, jnp.int32),
            is_due=jnp.zeros((), jnp.bool_),
        )

    def salts_of(self, adapters: jax.Array) -> jax.Array:
        """The salts of requests that start now with these adapters, int32."""
        return self.salt.at[adapters + 1].get(mode="clip")


STEPS, COMPUTED, RECOMPUTED, PREEMPTED = range(4)  # in `counters`


def empty_outbox(max_steps: int, num_draws: int, max_requests: int) -> jax.Array:
    """No token and no request in each row, int32 `[max_steps, 2, num_draws]`."""
    return jnp.stack([jnp.full((max_steps, num_draws), none, jnp.int32) for none in (-1, max_requests)], axis=1)


@dataclasses.dataclass(frozen=True)
class SchedulerState:
    """The fields of a `Scheduler`, whose docstring describes them."""

    tokens: jax.Array
    num_known: jax.Array
    prompt_lengths: jax.Array
    limits: jax.Array
    stop_ids: jax.Array
    sampling: Sampling
    statuses: jax.Array
    arrivals: jax.Array
    keys: jax.Array
    order: jax.Array
    ranks: jax.Array
    seated: jax.Array
    was_refused: jax.Array
    outbox: jax.Array
    next_arrival: jax.Array
    counters: jax.Array
    prefixes: Prefixes | None

    @property
    def max_requests(self) -> int:
        return self.tokens.shape[-2]

    @property
    def num_seqs(self) -> int:
        return self.seated.shape[-1]

    @property
    def num_steps(self) -> jax.Array:
        """Commits since the last drain, int32 `[]`."""
        return self.counters[..., STEPS]

    @property
    def num_computed(self) -> jax.Array:
        """Tokens planned so far, int32 `[]`; modulo 2^32, as are the next two."""
        return self.counters[..., COMPUTED]

    @property
    def num_recomputed(self) -> jax.Array:
        """Computed tokens that preemption discarded, int32 `[]`."""
        return self.counters[..., RECOMPUTED]

    @property
    def num_preempted(self) -> jax.Array:
        """Preemptions, int32 `[]`."""
        return self.counters[..., PREEMPTED]

    @property
    def num_drafts(self) -> int:
        """The most drafts of a seat in a step."""
        return self.outbox.shape[-1] // self.num_seqs - 1

    @property
    def outbox_tokens(self) -> jax.Array:
        """Tokens sampled since the last drain, int32 `[max_steps, seats * (num_drafts + 1)]`; -1: none."""
        return self.outbox[..., 0, :]

    @property
    def outbox_request_ids(self) -> jax.Array:
        """The request of each token in `outbox_tokens`, int32; `max_requests`: none."""
        return self.outbox[..., 1, :]

    @property
    def is_live(self) -> jax.Array:
        """Requests that wait or run, bool `[requests]`."""
        return (self.statuses == RequestStatus.WAITING) | (self.statuses == RequestStatus.RUNNING)

    @property
    def is_outbox_full(self) -> jax.Array:
        """Whether nothing can be planned before the next `drain`, bool `[]`."""
        return self.num_steps >= self.outbox.shape[0]

    @property
    def is_change_due(self) -> jax.Array:
        """Whether `change_seats` may have something to do, bool `[]`; never without a prefix cache."""
        return jnp.zeros((), jnp.bool_) if self.prefixes is None else self.prefixes.is_due

    @property
    def has_work(self) -> jax.Array:
        """Whether another step can do something, bool `[]`: the condition of a loop of steps."""
        return self.is_live.any() & ~self.is_outbox_full
