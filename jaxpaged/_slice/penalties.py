"""Penalties on tokens that a sequence has already.

A token with logit x that occurs n times among the new tokens of a request gets the logit

    r(x) - frequency_penalty * n - presence_penalty * [n > 0],

where r(x) is x / repetition_penalty for a positive x and x * repetition_penalty for others, if the token occurs among
the new tokens or in the prompt, and x otherwise.

Only the logits of tokens that a sequence has are read and written. The counts are made in each step that needs them,
so no preemption, draft or cached prefix can make them wrong. There is one row of counts for each sequence, without its
drafts: counts for each row would need several times the memory.
"""

import jax
import jax.numpy as jnp

from jaxpaged._scheduler.arrays import rows_of
from jaxpaged._slice.columns import add_to_columns, get_columns, set_columns
from jaxpaged._slice.logit_params import LogitParams
from jaxpaged._slice.logits_context import LogitsContext

IN_PROMPT = 2**30  # marks tokens of the prompt in the counts


def has_penalty(params: LogitParams) -> jax.Array:
    """bool `[rows]`."""
    has_counts = (params.presence_penalty != 0) | (params.frequency_penalty != 0)
    return params.is_used & (has_counts | (params.repetition_penalty != 1))


def penalise(params: LogitParams, logits: jax.Array, context: LogitsContext) -> jax.Array:
    """The logits `[rows, vocab]` with the penalties of each row."""
    vocab_size = logits.shape[1]
    known, drafts = known_tokens(context, vocab_size), drafts_before(context, vocab_size)
    tokens = jnp.concatenate([known, drafts], axis=1)
    tokens = jnp.where(has_penalty(params)[:, None], tokens, vocab_size)
    counts = get_columns(count_tokens(context, vocab_size), tokens, context.seqs)
    counts += sum(((tokens == draft[:, None]).astype(jnp.int32) for draft in drafts.T), start=jnp.int32(0))
    new_logits = penalised(params, get_columns(logits, tokens).astype(jnp.float32), counts)
    return set_columns(logits, tokens, new_logits.astype(logits.dtype))  # equal tokens of a row get equal logits


def penalised(params: LogitParams, logits: jax.Array, counts: jax.Array) -> jax.Array:
    """Logits `[rows, n]` of tokens with these counts, int32 `[rows, n]`, as `count_tokens` makes them."""
    repetition = params.repetition_penalty[:, None]
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    num_new = (counts % IN_PROMPT).astype(jnp.float32)
    presence = jnp.where(num_new > 0, params.presence_penalty[:, None], 0)
    return logits - params.frequency_penalty[:, None] * num_new - presence


def count_tokens(context: LogitsContext, vocab_size: int) -> jax.Array:
    """Occurrences of each token among a sequence's known new tokens, plus IN_PROMPT if the prompt has it.

    The result is int32 `[seqs, vocab]`.
    """
    index = jnp.arange(context.tokens.shape[1], dtype=jnp.int32)[None]
    is_prompt, is_known = (index < ends[:, None] for ends in (context.prompt_lengths, context.num_known))
    counts = jnp.zeros((len(context.tokens), vocab_size), jnp.int32)
    counts = set_columns(counts, jnp.where(is_prompt, context.tokens, vocab_size), IN_PROMPT)
    return add_to_columns(counts, jnp.where(is_known & ~is_prompt, context.tokens, vocab_size), 1)


def known_tokens(context: LogitsContext, vocab_size: int) -> jax.Array:
    """The known tokens of each row's sequence, int32 `[rows, max_model_len]`, padded with `vocab_size`."""
    index = jnp.arange(context.tokens.shape[1], dtype=jnp.int32)[None]
    tokens = jnp.where(index < context.num_known[:, None], context.tokens, vocab_size)
    return rows_of(tokens, context.seqs)


def drafts_before(context: LogitsContext, vocab_size: int) -> jax.Array:
    """The drafts that each row sees, int32 `[rows, num_drafts]`, padded with `vocab_size`."""
    num_known = rows_of(context.num_known, context.seqs)[:, None]
    places = num_known + jnp.arange(context.num_drafts, dtype=jnp.int32)[None]
    drafts = get_columns(context.tokens, places, context.seqs)
    return jnp.where(places < context.lengths[:, None], drafts, vocab_size)
