"""Submission of requests: checks, refusals and ranks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._integers import as_int32, checked_array
from jaxpaged._put import put
from jaxpaged._scheduler.arrays import first_marked
from jaxpaged._scheduler.records import Requests, RequestStatus, Sampling, SubmitStatus
from jaxpaged._scheduler.state import SchedulerState

MAX_HEAD_START = 2**29  # a key is an arrival less a head start, in int32


def checked(scheduler: SchedulerState, requests: Requests) -> Requests:
    """The requests as JAX arrays, with scalars broadcast to rows."""
    if not isinstance(requests, Requests):
        raise ValueError(f"requests must be jaxpaged.scheduling.Requests; got {type(requests).__name__}.")
    prompts = checked_array("prompts", requests.prompts, "rows", "width")
    num_rows, most = prompts.shape[0], scheduler.stop_ids.shape[1]

    def in_rows(record: Any, name: str, dtype: Any) -> jax.Array:
        convert = as_int32 if dtype == jnp.int32 else jnp.asarray
        array = convert(getattr(record, name))
        if array.shape not in ((), (num_rows,)) or array.dtype != dtype:
            wanted = f"{jnp.dtype(dtype).name} [{num_rows}], one for each prompt"
            raise ValueError(f"{name} must be {wanted}; got {array.dtype} {list(array.shape)}.")
        return jnp.broadcast_to(array, num_rows)

    stop_ids = np.zeros((num_rows, 0), np.int32) if requests.stop_ids is None else requests.stop_ids
    stop_ids = as_int32(stop_ids)
    if stop_ids.ndim != 2 or stop_ids.dtype != jnp.int32 or len(stop_ids) != num_rows or stop_ids.shape[1] > most:
        received = f"{stop_ids.dtype} {list(stop_ids.shape)}"
        raise ValueError(f"stop_ids must be int32 [{num_rows}, n], n at most {most} (num_stop_ids); got {received}.")
    names = "prompt_lengths", "max_new_tokens", "head_starts", "findable"
    defaults = vars(Sampling())
    return Requests(
        prompts=prompts,
        stop_ids=jnp.pad(stop_ids, ((0, 0), (0, most - stop_ids.shape[1])), constant_values=-1),
        sampling=Sampling(**{name: in_rows(requests.sampling, name, x.dtype) for name, x in defaults.items()}),
        **{name: in_rows(requests, name, jnp.int32) for name in names},
    )


def submit[S: SchedulerState](scheduler: S, allocator: BlockAllocator, new: Requests) -> tuple[S, jax.Array, jax.Array]:
    num_requests, max_length = scheduler.tokens.shape
    num_rows, width = new.prompts.shape
    every = jnp.arange(num_requests, dtype=jnp.int32)

    # 1. The i-th accepted request gets the i-th free place.
    submit_statuses = refused(scheduler, allocator, new)
    is_free = scheduler.statuses == RequestStatus.FREE
    free_ids = first_marked(every, is_free, size=num_rows, fill_value=num_requests)
    is_accepted = submit_statuses == SubmitStatus.ACCEPTED
    arrival = jnp.cumsum(is_accepted, dtype=jnp.int32) - 1
    is_wanted = is_accepted & (arrival < is_free.sum(dtype=jnp.int32))
    request_ids = jnp.where(is_wanted, free_ids.at[arrival].get(mode="clip"), num_requests)
    submit_statuses = jnp.where(is_accepted & ~is_wanted, SubmitStatus.QUEUE_FULL, submit_statuses)

    def place(old: jax.Array, values: jax.Array) -> jax.Array:
        return put(old, request_ids, is_wanted, values)

    # 2. Arrivals count from the oldest request that is still here, so that they never wrap round.
    oldest = jnp.where(scheduler.is_live, scheduler.arrivals, scheduler.next_arrival).min()
    arrivals, keys = scheduler.arrivals - oldest, scheduler.keys - oldest
    arrival += scheduler.next_arrival - oldest
    arrivals = place(arrivals, arrival)
    keys = place(keys, arrival - jnp.clip(new.head_starts, -MAX_HEAD_START, MAX_HEAD_START))
    order = jnp.lexsort((arrivals, keys)).astype(jnp.int32)

    prompts = jnp.pad(new.prompts[:, :max_length], ((0, 0), (0, max(max_length - width, 0))))
    prefixes = scheduler.prefixes
    if prefixes is not None:
        prefixes = dataclasses.replace(
            prefixes,
            findable=place(prefixes.findable, new.findable),
            num_found=place(prefixes.num_found, jnp.full_like(new.findable, -1)),
            is_due=prefixes.is_due | is_wanted.any(),
        )
    scheduler = dataclasses.replace(
        scheduler,
        tokens=place(scheduler.tokens, prompts),
        num_known=place(scheduler.num_known, new.prompt_lengths),
        prompt_lengths=place(scheduler.prompt_lengths, new.prompt_lengths),
        limits=place(scheduler.limits, new.prompt_lengths + new.max_new_tokens),
        stop_ids=place(scheduler.stop_ids, new.stop_ids),
        sampling=jax.tree.map(place, scheduler.sampling, new.sampling),
        statuses=place(scheduler.statuses, jnp.full(num_rows, int(RequestStatus.WAITING), jnp.int32)),
        arrivals=arrivals,
        keys=keys,
        order=order,
        ranks=jnp.zeros_like(order).at[order].set(every, unique_indices=True),
        next_arrival=scheduler.next_arrival - oldest + is_wanted.sum(dtype=jnp.int32),
        prefixes=prefixes,
    )
    return scheduler, request_ids, submit_statuses


def refused(scheduler: SchedulerState, allocator: BlockAllocator, new: Requests) -> jax.Array:
    """A `SubmitStatus` for each row, apart from QUEUE_FULL."""
    max_length, width = scheduler.tokens.shape[1], new.prompts.shape[1]
    # Compared one by one, so that no sum overflows.
    is_too_long = (new.prompt_lengths > min(width, max_length)) | (new.max_new_tokens > max_length)
    limits = jnp.minimum(new.prompt_lengths, max_length) + jnp.minimum(new.max_new_tokens, max_length)
    is_too_long |= limits > max_length
    num_blocks = allocator.num_blocks_for(limits - 1)  # the last token is never computed
    never_fits = num_blocks > allocator.block_tables.shape[-1]
    never_fits |= allocator.most_blocks(num_blocks) > allocator.num_blocks - 1
    reasons = (
        (new.prompt_lengths < 1, SubmitStatus.NO_PROMPT),
        (new.max_new_tokens < 1, SubmitStatus.NO_NEW_TOKENS),
        (is_too_long, SubmitStatus.TOO_LONG),
        (never_fits, SubmitStatus.NEVER_FITS),
    )
    submit_statuses = jnp.zeros_like(limits)  # accepted
    for is_refused, reason in reversed(reasons):
        submit_statuses = jnp.where(is_refused, reason, submit_statuses)
    return submit_statuses
