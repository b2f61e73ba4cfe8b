"""Merges attention over parts of the tokens, in XLA.

lse = log(sum_p exp(lse_p) + exp(sink)),    out = sum_p exp(lse_p - lse) O_p
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp


def merge(
    outs: Sequence[jax.Array] | jax.Array,  # one per part, f32 [..., heads, head_dim]
    lses: Sequence[jax.Array] | jax.Array,  # f32 [..., heads]
    sinks: jax.Array | None,  # f32 [heads], not yet applied by the parts
) -> tuple[jax.Array, jax.Array]:
    """Returns out f32 [..., heads, head_dim] and lse f32 [..., heads]; zeros and -inf for queries that saw no token."""
    # Adding term by term, without intermediate arrays, lets XLA fuse the merge of a few parts into one kernel.
    highest = functools.reduce(jnp.maximum, lses)
    saw = highest != -jnp.inf  # NaN stays NaN
    if sinks is not None:
        highest = jnp.maximum(highest, sinks[None])
    highest = jnp.where(saw, highest, 0.0)
    weights = [jnp.exp(part - highest) for part in lses]
    total = sum(weights) if sinks is None else sum(weights) + jnp.exp(sinks[None] - highest)
    total = jnp.where(saw, total, 1.0)  # the gradient of log(0) is NaN
    out = sum(weight[..., None] * o for weight, o in zip(weights, outs, strict=True)) / total[..., None]
    return out, jnp.where(saw, highest + jnp.log(total), -jnp.inf)
