"""Records of the scheduler: request status, refusals, sampling parameters, step plan and outbox."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged._public_state import public_state

MOST_ADAPTERS = 65_536  # every slice carries a flag for each

# Defaults of fields: scalars for all rows, with the dtype of the field.
GREEDY: Any = np.float32(0)
ALL_TOKENS: Any = np.int32(0)
ALL_PROBABILITY: Any = np.float32(1)
NO_PROBABILITY: Any = np.float32(0)
FIRST_SEED: Any = np.uint32(0)
NO_ADAPTER: Any = np.int32(-1)
NO_HEAD_START: Any = np.int32(0)
WHOLE_PROMPT: Any = np.int32(2**31 - 1)


class RequestStatus(enum.IntEnum):
    """The state of a request. The last three say why it is finished.

    In `jnp.full` write `int(RequestStatus.FREE)`: an enum member makes the array weakly typed.
    """

    FREE = 0  # this place holds no request
    WAITING = 1  # it has no seat: it is new, or was preempted
    RUNNING = 2  # it has a seat
    STOPPED = 3  # one of its stop ids was sampled
    EXHAUSTED = 4  # it has all the new tokens requested
    ABORTED = 5


class SubmitStatus(enum.IntEnum):
    """Why `Scheduler.submit` refuses a request."""

    ACCEPTED = 0
    NO_PROMPT = 1  # a prompt length below 1: how a batch of submissions is padded
    NO_NEW_TOKENS = 2  # fewer than one new token requested
    TOO_LONG = 3  # more tokens than the scheduler's `max_length`, or a prompt longer than its row
    NEVER_FITS = 4  # more blocks than a table row, or than the pool
    QUEUE_FULL = 5  # no free place: submit it again after a `drain`


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to compute and sample the tokens of each request or seat. The scheduler reads only `adapter`.

    Attributes:
        temperature: float32; 0: greedy. Default: 0.
        top_k: int32; 0 or -1: all tokens. Default: 0.
        top_p: float32, the part of the probability mass to keep after top_k and min_p; 1: all. Default: 1.
        min_p: float32, cuts tokens less likely than min_p times the most likely one; 0: none. Default: 0.
        seed: uint32. Default: 0. Sample with `jax.random.fold_in(jax.random.key(seed), length)`, where length is the
            request's. Its tokens then depend neither on its seat, nor on other requests, nor on preemption.
        adapter: int32, index of the model's adapter; -1: none. Requests with different adapters share no blocks.
            Default: -1.
    """

    temperature: jax.Array = GREEDY
    top_k: jax.Array = ALL_TOKENS
    top_p: jax.Array = ALL_PROBABILITY
    min_p: jax.Array = NO_PROBABILITY
    seed: jax.Array = FIRST_SEED
    adapter: jax.Array = NO_ADAPTER

    @classmethod
    def create(cls, num_rows: int) -> Sampling:
        """The defaults in each row."""
        return jax.tree.map(lambda default: jnp.full(num_rows, default, default.dtype), cls())


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Requests:
    """A batch of requests for `Scheduler.submit`, one per row. Fields of shape `[rows]` may be scalars.

    Attributes:
        prompts: int32 `[rows, width]`, each prompt at the start of its row.
        prompt_lengths: int32 `[rows]`; 0: no request.
        max_new_tokens: int32 `[rows]`, at least 1.
        head_starts: int32 `[rows]`, a request is ranked as if it had arrived this many requests earlier, right after
            the request that did; if negative, later. At most 2^29. Default: 0.
        stop_ids: int32 `[rows, n]`, tokens that end a request, n at most `num_stop_ids`; -1: none. Default: none.
        sampling: parameters, each field `[rows]`.
        findable: int32 `[rows]`, how many of a request's first tokens may come from the prefix cache. The others are
            computed, for instance to score them. Default: all.

    Example: see `Scheduler.create`.
    """

    prompts: Any
    prompt_lengths: Any
    max_new_tokens: Any
    head_starts: Any = NO_HEAD_START
    stop_ids: Any = None
    sampling: Sampling = Sampling()
    findable: Any = WHOLE_PROMPT


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The tokens of one forward pass of the model, packed in the order of their seats.

    Attributes:
        tokens: int32 `[tokens]`; 0 for padding.
        positions: int32 `[tokens]`, each token's position in its request; 0 for padding.
        seats: int32 `[tokens]`, each token's seat; `num_seqs` for padding.
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
    """Sampled tokens and finished requests since the last drain.

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
