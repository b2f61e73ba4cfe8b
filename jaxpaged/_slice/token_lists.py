"""Processors of the tokens that a request lists: `logit_bias`, `allowed_token_ids` and `bad_words`."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged._put import put
from jaxpaged._scheduler.arrays import rows_of
from jaxpaged._slice.columns import add_to_columns, get_columns, set_columns
from jaxpaged._slice.logit_params import LogitParams
from jaxpaged._slice.logits_context import LogitsContext


def add_bias(params: LogitParams, logits: jax.Array, context: LogitsContext) -> jax.Array:
    """Adds the bias of each token in `logit_bias`."""
    is_biased = in_part(params, 0, params.num_biased)
    targets = jnp.where(is_biased, params.tokens, logits.shape[1])
    biased = get_columns(logits, targets).astype(jnp.float32) + params.values
    return set_columns(logits, targets, biased.astype(logits.dtype))


def forbid_others(params: LogitParams, logits: jax.Array, context: LogitsContext) -> jax.Array:
    """Forbids all tokens except `allowed_token_ids`, in the rows that list any."""
    is_listed = in_part(params, params.num_biased, params.num_allowed)
    targets = jnp.where(is_listed, params.tokens, logits.shape[1])
    # The barrier lets the scatters work in place: the gather comes first.
    logits, allowed = lax.optimization_barrier((logits, get_columns(logits, targets)))
    forbidden = jnp.full_like(logits, -jnp.inf)
    logits = put(logits, jnp.arange(len(logits), dtype=jnp.int32), params.num_allowed > 0, forbidden)
    return set_columns(logits, targets, allowed)


def forbid_bad_words(params: LogitParams, logits: jax.Array, context: LogitsContext) -> jax.Array:
    """Forbids the last token of each bad word after its other tokens. These must all be new tokens, as in vLLM."""
    is_bad = in_part(params, params.num_biased + params.num_allowed, params.num_bad)
    num_listed, num_after = is_bad.shape[1], params.values.astype(jnp.int32)
    places = context.lengths[:, None] - num_after  # where this token is if the next one completes its word
    found = get_columns(context.tokens, jnp.maximum(places, 0), context.seqs)
    is_found = (found == params.tokens) & (places >= rows_of(context.prompt_lengths, context.seqs)[:, None])
    is_missing = is_bad & (num_after > 0) & ~is_found
    last = jnp.arange(num_listed, dtype=jnp.int32)[None] + num_after  # index of the last token of its word
    num_missing = add_to_columns(jnp.zeros_like(last), jnp.where(is_missing, last, num_listed), 1)
    is_forbidden = is_bad & (num_after == 0) & (num_missing == 0)
    return set_columns(logits, jnp.where(is_forbidden, params.tokens, logits.shape[1]), -jnp.inf)


def in_part(params: LogitParams, begin: jax.Array | int, size: jax.Array) -> jax.Array:
    """Which listed tokens have an index from `begin` to `begin + size - 1`, bool `[rows, num_listed_tokens]`."""
    index = jnp.arange(params.tokens.shape[1], dtype=jnp.int32)[None] - jnp.reshape(begin, (-1, 1))
    return (index >= 0) & (index < size[:, None])
