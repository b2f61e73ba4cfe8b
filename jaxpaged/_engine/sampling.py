"""Choosing the next token of each seat, by its request's own parameters and seed."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged._scheduler.records import Sampling

EVERYTHING = jnp.iinfo(jnp.int32).max
COLDEST = 1e-6  # lower temperatures, except 0, are raised to this, which overflows nothing


def sample(
    logits: jax.Array, sampling: Sampling, positions: jax.Array, wants_logprobs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The next token of each seat, int32 `[seats]`, and the logarithm of its probability, float32 `[seats]`.

    The probability is the model's, before temperature, top-k and top-p. If nobody wants logprobs, they are 0.

    Args:
        logits: `[seats, vocab]`.
        sampling: the parameters of each seat.
        positions: int32 `[seats]`, the new token's position in its request; with the seed, it makes the random key.
        wants_logprobs: bool `[]`.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def with_probabilities(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = logits.astype(jnp.float32)
        best = logits.max(axis=-1, keepdims=True)
        behind = best - logits  # how far each is behind the best, at least 0
        drawn = _draw(behind, sampling, positions)
        tokens = jnp.where(sampling.temperature > 0, drawn, greedy)
        chosen = jnp.take_along_axis(behind, tokens[:, None], axis=-1)[:, 0]
        return tokens, -chosen - jnp.log(jnp.exp(-behind).sum(axis=-1))

    def only_greedy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        return greedy, jnp.zeros(greedy.shape, jnp.float32)

    # A branch over logits copies no cache, and a greedy step costs one pass over them.
    return lax.cond(wants_logprobs | (sampling.temperature > 0).any(), with_probabilities, only_greedy, logits)


def _draw(behind: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:
    scaled = behind / jnp.maximum(sampling.temperature, COLDEST)[:, None]

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, scaled.shape[1:], jnp.float32)

    is_kept = _bits(scaled) <= furthest_kept(scaled, sampling.top_k, sampling.top_p)[:, None]
    scores = jnp.where(is_kept, jax.vmap(noise)(sampling.seed, positions) - scaled, -jnp.inf)
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def furthest_kept(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """How far behind the best a token may be, as the bits of a float32, int32 `[seats]`.

    A token is kept if fewer than `top_k` are better than it, and the better ones together are less probable than
    `top_p`. Equal ones are kept together. The largest such distance is found bit by bit, without a sort: the bits of
    floats that are not negative are in their order.

    Args:
        scaled: float32 `[seats, vocab]`, how far behind the best, over the temperature.
        top_k: int32 `[seats]`; 0 or -1: all.
        top_p: float32 `[seats]`; 1: all.
    """
    bits = _bits(scaled)
    weights = jnp.exp(-scaled)
    is_cut_by_k, is_cut_by_p = top_k > 0, top_p < 1
    # Never nothing: the best is kept whatever top_p is.
    least = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny) * weights.sum(axis=-1)

    def try_bit(i: jax.Array, distance: jax.Array) -> jax.Array:
        further = distance | (jnp.int32(1) << (30 - i))
        is_better = bits < further[:, None]
        fits = ~is_cut_by_k | (is_better.sum(axis=-1, dtype=jnp.int32) < top_k)
        fits &= ~is_cut_by_p | (jnp.where(is_better, weights, 0).sum(axis=-1) < least)
        return jnp.where(fits, further, distance)

    is_any_cut = (is_cut_by_k | is_cut_by_p).any()
    start = jnp.broadcast_to(jnp.where(is_any_cut, 0, EVERYTHING).astype(jnp.int32), top_k.shape)
    return lax.fori_loop(0, jnp.where(is_any_cut, 31, 0), try_bit, start)


def _bits(distances: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(distances, jnp.int32)
