"""Sampling: the distribution of tokens, the effect of top_k, top_p and min_p, and logprobs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import chi2

from jaxpaged._scheduler.records import Sampling
from jaxpaged._slice import sampling as product
from jaxpaged._slice.sampling import kth_largest
from tests.toy_model import kept

DRAWN, VOCAB = 4096, 300
jitted = jax.jit(product.sample)
processed = jax.jit(functools.partial(product.sample, is_processed=True))


def parameters(temperature, top_k, top_p, min_p, seed):
    arrays = np.broadcast_arrays(temperature, top_k, top_p, min_p, seed, -1)
    names = dict(temperature="f4", top_k="i4", top_p="f4", min_p="f4", seed="u4", adapter="i4")
    return Sampling(**{name: x.astype(names[name]) for name, x in zip(names, arrays, strict=True)})


def drawn(logits, params, position=5):
    """One token for each seed, from logits [rows, vocab] or from the same row."""
    seats = len(params.seed)
    logits = np.broadcast_to(np.asarray(logits), (seats, logits.shape[-1]))
    return np.asarray(jitted(logits, params, np.full(seats, position, np.int32), np.bool_(False))[0])


def tokens_of(logits, temperature=1, top_k=0, top_p=1, min_p=0, *, count=DRAWN):
    return drawn(logits, parameters(temperature, top_k, top_p, min_p, np.arange(count)))


@functools.cache
def logits_with_ties(vocab, scale=2.0):
    logits = (np.random.default_rng(0).normal(size=vocab) * scale).astype(np.float32)
    logits[[7, 9, vocab - 1]] = np.sort(logits)[-4]  # on the border of top_k = 5, in three chunks
    logits[[0, 130]] = -np.inf
    return logits


@pytest.mark.parametrize("vocab", [1, product.CHUNK - 1, product.CHUNK, 3 * product.CHUNK + 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_argmax_returns_the_first_of_equal_logits(vocab, dtype):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.integers(-2, 3, (64, vocab)), dtype)  # with ties, in one chunk and in several
    logits = logits.at[0].set(-jnp.inf).at[1, vocab - 1].set(jnp.inf)
    tokens, best = jax.jit(product.best_of)(logits)
    np.testing.assert_array_equal(tokens, jnp.argmax(logits, axis=-1))
    np.testing.assert_array_equal(best, logits.max(axis=-1).astype(jnp.float32))
    of_nan, _ = jax.jit(product.best_of)(logits.at[:, rng.integers(0, vocab, 9)].set(jnp.nan))
    assert ((of_nan >= 0) & (of_nan < vocab)).all()


MIXES = {  # temperature, top_k, top_p, min_p
    "temperature": (1, 0, 1, 0),
    "warm": (2.5, -1, 1, 0),
    "top_k": (1, 5, 1, 0),
    "many top_k": (2, 110, 1, 0),
    "top_p": (0.7, 0, 0.8, 0),
    "little top_p": (1.5, 0, 0.3, 0),
    "min_p": (1.2, 0, 1, 0.1),
    "top_k and top_p": (1.3, 20, 0.9, 0),
    "many top_k and top_p": (3, 200, 0.5, 0),
    "all": (1.6, 40, 0.8, 0.05),
}


@pytest.mark.parametrize("mix", MIXES)
def test_token_frequencies_match_their_probabilities(mix):
    temperature, *cut = MIXES[mix]
    logits = logits_with_ties(VOCAB)
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    weights *= kept(weights, *cut)
    expected = weights / weights.sum() * DRAWN
    found = np.bincount(tokens_of(logits, *MIXES[mix]), minlength=logits.size)
    assert len(found) == logits.size
    assert (found[weights == 0] == 0).all()
    rare = expected < 5
    found, expected = (np.append(counts[~rare], counts[rare].sum()) for counts in (found, expected))
    used = expected > 0
    assert used.sum() > 2
    distance = ((found - expected)[used] ** 2 / expected[used]).sum()
    assert chi2.sf(np.float32(distance), np.float32(used.sum() - 1)) > 1e-3


def test_a_token_does_not_depend_on_other_seats():
    """The same token alone and next to rows with other parameters, in any seat."""
    rng = np.random.default_rng(1)
    logits = (rng.normal(size=(24, 300)) * 2).astype(np.float32)
    logits[:, 200] = logits.max(axis=1)  # two best tokens: a greedy seat draws the first
    rows = [(*list(MIXES.values())[i % len(MIXES)], i) if i % 3 else (0, 3, 0.5, 0.5, i) for i in range(24)]
    params = parameters(*np.array(rows).T)
    together = drawn(logits, params)
    assert (together[::3] == logits[::3].argmax(axis=1)).all()
    order = rng.permutation(24)
    assert (drawn(logits[order], jax.tree.map(lambda x: x[order], params)) == together[order]).all()
    for i in range(24):  # for some rows top_p cuts the whole first draw
        assert drawn(logits[i : i + 1], jax.tree.map(lambda x, i=i: x[i : i + 1], params)) == together[i]
    assert (drawn(logits, params, position=6) != together).sum() > 4


RANDOM = np.random.default_rng(0).permutation(np.arange(VOCAB)) / 1000
EQUAL = np.where(np.arange(200) < 180, -2, -np.inf)
HALVES = -np.log(2) * np.arange(12)  # probabilities 1/2, 1/4, 1/8 and so on
ABOVE_HALF = np.nextafter(np.float32(0.5), np.float32(1))
KEPT = [
    # The narrowest settings keep the best token, the widest keep all, and equal logits are kept together.
    *((RANDOM, dict(temperature=9, top_k=k, top_p=p), {RANDOM.argmax()}) for k, p in ((1, 1), (0, 1e-38), (5, 1e-6))),
    *((np.zeros(VOCAB), dict(top_k=top_k), set(range(VOCAB))) for top_k in (-1, 0, VOCAB, VOCAB + 1)),
    *((EQUAL, dict(top_k=k, top_p=p), set(range(180))) for k, p in ((3, 1), (0, 0.1), (3, 0.1), (81, 0.1))),
    # min_p is a fraction of the best token's probability, after temperature.
    *(
        (t * HALVES, dict(temperature=t, min_p=np.float32(least) * 0.999), set(range(num)))
        for t in (1, 0.5, 2)
        for least, num in ((1, 1), (0.5, 2), (0.3, 2), (0.12, 4))
    ),
    # top_p is a fraction of the tokens that min_p keeps (2/3 and 1/3), or that top_k keeps, here the same.
    *((HALVES, dict(top_p=p, min_p=0.4), kept_tokens) for p, kept_tokens in ((0.6, {0}), (0.7, {0, 1}))),
    *((np.log([4, 2, 1, 1]), dict(top_k=2, top_p=p), kept_tokens) for p, kept_tokens in ((0.6, {0}), (0.7, {0, 1}))),
    # The first of 1/2, 1/4, 1/4 is exactly half. Their sums are exact.
    *((-np.log([1, 2, 2]), dict(top_p=p), kept_tokens) for p, kept_tokens in ((0.5, {0}), (ABOVE_HALF, {0, 1, 2}))),
    *(
        (-np.log([2, 4, 4, 8, 16]), dict(top_k=3, top_p=p), kept_tokens)
        for p, kept_tokens in ((0.5, {0}), (ABOVE_HALF, {0, 1, 2}))
    ),
]


@pytest.mark.parametrize(("logits", "options", "expected"), KEPT)
def test_which_tokens_are_kept(logits, options, expected):
    logits = np.pad(logits.astype(np.float32), (0, VOCAB - len(logits)), constant_values=-np.inf)  # one compiled shape
    assert set(tokens_of(logits, **options)) == expected


def test_the_draw_after_a_cut_has_its_own_noise():
    """Two tokens are kept, one in each chunk. Most draws hit the second chunk and are cut."""
    probabilities = np.full(VOCAB, 1e-30)
    probabilities[product.CHUNK : 2 * product.CHUNK] = 0.8 / (product.CHUNK - 1)
    probabilities[[0, product.CHUNK]] = 0.1
    logits, seeds = np.log(probabilities).astype(np.float32), np.arange(5 * DRAWN).reshape(5, DRAWN)
    tokens = np.array([drawn(logits, parameters(1, 0, 0.2, 0, of_some)) for of_some in seeds])
    assert set(tokens.ravel()) == {0, product.CHUNK}
    assert (tokens > 0).mean() == pytest.approx(0.5, abs=0.014)  # four standard deviations


@pytest.mark.parametrize("is_processed", [False, True])
def test_a_given_token_of_id_0_is_scored(is_processed):
    logits, given = np.float32([[0, 1, 3], [2, 0, 1], [1, 5, 0]]), np.int32([0, 2, -1])
    params = parameters(0.5, 2, 1, 0, np.arange(3))
    wants, expected = np.bool_(True), np.asarray(jax.nn.log_softmax(logits))
    tokens, logprobs, _ = product.sample(logits, params, np.arange(3), wants, given, is_processed=is_processed)
    np.testing.assert_allclose(logprobs[:2], expected[[0, 1], given[:2]], rtol=1e-6)
    np.testing.assert_allclose(product.score(logits, given, wants)[1], expected[[0, 1, 2], [0, 2, 1]], rtol=1e-6)
    assert tokens[2] in (0, 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_sampling_ends_with_nan_logits(value):
    logits = np.full((3, 300), value, np.float32)
    logits[1] = np.arange(300)
    tokens = drawn(logits, parameters(1.0, [5, 1, 81], 0.5, 0, np.arange(3)))
    assert tokens[1] == 299
    assert (tokens < 300).all()
    assert (drawn(logits[:, :100], parameters(1.0, 0, [1, 0.5, 1], 0, np.arange(3))) < 100).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_logits_equal_widened_ones(dtype):
    logits = jnp.asarray(logits_with_ties(VOCAB), dtype)
    for mix in MIXES.values():
        assert (tokens_of(logits, *mix, count=64) == tokens_of(logits.astype(jnp.float32), *mix, count=64)).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kth_largest_equals_a_sort(dtype):
    size = 3000
    x = np.random.default_rng(0).normal(size=(4, size)).astype(np.float32)
    x[1] = np.round(x[1])
    x[2, : size // 2] = -np.inf
    x[3] *= 1e30
    x = np.asarray(jnp.asarray(x, dtype).astype(jnp.float32))
    ordered = -np.sort(-x, axis=1)
    for k in (1, 50, size // 2, size):
        assert (jax.jit(kth_largest)(jnp.asarray(x, dtype), np.full(4, k, np.int32)) == ordered[:, k - 1]).all()


@pytest.mark.parametrize("is_processed", [False, True], ids=["the model's", "processed"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_processed_logprobs_match_the_sampled_distribution(dtype, is_processed):
    logits = np.asarray(jnp.asarray(logits_with_ties(VOCAB), dtype).astype(jnp.float32))
    mixes = [(0, 5, 0.5, 0.5), (1, 0, 1 - 2**-24, 0), *MIXES.values()]
    seats = 8 * len(mixes)
    params = parameters(*np.array([mixes[i % len(mixes)] for i in range(seats)]).T, np.arange(seats))
    given = np.where(np.arange(seats) < 2 * len(mixes), 3, -1).astype(np.int32)
    sample = processed if is_processed else jitted
    arguments = jnp.asarray(np.tile(logits, (seats, 1)), dtype), params, np.zeros(seats, np.int32)
    tokens, logprobs, _ = sample(*arguments, np.bool_(True), given)
    assert (tokens == jitted(*arguments, np.bool_(True), given)[0]).all()
    for i in range(seats):
        temperature, *cut = mixes[i % len(mixes)]
        is_own = is_processed and given[i] < 0 and temperature > 0
        weights = np.exp((logits.astype(np.float64) - logits.max()) / (temperature if is_own else 1))
        weights *= kept(weights, *cut) if is_own else 1
        wanted = tokens[i] if given[i] < 0 else given[i]
        assert logprobs[i] == pytest.approx(np.log(weights[wanted] / weights.sum()), abs=1e-5)
    assert (sample(*arguments, np.bool_(False))[1] == 0).all()
