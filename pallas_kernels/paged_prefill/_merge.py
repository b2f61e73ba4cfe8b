"""Merge of the parts of the tiles that an item sees, by XLA.

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
    # A term after the other, so that XLA makes one kernel of it all.
    lse = functools.reduce(jnp.logaddexp, lses)
    saw = lse > -jnp.inf
    if sinks is not None:
        lse = jnp.logaddexp(lse, sinks[None])
    finite = jnp.where(saw, lse, 0.0)
    out = sum(jnp.exp(part - finite)[..., None] * o for part, o in zip(lses, outs, strict=True))
    return jnp.asarray(out), jnp.where(saw, lse, -jnp.inf)
