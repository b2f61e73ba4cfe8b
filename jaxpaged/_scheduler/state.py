"""What a scheduler holds, and the questions that its operations share."""

import dataclasses

import jax

from jaxpaged._scheduler.records import RequestStatus, Sampling


@dataclasses.dataclass(frozen=True)
class SchedulerState:
    """The fields of a `Scheduler`, whose docstring describes them."""

    tokens: jax.Array
    num_known: jax.Array
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
    outbox_tokens: jax.Array
    outbox_request_ids: jax.Array
    num_steps: jax.Array
    next_arrival: jax.Array
    num_computed: jax.Array
    num_recomputed: jax.Array
    num_preempted: jax.Array

    @property
    def max_requests(self) -> int:
        return self.tokens.shape[-2]

    @property
    def num_seats(self) -> int:
        return self.seated.shape[-1]

    @property
    def is_live(self) -> jax.Array:
        """Requests that wait or run, bool `[requests]`."""
        return (self.statuses == RequestStatus.WAITING) | (self.statuses == RequestStatus.RUNNING)

    @property
    def is_outbox_full(self) -> jax.Array:
        """Whether nothing can be planned before the next `drain`, bool `[]`."""
        return self.num_steps >= self.outbox_tokens.shape[0]

    @property
    def has_work(self) -> jax.Array:
        """Whether another step can do something, bool `[]`: the condition of a loop of steps."""
        return self.is_live.any() & ~self.is_outbox_full
