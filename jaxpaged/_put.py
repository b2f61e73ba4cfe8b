"""Scatter to distinct targets."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def put(array: jax.Array, indices: jax.Array, wanted: jax.Array, values: ArrayLike) -> jax.Array:
    """`array` with `values` at the wanted indices of its first axis. The wanted indices must be distinct.

    Unwanted values get distinct targets past the end, where they are dropped. All targets are therefore distinct, and
    XLA need not serialise the scatter on GPUs.
    """
    dropped = array.shape[0] + jnp.arange(indices.size, dtype=jnp.int32).reshape(indices.shape)
    return array.at[jnp.where(wanted, indices, dropped)].set(values, mode="drop", unique_indices=True)
