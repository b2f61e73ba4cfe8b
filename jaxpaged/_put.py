"""A scatter whose targets are distinct."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def put(array: jax.Array, indices: jax.Array, wanted: jax.Array, values: ArrayLike) -> jax.Array:
    """`array` with `values` at the wanted indices of its first axis, no two of which are equal.

    The others go past the end, each to a target of its own. So XLA may be told that no two writes meet; without that
    promise it serialises a scatter on GPUs.
    """
    dropped = array.shape[0] + jnp.arange(indices.size, dtype=jnp.int32).reshape(indices.shape)
    return array.at[jnp.where(wanted, indices, dropped)].set(values, mode="drop", unique_indices=True)
