"""What a scheduler holds and hands out: the status of a request, reasons for refusal, a step, an outbox."""

from __future__ import annotations

import dataclasses
import enum

import jax

from jaxpaged._public_state import public_state

MOST_ADAPTERS = 65_536  # the host sends a flag for each with every slice


class RequestStatus(enum.IntEnum):
    """The state of a request. The last three say why it is finished.

    In `jnp.full` write `int(RequestStatus.FREE)`: an enum member makes the array weakly typed.
    """

    FREE = 0  # this place holds no request
    WAITING = 1  # it has no seat: it is new, or was preempted
    RUNNING = 2  # it has a seat
    STOPPED = 3  # one of its stop ids was sampled
    EXHAUSTED = 4  # it has all the new tokens that it asked for
    ABORTED = 5


class Refusal(enum.IntEnum):
    """Why `Scheduler.submit` refuses a request."""

    ACCEPTED = 0
    NO_PROMPT = 1  # a prompt length below 1: how a batch of submissions is padded
    NO_NEW_TOKENS = 2  # it asks for less than one new token
    TOO_LONG = 3  # more tokens than the scheduler's `max_length`, or a prompt longer than its row
    NEVER_FITS = 4  # more blocks than a table row, or than the pool
    QUEUE_FULL = 5  # no free place: submit it again after a `drain`


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to compute and sample the tokens of each request or seat. Of this the scheduler reads only `adapter`.

    Attributes:
        temperature: float32; 0: greedy.
        top_k: int32; 0 or -1: all tokens.
        top_p: float32, a part of the probability that top_k keeps; 1: all of it.
        seed: uint32. Sample with `jax.random.fold_in(jax.random.key(seed), length)`, where length is the request's.
            Its tokens then depend neither on its seat, nor on other requests, nor on preemption.
        adapter: int32, which adapter of the model it takes; -1: none. Requests with different ones share no blocks.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array
    adapter: jax.Array


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """What one forward pass of the model computes: packed tokens in the order of their seats.

    Attributes:
        tokens: int32 `[tokens]`; 0 for padding.
        positions: int32 `[tokens]`, each token's position in its request; 0 for padding.
        seats: int32 `[tokens]`, each token's seat; `num_seats` for padding.
        slots: int32 `[tokens]`, or with several groups of layers `[groups, tokens]`: for `write_kv`, which drops
            padding.
        query_starts: int32 `[seats + 1]`, where each seat's tokens begin. If a step has one row for each seat, each
            seat has its own, used or not.
        last: int32 `[seats]`, the row of each seat's newest token, whose logits are sampled; any row if the seat
            has none.
        num_drafts: int32 `[seats]`, drafts of each seat, its last tokens in the step. The row before them and all of
            theirs are sampled.
        is_sampled: bool `[seats]`, the seats that get a new token: all their known tokens are computed.
        is_victim: bool `[seats]`, the seat that `commit` preempts, if any.
        request_ids: int32 `[seats]`, the request in each seat; `max_requests` if it is free.
        sampling: `[seats]`, the parameters of the request in each seat.
    """

    tokens: jax.Array
    positions: jax.Array
    seats: jax.Array
    slots: jax.Array
    query_starts: jax.Array
    last: jax.Array
    num_drafts: jax.Array
    is_sampled: jax.Array
    is_victim: jax.Array
    request_ids: jax.Array
    sampling: Sampling


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outbox:
    """What happened since the drain before.

    Attributes:
        tokens: int32 `[steps, seats]`, the sampled tokens, one row for each commit; -1: none. A scheduler with drafts
            has `[steps, seats * (num_drafts + 1)]`, a seat's tokens side by side.
        request_ids: int32, as `tokens`, the request that each token belongs to; `max_requests`: none.
        num_steps: int32 `[]`, the number of commits.
        finished: int32 `[requests]`, a `RequestStatus` for each request that ended, 0 for the others. The ids of ended
            requests are free for other requests.
    """

    tokens: jax.Array
    request_ids: jax.Array
    num_steps: jax.Array
    finished: jax.Array
