"""The sequences of a step, as functions that change logits see them."""

from __future__ import annotations

import dataclasses

import jax

from jaxpaged._public_state import public_state


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitsContext:
    """The sequences that the rows of logits continue: the argument of `Engine(process_logits=...)`.

    Row i holds the logits of the token at position `lengths[i]` of the sequence `seqs[i]`. It may read the
    `lengths[i]` tokens before that position, which are in `tokens[seqs[i]]`. With drafts, a sequence has several rows
    in a step: the first continues its known tokens, each of the others one draft more. Some rows are padding or prompt
    tokens; their logits are not used.

    Attributes:
        tokens: int32 `[seqs, max_model_len]`, the tokens of each sequence, prompt and new ones, then the drafts that
            the step computes. Arbitrary after them.
        num_known: int32 `[seqs]`, the number of tokens without drafts.
        prompt_lengths: int32 `[seqs]`, the number of prompt tokens.
        stop_ids: int32 `[seqs, num_stop_ids]`, the tokens that end the request; -1: none.
        adapters: int32 `[seqs]`, index of the request's adapter; -1: none.
        ints: int32 `[seqs, num_logits_ints]`, `SamplingParams.logits_ints`, padded with 0.
        floats: float32 `[seqs, num_logits_floats]`, `SamplingParams.logits_floats`, padded with 0.
        seqs: int32 `[rows]`, the sequence of each row.
        lengths: int32 `[rows]`, the number of tokens before the one that the row's logits are for; at least 1.
        num_drafts: the most drafts of a sequence, an int; 0 in steps without drafts.

    Example:
        >>> import jax.numpy as jnp
        >>> def forbid_repeats(logits, context):  # float32 [rows, vocab]
        ...     newest = context.tokens[context.seqs, context.lengths - 1]
        ...     return logits.at[jnp.arange(len(logits)), newest].set(-jnp.inf)
    """

    tokens: jax.Array
    num_known: jax.Array
    prompt_lengths: jax.Array
    stop_ids: jax.Array
    adapters: jax.Array
    ints: jax.Array
    floats: jax.Array
    seqs: jax.Array
    lengths: jax.Array
    num_drafts: int = dataclasses.field(default=0, metadata=dict(static=True))
