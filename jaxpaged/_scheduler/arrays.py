"""Rows of arrays by index, by seat, and by mark."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged._put import put
from jaxpaged._scheduler.state import SchedulerState


def per_seat(scheduler: SchedulerState, values: jax.Array) -> jax.Array:
    """Values of requests, `[requests, ...]`, for the request in each seat; 0 for a free seat."""
    return rows_of(values, scheduler.seated)


def rows_of[T](of_each: T, indices: jax.Array) -> T:
    """Rows of arrays `[rows, ...]`; zeros where an index is past the end. No index is negative."""
    how: Any = dict(mode="fill", fill_value=0, wrap_negative_indices=False)
    return jax.tree.map(lambda values: values.at[indices].get(**how), of_each)


def first_marked(values: jax.Array, is_marked: jax.Array, *, size: int, fill_value: int) -> jax.Array:
    """The first `size` marked values in order, int32 `[size]`, padded with `fill_value`."""
    turn = jnp.cumsum(is_marked, dtype=jnp.int32) - 1
    return put(jnp.full(size, fill_value, jnp.int32), turn, is_marked & (turn < size), values)
