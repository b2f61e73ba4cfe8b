"""Merge of attention over parts of the tokens, by XLA.

lse = log(sum_p exp(lse_p) + exp(sink)),    out = sum_p exp(lse_p - lse) O_p
"""

import functools

import jax
import jax.numpy as jnp


def merge(
    outs: jax.Array,  # f32 [parts, tokens, heads, head_dim]
    lses: jax.Array,  # f32 [parts, tokens, heads]
    sinks: jax.Array | None,  # f32 [heads], which the parts have left out
) -> tuple[jax.Array, jax.Array]:
    """Returns out f32 [tokens, heads, head_dim] and lse f32 [tokens, heads]; zeros and -inf where nothing was seen."""
    # A term after the other, and no intermediate result that the compiler keeps: it makes one kernel of few parts.
    highest = functools.reduce(jnp.maximum, lses)
    saw = highest > -jnp.inf
    if sinks is not None:
        highest = jnp.maximum(highest, sinks[None])
    highest = jnp.where(saw, highest, 0.0)
    weights = [jnp.exp(part - highest) for part in lses]
    total = sum(weights) if sinks is None else sum(weights) + jnp.exp(sinks[None] - highest)
    out = sum(weight[..., None] * o for weight, o in zip(weights, outs, strict=True))
    out /= jnp.where(saw, total, 1.0)[..., None]
    return out, jnp.where(saw, highest + jnp.log(total), -jnp.inf)
