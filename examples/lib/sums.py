"""Sums over the devices of a mesh axis."""

import jax
import jax.numpy as jnp

MOST_BYTES = 2**25  # over the number of GPUs: larger sums of XLA are not inside CUDA graphs
WIDEST_BYTES = 2**24  # the widest step of an engine: 1,024 rows of 8,192 features. Larger sums are faster whole.


def sum_over(axis: str | None, x: jax.Array) -> jax.Array:
    """The sum of x `[..., features]` over the devices of a mesh axis; x if `axis` is None.

    A sum of an engine's step that XLA would not do inside a CUDA graph is cut into parts: otherwise the host would run
    each step (docs/several_gpus.md). A kernel of our own is quicker by itself, but not in an engine: h200/sums.json.
    """
    if axis is None:
        return x
    rows = x.reshape(-1, x.shape[-1])
    most = max(1, MOST_BYTES // (jax.lax.axis_size(axis) * rows.shape[1] * x.dtype.itemsize))
    if len(rows) <= most or x.nbytes > WIDEST_BYTES:
        return jax.lax.psum(x, axis)
    sums: list[jax.Array] = []
    for part in jnp.array_split(rows, -(-len(rows) // most)):
        if sums:  # one after the other: XLA would join sums that do not wait for each other
            part, sums[-1] = jax.lax.optimization_barrier((part, sums[-1]))
        sums.append(jax.lax.psum(part, axis))
    return jnp.concatenate(sums).reshape(x.shape)
