"""Merge of attention over parts of the tokens, by XLA.

lse = log(sum_p exp(lse_p) + exp(sink)),    out = sum_p exp(lse_p - lse) O_p
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp


def merge(
    outs: Sequence[jax.Array] | jax.Array,  # one per part, f32 [..., heads, head_dim]
    lses: Sequence[jax.Array] | jax.Array,  # f32 [..., heads]
    sinks: jax.Array | None,  # f32 [heads], which the parts have left out
) -> tuple[jax.Array, jax.Array]:
    """Returns out f32 [..., heads, head_dim] and lse f32 [..., heads]; zeros and -inf where nothing was seen."""
    # A term after the other, and no intermediate result that the compiler keeps: it makes one kernel of few parts.
    highest = functools.reduce(jnp.maximum, lses)
    saw = highest != -jnp.inf  # NaN stays NaN
    if sinks is not None:
        highest = jnp.maximum(highest, sinks[None])
    highest = jnp.where(saw, highest, 0.0)
    weights = [jnp.exp(part - highest) for part in lses]
    total = sum(weights) if sinks is None else sum(weights) + jnp.exp(sinks[None] - highest)
    total = jnp.where(saw, total, 1.0)  # the gradient of the logarithm of zero is no number
    out = sum(weight[..., None] * o for weight, o in zip(weights, outs, strict=True)) / total[..., None]
    return out, jnp.where(saw, highest + jnp.log(total), -jnp.inf)
