"""Sums over the devices of a mesh axis."""

import jax
import jax.numpy as jnp

MOST_BYTES = 2**25  # over the number of GPUs: larger sums of XLA are not inside CUDA graphs
MOST_PARTS = 4  # the widest step of a 70B model on eight GPUs; longer prompts do not gain from a graph


def sum_over(axis: str | None, x: jax.Array) -> jax.Array:
    """The sum of x `[..., features]` over the devices of a mesh axis; x if `axis` is None.

    A sum that XLA would not do inside a CUDA graph is cut into up to MOST_PARTS parts: otherwise the host would run
    each step (docs/several_gpus.md). A kernel of our own is quicker by itself, but not in an engine: h200/sums.json.
    """
    if axis is None:
        return x
    rows = x.reshape(-1, x.shape[-1])
    most = max(1, MOST_BYTES // (jax.lax.axis_size(axis) * rows.shape[1] * x.dtype.itemsize))
    num_parts = -(-len(rows) // most)
    if not 1 < num_parts <= MOST_PARTS:
        return jax.lax.psum(x, axis)
    sums: list[jax.Array] = []
    for part in jnp.array_split(rows, num_parts):
        if sums:  # one after the other: XLA would join sums that do not wait for each other
            part, sums[-1] = jax.lax.optimization_barrier((part, sums[-1]))
        sums.append(jax.lax.psum(part, axis))
    return jnp.concatenate(sums).reshape(x.shape)
