"""Choosing the next token of each seat, by its request's own parameters and seed.

A token i has the probability exp(x_i / temperature), over the sum of those kept:

- top_k keeps the logits that are not below the k-th largest;
- top_p, among these, keeps the tokens whose betters have less than the part top_p of the probability.

This is what Hugging Face and vLLM keep, except that top_p never parts equal logits. Equal ones are kept together.

The draw picks a chunk of the vocabulary by its mass, and then a token in it: noise for every token would take longer
than reading the logits. The k-th largest logit is found bit by bit, without a sort. For top_p, DRAWS tokens are drawn
as if top_p were 1, one pass over the logits judges them, and the first that top_p keeps is taken (rejection sampling).
Only if it keeps none of a seat's, its smallest logit that top_p keeps is found, also bit by bit. What a seat draws
depends only on its own logits, parameters, seed and position.

On a GPU nothing here is a loop: it would ask the host whether to go on, and a slice's call could not return before its
last step is over. [slices_h200]
"""

import dataclasses
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged import _device
from jaxpaged._scheduler.records import Sampling
from jaxpaged._threefry import threefry

COLDEST = 1e-6  # lower temperatures, except 0, are raised to this, which overflows nothing
BITS = 2  # of the k-th largest that a pass over the logits finds [sampling_h100]
# Changing one of these changes the tokens of a seed.
CHUNK = 128  # tokens
DRAWS = 4  # of which all are cut for top_p = 0.95 in 6 of a million


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopLogprobs:
    """The most likely tokens, and the logarithms of their probabilities: the model's."""

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
        found, tokens = lax.top_k(logits, num)
        found, best = found.astype(jnp.float32), found[:, :1].astype(jnp.float32)
        mass = jnp.exp(logits.astype(jnp.float32) - best).sum(axis=-1, keepdims=True)
        return cls(tokens, found - best - jnp.log(mass))


def sample(
    logits: jax.Array,
    sampling: Sampling,
    positions: jax.Array,
    wants_logprobs: jax.Array,
    given: jax.Array | None = None,
    *,
    is_processed: bool = False,
    num_top_logprobs: int = 0,
) -> tuple[jax.Array, jax.Array, TopLogprobs | None]:
    """The next token of each seat, int32 `[seats]`, the logarithm of its probability, float32 `[seats]`, and the
    `num_top_logprobs` most likely tokens.

    The probability is the model's, before temperature, top-k and top-p, unless `is_processed`. If nobody wants
    logprobs, they are 0, and so are the most likely tokens.

    Args:
        logits: `[seats, vocab]`.
        sampling: the parameters of each seat.
        positions: int32 `[seats]`, the new token's position in its request; with the seed, it makes the random key.
        wants_logprobs: bool `[]`.
        given: int32 `[seats]`, the tokens whose probability is wanted instead; -1: the next token.
        is_processed: whether the probability of a token that is drawn, not of a greedy or a given one, is that with
            which it is drawn.
    """
    is_drawn = sampling.temperature > 0
    is_cut = is_drawn & (
        ((sampling.top_k > 0) & (sampling.top_k < logits.shape[1])) | (sampling.top_p < 1) | (sampling.min_p > 0)
    )
    most_likely, best = best_of(logits)

    def drawn(logits: jax.Array) -> jax.Array:
        return jnp.where(is_drawn, draw_tokens(logits, best, sampling, positions), most_likely)

    def logprobs(logits: jax.Array) -> jax.Array:
        own = tokens if given is None else jnp.where(given >= 0, given, tokens)
        if not is_processed:
            return logprobs_of(logits, own, best)
        chosen = jnp.take_along_axis(logits, own[:, None], axis=-1)[:, 0].astype(jnp.float32)
        wide = logits.astype(jnp.float32)
        is_own = is_drawn if given is None else is_drawn & (given < 0)
        temperature = jnp.where(is_own, jnp.maximum(sampling.temperature, COLDEST), 1)
        everything = jnp.full_like(best, -jnp.inf)
        least = lax.cond(
            is_cut.any(),
            lambda x: least_kept(x, best, least_before_top_p(x, best, sampling), sampling),
            lambda _: everything,
            logits,
        )
        least = jnp.where(is_own, jnp.minimum(least, chosen), everything)  # what is drawn is kept
        weights = jnp.where(wide >= least[:, None], jnp.exp((wide - best[:, None]) / temperature[:, None]), 0)
        return (chosen - best) / temperature - jnp.log(weights.sum(axis=-1))

    # A branch over logits copies no cache, and a greedy step costs one pass over them.
    tokens = lax.cond(is_drawn.any(), drawn, lambda _: most_likely, logits)
    return tokens, *with_top_logprobs(logits, logprobs, wants_logprobs, num_top_logprobs)


def score(
    logits: jax.Array, given: jax.Array, wants_logprobs: jax.Array, *, num_top_logprobs: int = 0
) -> tuple[jax.Array, jax.Array, TopLogprobs | None]:
    """What `sample` returns for given tokens, or greedy ones where none is given."""
    tokens, best = best_of(logits)
    own = jnp.where(given >= 0, given, tokens)
    return tokens, *with_top_logprobs(
        logits, lambda logits: logprobs_of(logits, own, best), wants_logprobs, num_top_logprobs
    )


