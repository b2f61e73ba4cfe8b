"""Sums over the devices of a mesh axis."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

MOST_BYTES = 2**25  # over the number of GPUs: larger sums of XLA are not inside CUDA graphs
MOST_PARTS = 4  # the widest step of a 70B model on eight GPUs; longer prompts do not gain from a graph


def sum_over(
    axis: str | None, x: jax.Array, multiply: Callable[[jax.Array], jax.Array] = lambda rows: rows
) -> jax.Array:
    """The sum of multiply(x) over the devices of a mesh axis; multiply(x) if `axis` is None.

    `multiply` maps rows `[..., features]` to rows of another size, each by itself. A sum that XLA would not do inside a
    CUDA graph is cut by rows into up to MOST_PARTS parts: otherwise the host would run each step
    (docs/several_gpus.md). While a part is summed, the next ones are multiplied. A kernel of our own is quicker by
    itself, but not in an engine: h200/sums.json.
    """
    if axis is None:
        return multiply(x)
    whole = jax.eval_shape(multiply, x)
    num_rows, row_bytes = math.prod(whole.shape[:-1]), whole.shape[-1] * whole.dtype.itemsize
    most = max(1, MOST_BYTES // (jax.lax.axis_size(axis) * row_bytes))
    num_parts = -(-num_rows // most)
    if not 1 < num_parts <= MOST_PARTS:
        return jax.lax.psum(multiply(x), axis)
    parts = [multiply(part) for part in jnp.array_split(x.reshape(num_rows, -1), num_parts)]
    parts = jax.lax.optimization_barrier(parts)  # otherwise products would wait for sums
    sums: list[jax.Array] = []
    for part in parts:
        if sums:  # one after the other: XLA would join sums that do not wait for each other
            part, sums[-1] = jax.lax.optimization_barrier((part, sums[-1]))
        sums.append(jax.lax.psum(part, axis))
    return jnp.concatenate(sums).reshape(whole.shape)
