"""Penalties on tokens that a sequence has already.

A token with logit x that occurs n times among the new tokens of a request gets the logit

    r(x) - frequency_penalty * n - presence_penalty * [n > 0],

where r(x) is x / repetition_penalty for a positive x and x * repetition_penalty for others, if the token occurs among
the new tokens or in the prompt, and x otherwise.

The counts are made in each step that needs them, so no preemption, draft or cached prefix can make them wrong. There is
one row of counts for each sequence. The rows of its drafts differ from it in at most `num_drafts` tokens, whose logits
are computed separately: counts for every row would need several times the memory.
"""

import jax
import jax.numpy as jnp

from jaxpaged._scheduler.arrays import rows_of
from jaxpaged._slice.columns import add_to_columns, get_columns, set_columns
from jaxpaged._slice.logit_params import LogitParams
from jaxpaged._slice.logits_context import LogitsContext

IN_PROMPT = 2**30  # marks tokens of the prompt in the counts


def penalise(params: LogitParams, logits: jax.Array, context: LogitsContext) -> jax.Array:
    counts = count_tokens(context, logits.shape[1])
    processed = penalised(params, logits, rows_of(counts, context.seqs))
    if not context.num_drafts:
        return processed
    drafts = drafts_before(context, logits.shape[1])
    in_known = get_columns(counts, drafts, context.seqs)
    in_drafts = (drafts[:, None, :] == drafts[:, :, None]).sum(axis=2, dtype=jnp.int32)
    return set_columns(processed, drafts, penalised(params, get_columns(logits, drafts), in_known + in_drafts))


def penalised(params: LogitParams, logits: jax.Array, counts: jax.Array) -> jax.Array:
    """Logits `[rows, n]` with penalties. `counts`: int32, as the logits, the counts of the same tokens."""
    repetition = jnp.where(params.is_used, params.repetition_penalty, 1)[:, None]
    logits = jnp.where(counts > 0, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
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


def drafts_before(context: LogitsContext, vocab_size: int) -> jax.Array:
    """The drafts that each row sees, int32 `[rows, num_drafts]`, padded with `vocab_size`."""
    num_known = rows_of(context.num_known, context.seqs)[:, None]
    places = num_known + jnp.arange(context.num_drafts, dtype=jnp.int32)[None]
    drafts = get_columns(context.tokens, places, context.seqs)
    return jnp.where(places < context.lengths[:, None], drafts, vocab_size)
