"""Samples the next token."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0  # 0: the most likely token
    top_k: int | None = None  # sample among the k most likely tokens
    top_p: float = 1.0  # sample among the most likely tokens with this total probability


def sample(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> jax.Array:
    """Samples one token per row of logits, f32 [seqs, vocab_size], with the row's random key. Returns int32 [seqs]."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # The largest logit becomes 0, so that a low temperature cannot overflow.
    logits = (logits - logits.max(axis=-1, keepdims=True)) / max(sampling.temperature, 1e-6)
    if sampling.top_k is not None or sampling.top_p < 1:
        best_first = jnp.sort(logits, axis=-1, descending=True)
        if sampling.top_k is not None:
            rank = jnp.arange(logits.shape[-1])[None]
            best_first = jnp.where(rank < min(sampling.top_k, logits.shape[-1]), best_first, -jnp.inf)
        probabilities = jax.nn.softmax(best_first, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        kept = (before < max(sampling.top_p, 1e-30)) & (probabilities > 0)  # float32 rounds 1e-46 to 0
        least = jnp.where(kept, best_first, jnp.inf).min(axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
