"""Gather and scatter of columns, row by row. A column past the end reads 0 and writes nothing. None is negative."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

HOW: Any = dict(wrap_negative_indices=False)


def each_row(array: jax.Array) -> jax.Array:
    """int32 `[rows, 1]`."""
    return jnp.arange(len(array), dtype=jnp.int32)[:, None]


def get_columns(array: jax.Array, columns: jax.Array, rows: jax.Array | None = None) -> jax.Array:
    """Elements `[rows, n]` of an array at columns `[rows, n]`. `rows`: int32 `[rows]`; None: all in order."""
    rows = each_row(array) if rows is None else rows[:, None]
    return array.at[rows, columns].get(mode="fill", fill_value=0, **HOW)


def set_columns(array: jax.Array, columns: jax.Array, values: ArrayLike) -> jax.Array:
    """The array with `values`, `[rows, n]` or a number, at columns `[rows, n]`."""
    return array.at[each_row(array), columns].set(values, mode="drop", **HOW)


def add_to_columns(array: jax.Array, columns: jax.Array, values: ArrayLike) -> jax.Array:
    """The array with `values` added. Equal columns of a row add up."""
    return array.at[each_row(array), columns].add(values, mode="drop", **HOW)
