"""Choosing the next token of each seat, by its request's own parameters and seed.

A token i has the probability exp(x_i / temperature), over the sum of those kept:

- top_k keeps the logits that are not below the k-th largest;
- top_p, among these, keeps the tokens whose betters have less than the part top_p of the probability.

This is what Hugging Face and vLLM keep, except that top_p never parts equal logits. Equal ones are kept together.

There are two ways to draw. Which of them a seat takes depends only on its own logits and parameters:

- If no token besides the FEW best may be drawn, as with the usual top_k, only these are looked at.
- Otherwise the draw picks a chunk of the vocabulary by its mass, and then a token in it: noise for every token would
  take longer than reading the logits. For top_p it draws as if top_p were 1, until it finds a token that top_p keeps
  (rejection sampling). One pass over the logits judges DRAWS tokens.
"""

import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged._scheduler.records import Sampling

COLDEST = 1e-6  # lower temperatures, except 0, are raised to this, which overflows nothing
TINY = jnp.finfo(jnp.float32).tiny
# Changing one of these changes the tokens of a seed.
FEW = 80  # the usual top_k are up to 64; some are left for logits equal to the k-th
CHUNK = 128  # tokens
DRAWS = 4  # of which all are cut for top_p = 0.95 in 6 of a million


def sample(
    logits: jax.Array,
    sampling: Sampling,
    positions: jax.Array,
    wants_logprobs: jax.Array,
    given: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The next token of each seat, int32 `[seats]`, and the logarithm of its probability, float32 `[seats]`.

    The probability is the model's, before temperature, top-k and top-p. If nobody wants logprobs, they are 0.

    Args:
        logits: `[seats, vocab]`.
        sampling: the parameters of each seat.
        positions: int32 `[seats]`, the new token's position in its request; with the seed, it makes the random key.
        wants_logprobs: bool `[]`.
        given: int32 `[seats]`, the tokens whose probability is wanted instead; -1: the next token.
    """

    def greedy(logits: jax.Array) -> jax.Array:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def drawn(logits: jax.Array) -> jax.Array:
        return jnp.where(sampling.temperature > 0, draw(logits, sampling, positions), greedy(logits))

    def logprobs(logits: jax.Array) -> jax.Array:
        wanted = tokens if given is None else jnp.where(given >= 0, given, tokens)
        chosen = jnp.take_along_axis(logits, wanted[:, None], axis=-1)[:, 0].astype(jnp.float32)
        wide = logits.astype(jnp.float32)
        best = wide.max(axis=-1)
        return chosen - best - jnp.log(jnp.exp(wide - best[:, None]).sum(axis=-1))

    def unwanted(logits: jax.Array) -> jax.Array:
        return jnp.zeros(logits.shape[0], jnp.float32)

    # A branch over logits copies no cache, and a greedy step costs one pass over them.
    tokens = lax.cond((sampling.temperature > 0).any(), drawn, greedy, logits)
    return tokens, lax.cond(wants_logprobs, logprobs, unwanted, logits)


def draw(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:
    """A token of each seat that top_k and top_p keep, int32 `[seats]`."""
    values, tokens = largest(logits, min(FEW, logits.shape[1]))
    x = values.astype(jnp.float32)
    scaled = (x - x[:, :1]) / jnp.maximum(sampling.temperature, COLDEST)[:, None]

    def of_better(weights: jax.Array) -> jax.Array:  # the sum over all that are better than each
        return jnp.where(x[:, None, :] > x[:, :, None], weights[:, None, :], 0).sum(axis=-1)

    by_k = jnp.where(sampling.top_k > 0, sampling.top_k, logits.shape[1]).astype(jnp.float32)[:, None]
    weights = jnp.where(of_better(jnp.ones_like(x)) < by_k, jnp.exp(scaled), 0)
    enough = least_mass(sampling.top_p, weights.sum(axis=-1))[:, None]
    is_kept = (weights > 0) & (of_better(weights) < enough)
    scores = jnp.where(is_kept, scaled + noise_of(sampling.seed, positions, 0, x.shape[1:]), -jnp.inf)
    token = jnp.take_along_axis(tokens, jnp.argmax(scores, axis=-1)[:, None], axis=1)[:, 0]

    is_open = ~(weights[:, -1] <= 0) & (sampling.temperature > 0)  # the others have no more weight than the last

    def from_all(logits: jax.Array) -> jax.Array:
        return jnp.where(is_open, draw_from_all(logits, x[:, 0], is_open, sampling, positions), token)

    return lax.cond(is_open.any(), from_all, lambda _: token, logits)


def draw_from_all(
    logits: jax.Array, best: jax.Array, is_open: jax.Array, sampling: Sampling, positions: jax.Array
) -> jax.Array:
    """A token of each open seat that top_k and top_p keep, int32 `[seats]`; `best` is each seat's largest logit."""
    temperature = jnp.maximum(sampling.temperature, COLDEST)[:, None, None]
    num_chunks = -(-logits.shape[1] // CHUNK)

    def chunks() -> jax.Array:
        """float32 `[seats, chunks, CHUNK]`. Called by each reader: a loop or branch would want them in memory."""
        return in_chunks(logits, CHUNK).astype(jnp.float32)

    def scaled(x: jax.Array) -> jax.Array:  # [seats, n, CHUNK], at most 0
        return (x - best[:, None, None]) / temperature

    def propose(turn: jax.Array | int, keep: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, ...]:
        """DRAWS tokens of each seat among those kept, their logits, and the mass of all kept."""
        x = chunks()
        mass = jnp.where(keep(x), jnp.exp(scaled(x)), 0).sum(axis=-1)
        noise = noise_of(sampling.seed, positions, turn, (DRAWS, num_chunks + CHUNK))
        chunk = jnp.argmax(jnp.log(mass)[:, None] + noise[..., :num_chunks], axis=-1)  # [seats, DRAWS]
        inside = jnp.take_along_axis(x, chunk[..., None], axis=1)
        scores = jnp.where(keep(inside), scaled(inside) + noise[..., num_chunks:], -jnp.inf)
        index = jnp.argmax(scores, axis=-1)
        chosen = jnp.take_along_axis(inside, index[..., None], axis=2)[..., 0]
        return (chunk * CHUNK + index).astype(jnp.int32), chosen, mass.sum(axis=-1)

    is_cut_by_k = is_open & (sampling.top_k > 0) & (sampling.top_k < logits.shape[1])
    everything = jnp.full(logits.shape[0], -jnp.inf, jnp.float32)
    kth = lax.cond(is_cut_by_k.any(), lambda x: kth_largest(x, sampling.top_k), lambda _: everything, logits)
    least = jnp.where(is_cut_by_k, kth, -jnp.inf)
    tokens, chosen, mass = propose(0, lambda x: x >= least[:, None, None])
    enough = least_mass(sampling.top_p, mass)[:, None]

    def judge(tokens: jax.Array, chosen: jax.Array) -> tuple[jax.Array, ...]:
        """Of each seat's tokens: the first that top_p keeps, whether it cuts all, and the largest of their logits."""
        x = chunks()
        weights = jnp.exp(scaled(x))
        better = [jnp.where(x > logit[:, None, None], weights, 0) for logit in chosen.T]
        zeros = [jnp.zeros((), jnp.float32)] * DRAWS
        # One reduction of all, so that the weights are not written to memory.
        sums = lax.reduce(better, zeros, lambda a, b: tuple(map(operator.add, a, b)), (2,))
        is_cut = jnp.stack(sums, axis=1).sum(axis=-1) >= enough  # false for NaN, which would otherwise never end
        first = jnp.argmin(is_cut, axis=1)[:, None]
        return jnp.take_along_axis(tokens, first, axis=1)[:, 0], is_cut.all(axis=1), chosen.max(axis=1)

    def again(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Draws for the seats without a token, among the tokens better than all those that were cut."""
        turn, token, is_cut, cut = state
        tokens, chosen, _ = propose(turn, lambda x: x > cut[:, None, None])
        new, are_cut, best_cut = judge(tokens, chosen)
        return turn + 1, jnp.where(is_cut, new, token), is_cut & are_cut, jnp.where(is_cut, best_cut, cut)

    is_cut_by_p = is_open & (sampling.top_p < 1)

    def by_p(tokens: jax.Array, chosen: jax.Array) -> jax.Array:
        token, are_cut, cut = judge(tokens, chosen)
        token = jnp.where(is_cut_by_p, token, tokens[:, 0])
        start: tuple[jax.Array, ...] = (jnp.int32(1), token, is_cut_by_p & are_cut, cut)
        return lax.while_loop(lambda state: state[2].any(), again, start)[1]

    return lax.cond(is_cut_by_p.any(), by_p, lambda tokens, _: tokens[:, 0], tokens, chosen)


def least_mass(top_p: jax.Array, mass: jax.Array) -> jax.Array:
    """If a token's betters have this mass, top_p cuts it. Never 0: the best has no betters and is kept."""
    return jnp.where(top_p < 1, jnp.maximum(top_p * mass, TINY), jnp.inf)


def largest(x: jax.Array, num: int, sizes: tuple[int, ...] = (CHUNK, CHUNK // 8)) -> tuple[jax.Array, jax.Array]:
    """The `num` largest of each row of x `[rows, n]`, in order, and their indices: those of the `num` best chunks."""
    if not sizes or x.shape[1] <= num * sizes[0]:
        return lax.top_k(x, num)
    size, *smaller = sizes
    chunks = in_chunks(x, size)
    _, chosen = lax.top_k(chunks.max(axis=-1), num)
    candidates = jnp.take_along_axis(chunks, chosen[..., None], axis=1).reshape(x.shape[0], num * size)
    values, index = largest(candidates, num, tuple(smaller))
    return values, jnp.take_along_axis(chosen, index // size, axis=1) * size + index % size


def kth_largest(x: jax.Array, k: jax.Array) -> jax.Array:
    """The k-th largest of each row of x `[rows, n]`, float32 `[rows]`: one bit of it in each pass."""
    x = x if x.dtype.itemsize == 2 else x.astype(jnp.float32)
    width, integer = (16, jnp.int16) if x.dtype.itemsize == 2 else (32, jnp.int32)

    def turned(bits: jax.Array) -> jax.Array:  # from a float's bits to an integer in the same order, and back
        return jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)

    ordered = turned(lax.bitcast_convert_type(x, integer))

    def one_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        larger = found + (jnp.int32(1) << (width - 1 - i))
        is_enough = (ordered >= larger.astype(integer)[:, None]).sum(axis=-1, dtype=jnp.int32) >= k
        return jnp.where(is_enough, larger, found)

    found = lax.fori_loop(0, width, one_bit, jnp.full(x.shape[0], jnp.iinfo(integer).min, jnp.int32))
    return lax.bitcast_convert_type(turned(found).astype(integer), x.dtype).astype(jnp.float32)


def in_chunks(x: jax.Array, size: int) -> jax.Array:
    """x `[rows, n]` as `[rows, chunks, size]`, the last chunk filled up with -inf."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=-jnp.inf)
    return padded.reshape(x.shape[0], -1, size)


def noise_of(seeds: jax.Array, positions: jax.Array, turn: jax.Array | int, shape: tuple[int, ...]) -> jax.Array:
    """Gumbel noise, float32 `[seats, *shape]`. The largest sum of it and logarithms is a draw by their exponentials."""

    def of_seat(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(jax.random.fold_in(key, turn), shape, jnp.float32)

    return jax.vmap(of_seat)(seeds, positions)
