"""Merge of the parts of the tiles that an item sees, by XLA.

lse = log(sum_p exp(lse_p) + exp(sink)),    out = sum_p exp(lse_p - lse) O_p
"""

import jax
import jax.numpy as jnp


def merge(
    outs: jax.Array,  # f32 [parts, tokens, heads, head_dim]
    lses: jax.Array,  # f32 [parts, tokens, heads]
    sinks: jax.Array | None,  # f32 [heads], which the parts have left out
) -> tuple[jax.Array, jax.Array]:
    """Returns out f32 [tokens, heads, head_dim] and lse f32 [tokens, heads]; zeros and -inf where nothing was seen."""
    saw = lses.max(axis=0) > -jnp.inf
    terms = lses if sinks is None else jnp.concatenate([lses, jnp.broadcast_to(sinks, (1, *lses.shape[1:]))])
    lse = jnp.where(saw, jax.nn.logsumexp(terms, axis=0), 0.0)
    out = (jnp.exp(lses - lse[None])[..., None] * outs).sum(axis=0)
    return out, jnp.where(saw, lse, -jnp.inf)
