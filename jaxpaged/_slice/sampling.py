"""Draws the next token of each seat, with the request's own parameters and seed.

Token i has probability exp(x_i / temperature), divided by the sum over the tokens that are kept:

- top_k keeps the logits that are not below the k-th largest;
- min_p keeps the tokens with at least min_p times the probability of the most likely one;
- top_p keeps a token among these if all better ones together have less than the fraction top_p of the probability.

Hugging Face and vLLM keep the same tokens, except that top_p never separates equal logits here: it keeps all or none.

The draw picks a chunk of the vocabulary by its mass, and then a token in the chunk: noise for every token would cost
more time than reading the logits. The k-th largest logit is found bit by bit, without a sort. For top_p, DRAWS tokens
are drawn as if top_p were 1, one pass over the logits judges them, and the first that top_p keeps is used (rejection
sampling). Only for a seat where all are rejected, the smallest logit that top_p keeps is found, also bit by bit. A
seat's token depends only on its own logits, parameters, seed and position.

On a GPU there are no loops: the host would have to decide about each iteration, and a slice's call could not return
before its last step is over. [slices_h200]
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged import _device
from jaxpaged._scheduler.records import Sampling
from jaxpaged._threefry import threefry

COLDEST = 1e-6  # lower temperatures, except 0, are raised to this, so that nothing overflows
BITS = 2  # one pass over the logits finds this many bits of the k-th largest [sampling_h100]
# A change of these changes the tokens of a seed.
CHUNK = 128  # tokens
DRAWS = 4  # with top_p = 0.95, all of them are rejected in 6 of a million cases


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopLogprobs:
    """The most likely tokens, and their logprobs under the model."""

    tokens: jax.Array  # int32 [..., num], the most likely first
    logprobs: jax.Array  # float32 [..., num]

    @classmethod
    def create(cls, size: int, num: int) -> "TopLogprobs | None":
        """Zeros; None for a `num` of 0."""
        return cls(jnp.zeros((size, num), jnp.int32), jnp.zeros((size, num), jnp.float32)) if num else None

    @classmethod
    def of(cls, logits: jax.Array, num: int) -> "TopLogprobs | None":
        if not num:
            return None
        if num > logits.shape[1]:
            raise ValueError(f"max_logprobs must be at most {logits.shape[1]}, the logits of a token; got {num}.")
        top, tokens = lax.top_k(logits, num)
        top, best = top.astype(jnp.float32), top[:, :1].astype(jnp.float32)
        mass = jnp.exp(logits.astype(jnp.float32) - best).sum(axis=-1, keepdims=True)
        return cls(tokens, top - best - jnp.log(mass))


Drawn = tuple[jax.Array, jax.Array, TopLogprobs | None]  # per row: the token, its logprob, the most likely tokens


def sample(
    logits: jax.Array,
    sampling: Sampling,
    positions: jax.Array,
    wants_logprobs: jax.Array,
    given: jax.Array | int = -1,
    *,
    with_model_logits: Callable[[Callable[[jax.Array], Any]], Any] | None = None,
    is_processed: bool = False,
    num_top_logprobs: int = 0,
) -> Drawn:
    """The next token of each seat, its logprob, and the most likely tokens.

    Args:
        logits: `[seats, vocab]`.
        sampling: the parameters of each seat.
        positions: int32 `[seats]`, the new token's position in its request. It is part of the random key, with the
            seed.
        wants_logprobs: bool `[]`. Otherwise the logprobs and the most likely tokens are 0.
        given: int32 `[seats]`, tokens whose logprobs are returned instead; -1: the next token.
        with_model_logits: calls a function with the model's logits, `[seats, vocab]`, and returns its results, if
            `logits` were changed. Rows of given tokens must be equal. None: the model's are `logits`.
        is_processed: the logprobs of drawn tokens come from the distribution that is drawn from, those of greedy tokens
            from `logits`. By default all are the model's, before temperature, top_k, min_p and top_p.
        num_top_logprobs: the number of most likely tokens.

    Returns:
        tokens: int32 `[seats]`.
        logprobs: float32 `[seats]`.
        top_logprobs: `[seats]`; None if `num_top_logprobs` is 0.
    """
    most_likely, best = best_of(logits)
    is_drawn, draw = sampling.temperature > 0, Draw(logits, best, sampling, positions)
    # A branch over logits copies no cache, and a greedy step costs one pass over them.
    tokens = lax.cond(is_drawn.any(), lambda: jnp.where(is_drawn, draw.tokens(), most_likely), lambda: most_likely)

    def logprobs(model_logits: jax.Array) -> tuple[jax.Array, TopLogprobs | None]:
        own = jnp.where(given >= 0, given, tokens)
        if is_processed:
            of_tokens = draw.logprobs(own, is_drawn & (given < 0))
        else:
            of_tokens = logprobs_of(model_logits, own, best if model_logits is logits else None)
        return of_tokens, TopLogprobs.of(model_logits, num_top_logprobs)

    wanted = functools.partial(with_model_logits or (lambda function: function(logits)), logprobs)
    return tokens, *if_wanted(wants_logprobs, wanted, len(logits), num_top_logprobs)


def score(logits: jax.Array, given: jax.Array, wants_logprobs: jax.Array, *, num_top_logprobs: int = 0) -> Drawn:
    """As `sample` for given tokens. Always returns the greedy tokens, and scores them where `given` is -1."""
    tokens, best = best_of(logits)
    own = jnp.where(given >= 0, given, tokens)

    def logprobs() -> tuple[jax.Array, TopLogprobs | None]:
        return logprobs_of(logits, own, best), TopLogprobs.of(logits, num_top_logprobs)

    return tokens, *if_wanted(wants_logprobs, logprobs, len(logits), num_top_logprobs)


def if_wanted(
    wants_logprobs: jax.Array,
    logprobs: Callable[[], tuple[jax.Array, TopLogprobs | None]],
    num_seats: int,
    num_top_logprobs: int,
) -> tuple[jax.Array, TopLogprobs | None]:
    """The logprobs and the most likely tokens if they are wanted, else zeros."""
    return lax.cond(
        wants_logprobs,
        logprobs,
        lambda: (jnp.zeros(num_seats, jnp.float32), TopLogprobs.create(num_seats, num_top_logprobs)),
    )


def best_of(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The most likely token of each seat, int32 `[seats]`, and its logit, float32 `[seats]`. The first of equal ones.

    Compares the maxima of chunks: on a CPU, one argmax over all logits needs 2 to 8 times as long. [cpu/best_of.json]
    """
    x = chunks_of(logits)
    largest = x.max(axis=-1)
    chunk = jnp.argmax(largest, axis=-1)[:, None]
    inside = jnp.take_along_axis(x, chunk[..., None], axis=1)[:, 0]
    tokens = chunk[:, 0] * CHUNK + jnp.argmax(inside, axis=-1)
    return tokens.astype(jnp.int32), jnp.take_along_axis(largest, chunk, axis=-1)[:, 0]