def best_of(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The most likely token of each seat, int32 `[seats]`, and its logit, float32 `[seats]`; of equal ones the first.

    By the largest of each chunk: one argmax over all logits takes a CPU 2 to 8 times as long. [cpu/best_of.json]
    """
    x = chunks_of(logits)
    largest = x.max(axis=-1)
    chunk = jnp.argmax(largest, axis=-1)[:, None]
    inside = jnp.take_along_axis(x, chunk[..., None], axis=1)[:, 0]
    tokens = chunk[:, 0] * CHUNK + jnp.argmax(inside, axis=-1)
    return tokens.astype(jnp.int32), jnp.take_along_axis(largest, chunk, axis=-1)[:, 0]


def chunks_of(logits: jax.Array) -> jax.Array:
    """float32 `[seats, chunks, CHUNK]`, the last filled up with -inf.

    Called by each reader: a loop or branch would want them in memory.
    """
    padding = -logits.shape[1] % CHUNK
    padded = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return padded.reshape(len(padded), -1, CHUNK).astype(jnp.float32)


def logprobs_of(logits: jax.Array, tokens: jax.Array, best: jax.Array) -> jax.Array:
    """Those of a token of each seat under the model, float32 `[seats]`. `best` is each seat's largest logit."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0].astype(jnp.float32)
    wide = logits.astype(jnp.float32)
    return chosen - best - jnp.log(jnp.exp(wide - best[:, None]).sum(axis=-1))


def with_top_logprobs(
    logits: jax.Array, logprobs: Callable[[jax.Array], jax.Array], wants_logprobs: jax.Array, num_top_logprobs: int
) -> tuple[jax.Array, TopLogprobs | None]:
    """`logprobs(logits)` and the most likely tokens, if they are wanted."""

    def wanted(logits: jax.Array) -> tuple[jax.Array, TopLogprobs | None]:
        return logprobs(logits), TopLogprobs.of(logits, num_top_logprobs)

    def unwanted(logits: jax.Array) -> tuple[jax.Array, TopLogprobs | None]:
        return jnp.zeros(logits.shape[0], jnp.float32), TopLogprobs.create(logits.shape[0], num_top_logprobs)

    return lax.cond(wants_logprobs, wanted, unwanted, logits)


def draw_tokens(logits: jax.Array, best: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:
    """A token of each seat that top_k, min_p and top_p keep, int32 `[seats]`. `best` is each seat's largest logit."""
    draw, least = Draw(logits, best, sampling, positions), least_before_top_p(logits, best, sampling)
    is_judged = (sampling.temperature > 0) & (sampling.top_p < 1)
    tokens, chosen, mass = draw.propose(0, DRAWS, least)
    enough = jnp.where(is_judged, enough_to_cut(sampling, mass), jnp.inf)

    def take_first() -> tuple[jax.Array, jax.Array]:
        return tokens[:, 0], jnp.zeros_like(is_judged)

    token, are_cut = lax.cond(is_judged.any(), lambda: draw.judge(tokens, chosen, enough), take_first)

    def draw_again() -> jax.Array:
        again, *_ = draw.propose(DRAWS, 1, least_kept(logits, best, least, sampling))
        return jnp.where(are_cut, again[:, 0], token)

    return lax.cond(are_cut.any(), draw_again, lambda: token)


def least_before_top_p(logits: jax.Array, best: jax.Array, sampling: Sampling) -> jax.Array:
    """The smallest logit that top_k and min_p keep, float32 `[seats]`. `best` is each seat's largest logit."""
    is_cut = (sampling.temperature > 0) & (sampling.top_k > 0) & (sampling.top_k < logits.shape[1])
    everything = jnp.full(logits.shape[0], -jnp.inf, jnp.float32)
    kth = lax.cond(is_cut.any(), lambda x: kth_largest(x, sampling.top_k), lambda _: everything, logits)
    least_of_min_p = best + jnp.maximum(sampling.temperature, COLDEST) * jnp.log(sampling.min_p)
    least_of_min_p = jnp.where(sampling.min_p > 0, least_of_min_p, everything)
    return jnp.maximum(jnp.where(is_cut, kth, everything), least_of_min_p)


def least_kept(logits: jax.Array, best: jax.Array, least: jax.Array, sampling: Sampling) -> jax.Array:
    """The smallest logit that is kept, float32 `[seats]`. `least`: that top_k and min_p keep."""
    wide, temperature = logits.astype(jnp.float32), jnp.maximum(sampling.temperature, COLDEST)
    weights = jnp.exp((wide - best[:, None]) / temperature[:, None])
    weights = jnp.where(wide >= least[:, None], weights, 0)
    enough = jnp.where(sampling.top_p < 1, enough_to_cut(sampling, weights.sum(axis=-1)), jnp.inf)
    return jnp.fmax(largest_reaching(logits, weights, enough), least)


def enough_to_cut(sampling: Sampling, mass: jax.Array) -> jax.Array:
    """top_p cuts a token if its betters have at least this mass, float32 `[seats]`. `mass`: of all that top_k and min_p
    keep.

    Never 0: the best has no betters and is kept.
    """
    return jnp.maximum(sampling.top_p * mass, jnp.finfo(jnp.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Draw:
    """Passes over the logits `[seats, vocab]`, of which `best` are the largest."""

    logits: jax.Array
    best: jax.Array
    sampling: Sampling
    positions: jax.Array

    def scaled(self, x: jax.Array) -> jax.Array:
        """x `[seats, n, CHUNK]` by the temperature, at most 0."""
        return (x - self.best[:, None, None]) / jnp.maximum(self.sampling.temperature, COLDEST)[:, None, None]

    def propose(self, start: int, num: int, least: jax.Array) -> tuple[jax.Array, ...]:
        """Tokens of each seat with at least this logit, their logits, `[seats, num]` both, and the mass of all such,
        `[seats]`.

        A seat's draws are numbered; these are `num` from `start` on.
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
        tokens = jnp.minimum(chunk * CHUNK + index, self.logits.shape[1] - 1)  # of NaN it would be the padding
        return tokens.astype(jnp.int32), chosen, mass.sum(axis=-1)

    def judge(self, tokens: jax.Array, chosen: jax.Array, enough: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of each seat's tokens: the first that top_p keeps, and whether it cuts all."""
        x = chunks_of(self.logits)
        scaled = self.scaled(x)
        better = [jnp.exp(jnp.where(x > logit[:, None, None], scaled, -jnp.inf)) for logit in chosen.T]
        zeros = [jnp.zeros((), jnp.float32)] * len(better)
        # One reduction of all, each with weights of its own: else they would be written to memory.
        sums = lax.reduce(better, zeros, lambda a, b: tuple(map(operator.add, a, b)), (2,))
        is_cut = jnp.stack(sums, axis=1).sum(axis=-1) >= enough[:, None]  # false for NaN
        first = jnp.argmin(is_cut, axis=1)[:, None]
        return jnp.take_along_axis(tokens, first, axis=1)[:, 0], is_cut.all(axis=1)


def kth_largest(x: jax.Array, k: jax.Array) -> jax.Array:
    """The k-th largest of each row of x `[rows, n]`, float32 `[rows]`."""
    return largest_reaching(x, jnp.int32(1), k)


def largest_reaching(x: jax.Array, weights: jax.Array, amount: jax.Array) -> jax.Array:
    """The largest number of each row of x `[rows, n]` that has, with all above it, weights of this amount.

    float32 `[rows]`, NaN where the whole row has less; BITS bits of it in each pass.
    """
    zero = jnp.zeros((), weights.dtype)
    x = x if x.dtype.itemsize == 2 else x.astype(jnp.float32)
    width, integer = (16, jnp.int16) if x.dtype.itemsize == 2 else (32, jnp.int32)

    def turned(bits: jax.Array) -> jax.Array:  # from a float's bits to an integer in the same order, and back
        return jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)

    def more_bits(i: jax.Array, found: jax.Array) -> jax.Array:
        ordered = turned(lax.bitcast_convert_type(x, integer)).astype(jnp.int32)
        unit = jnp.int32(1) << (width - BITS * (i + 1))
        reaching = [jnp.where(ordered >= (found + unit * j)[:, None], weights, zero) for j in range(1, 2**BITS)]
        sums = lax.reduce(reaching, [zero] * len(reaching), lambda a, b: tuple(map(operator.add, a, b)), (1,))
        return found + unit * sum((of_one >= amount).astype(jnp.int32) for of_one in sums)

    least = jnp.full(x.shape[0], jnp.iinfo(integer).min, jnp.int32)
    # On a CPU an engine is made a fifth sooner with a loop.
    found = lax.fori_loop(0, width // BITS, more_bits, least, unroll=_device.is_gpu())
    # Without a loop XLA takes these passes for cheap, and computes them where a cond does not ask for them.
    found = lax.optimization_barrier(found)
    return lax.bitcast_convert_type(turned(found.astype(integer)), x.dtype).astype(jnp.float32)


def noise_of(seeds: jax.Array, positions: jax.Array, draws: jax.Array, size: int) -> jax.Array:
    """Gumbel noise, float32 `[seats, draws, size]`. The largest sum of it and a logarithm is a draw by exponentials.

    It is made of the first word of Threefry with the key (seed, position) and the counter (draw, index).
    """
    index = jnp.arange(size, dtype=jnp.uint32)
    key = seeds[:, None, None], positions.astype(jnp.uint32)[:, None, None]
    words, _ = threefry(key, (draws.astype(jnp.uint32)[None, :, None], index[None, None]))
    # 23 bits make a number from 1 to 2; 0 is no logarithm's.
    uniform = lax.bitcast_convert_type(words >> 9 | jnp.uint32(0x3F800000), jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)))