def chunks_of(logits: jax.Array) -> jax.Array:
    """float32 `[seats, chunks, CHUNK]`, padded with -inf.

    Each reader calls this itself: passed to a loop or branch, the chunks would be written to memory.
    """
    padding = -logits.shape[1] % CHUNK
    padded = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return padded.reshape(len(padded), -1, CHUNK).astype(jnp.float32)


def logits_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The logit of each seat's token, float32 `[seats]`."""
    return jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0].astype(jnp.float32)


def logprobs_of(logits: jax.Array, tokens: jax.Array, best: jax.Array | None = None) -> jax.Array:
    """The model's logprob of each seat's token, float32 `[seats]`. `best`: each seat's largest logit, if known."""
    chosen, wide = logits_of(logits, tokens), logits.astype(jnp.float32)
    best = wide.max(axis=-1) if best is None else best
    return chosen - best - jnp.log(jnp.exp(wide - best[:, None]).sum(axis=-1))


@dataclasses.dataclass(frozen=True)
class Draw:
    """The distributions that tokens are drawn from."""

    logits: jax.Array  # [seats, vocab]
    best: jax.Array  # float32 [seats], the largest logits
    sampling: Sampling  # [seats]
    positions: jax.Array  # int32 [seats]

    @property
    def temperature(self) -> jax.Array:
        return jnp.maximum(self.sampling.temperature, COLDEST)

    def tokens(self) -> jax.Array:
        """A token of each seat that top_k, min_p and top_p keep, int32 `[seats]`."""
        least = self.least_before_top_p()
        is_judged = (self.sampling.temperature > 0) & (self.sampling.top_p < 1)
        tokens, chosen, mass = self.propose(0, DRAWS, least)
        enough = jnp.where(is_judged, self.enough_to_cut(mass), jnp.inf)
        token, are_cut = lax.cond(
            is_judged.any(),
            lambda: self.judge(tokens, chosen, enough),
            lambda: (tokens[:, 0], jnp.zeros_like(is_judged)),
        )

        def draw_again() -> jax.Array:
            again, *_ = self.propose(DRAWS, 1, self.least_kept(least))
            return jnp.where(are_cut, again[:, 0], token)

        return lax.cond(are_cut.any(), draw_again, lambda: token)

    def logprobs(self, tokens: jax.Array, is_drawn: jax.Array) -> jax.Array:
        """The logprob of each token, float32 `[seats]`, where `is_drawn` in the distribution that it is drawn from."""
        sampling, vocab_size = self.sampling, self.logits.shape[1]
        is_cut = (sampling.temperature > 0) & (
            ((sampling.top_k > 0) & (sampling.top_k < vocab_size)) | (sampling.top_p < 1) | (sampling.min_p > 0)
        )
        chosen = logits_of(self.logits, tokens)
        temperature = jnp.where(is_drawn, self.temperature, 1)
        everything = jnp.full_like(self.best, -jnp.inf)
        least = lax.cond(is_cut.any(), lambda: self.least_kept(self.least_before_top_p()), lambda: everything)
        least = jnp.where(is_drawn, jnp.minimum(least, chosen), everything)  # a drawn token is always kept
        mass = self.weights(temperature, least).sum(axis=-1)
        return (chosen - self.best) / temperature - jnp.log(mass)

    def weights(self, temperature: jax.Array, least: jax.Array) -> jax.Array:
        """float32 `[seats, vocab]`, relative to the most likely token's; 0 for logits below `least`."""
        wide = self.logits.astype(jnp.float32)
        weights = jnp.exp((wide - self.best[:, None]) / temperature[:, None])
        return jnp.where(wide >= least[:, None], weights, 0)

    def least_before_top_p(self) -> jax.Array:
        """The smallest logit that top_k and min_p keep, float32 `[seats]`."""
        sampling = self.sampling
        is_cut = (sampling.temperature > 0) & (sampling.top_k > 0) & (sampling.top_k < self.logits.shape[1])
        everything = jnp.full_like(self.best, -jnp.inf)
        kth = lax.cond(is_cut.any(), lambda: kth_largest(self.logits, sampling.top_k), lambda: everything)
        least = self.best + self.temperature * jnp.log(sampling.min_p)
        least = jnp.where(sampling.min_p > 0, least, everything)
        return jnp.maximum(jnp.where(is_cut, kth, everything), least)

    def least_kept(self, least: jax.Array) -> jax.Array:
        """The smallest logit that top_p keeps too, float32 `[seats]`. `least`: from `least_before_top_p`."""
        weights = self.weights(self.temperature, least)
        enough = jnp.where(self.sampling.top_p < 1, self.enough_to_cut(weights.sum(axis=-1)), jnp.inf)
        return jnp.fmax(largest_with_weight(self.logits, weights, enough), least)

    def enough_to_cut(self, mass: jax.Array) -> jax.Array:
        """The mass of better tokens from which top_p cuts a token, float32 `[seats]`.

        `mass`: of all tokens that top_k and min_p keep. The result is never 0: the best token is kept.
        """
        return jnp.maximum(self.sampling.top_p * mass, jnp.finfo(jnp.float32).tiny)

    def scaled(self, x: jax.Array) -> jax.Array:
        """Logits x `[seats, n, CHUNK]`, relative to the largest and divided by the temperature."""
        return (x - self.best[:, None, None]) / self.temperature[:, None, None]

    def propose(self, start: int, num: int, least: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Draws the tokens with numbers `start` to `start + num - 1`, among those with a logit of at least `least`.

        Returns:
            tokens: int32 `[seats, num]`.
            chosen: float32 `[seats, num]`, their logits.
            mass: float32 `[seats]`, the mass of all tokens that can be drawn.
        """
        x, least = chunks_of(self.logits), least[:, None, None]
        num_chunks = x.shape[1]
        mass = jnp.where(x >= least, jnp.exp(self.scaled(x)), 0).sum(axis=-1)
        noise = noise_of(self.sampling.seed, self.positions, start + jnp.arange(num), num_chunks + CHUNK)
        chunk = jnp.argmax(jnp.log(mass)[:, None] + noise[..., :num_chunks], axis=-1)
        inside = jnp.take_along_axis(x, chunk[..., None], axis=1)
        scores = jnp.where(inside >= least, self.scaled(inside) + noise[..., num_chunks:], -jnp.inf)
        index = jnp.argmax(scores, axis=-1)
        chosen = jnp.take_along_axis(inside, index[..., None], axis=2)[..., 0]
        tokens = jnp.minimum(chunk * CHUNK + index, self.logits.shape[1] - 1)  # NaN logits would give padding
        return tokens.astype(jnp.int32), chosen, mass.sum(axis=-1)

    def judge(self, tokens: jax.Array, chosen: jax.Array, enough: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first of each seat's tokens that top_p keeps, and whether it rejects all of them."""
        x = chunks_of(self.logits)
        scaled = self.scaled(x)
        better = [jnp.exp(jnp.where(x > logit[:, None, None], scaled, -jnp.inf)) for logit in chosen.T]
        is_cut = jnp.stack(sum_each(better), axis=1).sum(axis=-1) >= enough[:, None]  # false for NaN
        first = jnp.argmin(is_cut, axis=1)[:, None]
        return jnp.take_along_axis(tokens, first, axis=1)[:, 0], is_cut.all(axis=1)


def sum_each(arrays: list[jax.Array]) -> list[jax.Array]:
    """Sums over the last axis, in one reduction: separate ones would write the arrays to memory."""
    first = arrays[0]
    zeros = [jnp.zeros((), first.dtype)] * len(arrays)
    return lax.reduce(arrays, zeros, lambda a, b: tuple(map(operator.add, a, b)), (first.ndim - 1,))


def kth_largest(x: jax.Array, k: jax.Array) -> jax.Array:
    """The k-th largest number of each row of x `[rows, n]`, float32 `[rows]`."""
    return largest_with_weight(x, jnp.int32(1), k)


def largest_with_weight(x: jax.Array, weights: jax.Array, least: jax.Array) -> jax.Array:
    """The largest number of each row that, together with all larger numbers, weighs at least `least`.

    Each pass over x finds BITS bits of the result.

    Args:
        x: `[rows, n]`.
        weights: `[rows, n]`, or a scalar.
        least: `[rows]`.

    Returns:
        float32 `[rows]`, NaN where the whole row weighs less.
    """
    x = x if x.dtype.itemsize == 2 else x.astype(jnp.float32)
    width, integer = (16, jnp.int16) if x.dtype.itemsize == 2 else (32, jnp.int32)

    def reorder(bits: jax.Array) -> jax.Array:
        """From a float's bits to an integer in the same order, and back."""
        return jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)

    def more_bits(i: jax.Array, result: jax.Array) -> jax.Array:
        ordered = reorder(lax.bitcast_convert_type(x, integer)).astype(jnp.int32)
        unit = jnp.int32(1) << (width - BITS * (i + 1))
        zero = jnp.zeros((), weights.dtype)
        above = [jnp.where(ordered >= (result + unit * j)[:, None], weights, zero) for j in range(1, 2**BITS)]
        return result + unit * sum((weight >= least).astype(jnp.int32) for weight in sum_each(above))

    result = jnp.full(len(x), jnp.iinfo(integer).min, jnp.int32)
    # On a CPU a loop shortens the creation of an engine by a fifth.
    result = lax.fori_loop(0, width // BITS, more_bits, result, unroll=_device.is_gpu())
    # Without the barrier XLA considers the unrolled passes cheap, and computes them even where a cond would skip them.
    result = lax.optimization_barrier(result)
    return lax.bitcast_convert_type(reorder(result.astype(integer)), x.dtype).astype(jnp.float32)


def noise_of(seeds: jax.Array, positions: jax.Array, draws: jax.Array, size: int) -> jax.Array:
    """Gumbel noise, float32 `[seats, draws, size]`. The index with the largest sum of noise and log weight is a draw.

    Uses the first word of Threefry with key (seed, position) and counter (draw, index).
    """
    index = jnp.arange(size, dtype=jnp.uint32)
    key = seeds[:, None, None], positions.astype(jnp.uint32)[:, None, None]
    words, _ = threefry(key, (draws.astype(jnp.uint32)[None, :, None], index[None, None]))
    # 23 random bits give a number from 1 to 2. The maximum avoids the logarithm of 0.
    uniform = lax.bitcast_convert_type(words >> 9 | jnp.uint32(0x3F800000), jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)))
