"""How the engine draws tokens: their distribution, what top_k and top_p keep, and what a token depends on."""

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

DRAWN = 4096
jitted = jax.jit(product.sample)


def parameters(temperature, top_k, top_p, min_p, seed):
    temperature, top_k, top_p, min_p, seed = np.broadcast_arrays(temperature, top_k, top_p, min_p, seed)
    return Sampling(
        temperature=temperature.astype(np.float32),
        top_k=top_k.astype(np.int32),
        top_p=top_p.astype(np.float32),
        min_p=min_p.astype(np.float32),
        seed=seed.astype(np.uint32),
        adapter=np.full(len(seed), -1, np.int32) if seed.ndim else np.int32(-1),
    )


def drawn(logits, params, position=5):
    """The tokens of rows [rows, vocab], or of one row drawn by as many seeds."""
    seats = len(params.seed)
    logits = np.broadcast_to(np.asarray(logits), (seats, logits.shape[-1]))
    return np.asarray(jitted(logits, params, np.full(seats, position, np.int32), np.bool_(False))[0])


def tokens_of(logits, temperature=1, top_k=0, top_p=1, min_p=0, *, count=DRAWN):
    return drawn(logits, parameters(temperature, top_k, top_p, min_p, np.arange(count)))


@functools.cache
def logits_with_ties(vocab, scale=2.0):
    logits = (np.random.default_rng(0).normal(size=vocab) * scale).astype(np.float32)
    logits[[7, 9, vocab - 1]] = np.sort(logits)[-4]  # at the border of top_k = 5, and in three chunks
    logits[[0, 130]] = -np.inf
    return logits


@pytest.mark.parametrize("vocab", [1, product.CHUNK - 1, product.CHUNK, 3 * product.CHUNK + 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_best_is_the_first_of_the_largest(vocab, dtype):
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
def test_tokens_come_as_often_as_they_are_probable(mix):
    temperature, *cut = MIXES[mix]
    logits = logits_with_ties(300)
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


def test_a_token_is_its_seats_own():
    """The same alone, and among others with other parameters, in whatever seat."""
    rng = np.random.default_rng(1)
    logits = (rng.normal(size=(24, 300)) * 2).astype(np.float32)
    logits[:, 200] = logits.max(axis=1)  # two best ones, of which a greedy seat takes the first
    rows = [(*list(MIXES.values())[i % len(MIXES)], i) if i % 3 else (0, 3, 0.5, 0.5, i) for i in range(24)]
    params = parameters(*np.array(rows).T)
    together = drawn(logits, params)
    assert (together[::3] == logits[::3].argmax(axis=1)).all()
    order = rng.permutation(24)
    assert (drawn(logits[order], jax.tree.map(lambda x: x[order], params)) == together[order]).all()
    for i in range(24):  # of some, top_p cuts all that is drawn at first
        assert drawn(logits[i : i + 1], jax.tree.map(lambda x, i=i: x[i : i + 1], params)) == together[i]
    assert (drawn(logits, params, position=6) != together).sum() > 4


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1), (0, 1e-38), (0, 1e-6), (5, 1e-6)])
def test_the_narrowest_keep_the_best(top_k, top_p):
    logits = np.random.default_rng(0).permutation(np.arange(1000, dtype=np.float32) / 1000)
    assert set(tokens_of(logits, 9, top_k, top_p, count=64)) == {logits.argmax()}


@pytest.mark.parametrize("top_k", [-1, 0, 300, 301])
def test_the_widest_keep_all(top_k):
    logits = np.zeros(300, np.float32)
    assert (tokens_of(logits, 1, top_k) == tokens_of(logits)).all()
    assert len(set(tokens_of(logits, 1, top_k))) == 300


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1), (0, 0.1), (3, 0.1), (81, 0.1)])
def test_equal_logits_are_kept_together(top_k, top_p):
    logits = np.where(np.arange(200) < 180, np.float32(-2), -np.inf)
    assert set(tokens_of(logits, 1, top_k, top_p)) == set(range(180))


def test_the_draw_after_all_were_cut_has_noise_of_its_own():
    """Two tokens are kept, one in each chunk. Most draws are of the second chunk, and cut."""
    probabilities = np.full(2 * product.CHUNK, 1e-30)
    probabilities[product.CHUNK :] = 0.8 / (product.CHUNK - 1)
    probabilities[[0, product.CHUNK]] = 0.1
    tokens = tokens_of(np.log(probabilities).astype(np.float32), top_p=0.2, count=30_000)
    assert set(tokens) == {0, product.CHUNK}
    assert (tokens > 0).mean() == pytest.approx(0.5, abs=0.012)  # four standard deviations


@pytest.mark.parametrize("is_processed", [False, True])
def test_a_given_token_of_id_0_is_scored(is_processed):
    logits, given = np.float32([[0, 1, 3], [2, 0, 1], [1, 5, 0]]), np.int32([0, 2, -1])
    params = parameters(0.5, 2, 1, 0, np.arange(3)) if is_processed else parameters(0, 0, 1, 0, np.arange(3))
    wants = np.bool_(True)
    tokens, logprobs, _ = product.sample(logits, params, np.arange(3), wants, given, is_processed=is_processed)
    expected = np.asarray(jax.nn.log_softmax(logits))
    np.testing.assert_allclose(logprobs[:2], expected[[0, 1], given[:2]], rtol=1e-6)
    of_given = product.score(logits, given, wants)[1]
    np.testing.assert_allclose(of_given, [expected[0, 0], expected[1, 2], expected[2, 1]], rtol=1e-6)
    assert tokens[2] in (0, 1)


def test_min_p_keeps_from_its_part_of_the_best_on_whatever_the_others_are():
    """Probabilities 1/2, 1/4, 1/8, ..., after temperature."""
    logits = -np.log(2) * np.arange(12, dtype=np.float32)
    for temperature in (1, 0.5, 2):
        for least, num in ((1, 1), (0.5, 2), (0.3, 2), (0.12, 4), (1e-9, 12)):
            kept_tokens = set(tokens_of(temperature * logits, temperature, min_p=np.float32(least) * 0.999))
            assert kept_tokens <= set(range(num))
            assert len(kept_tokens) >= min(num, 4)


def test_top_p_is_a_part_of_what_min_p_keeps():
    """Of 1/2, 1/4, 1/8 and others, min_p keeps two: the first alone has two thirds of them."""
    logits = -np.log(2) * np.arange(12, dtype=np.float32)
    assert set(tokens_of(logits, top_p=0.6, min_p=0.4, count=64)) == {0}
    assert set(tokens_of(logits, top_p=0.7, min_p=0.4, count=64)) == {0, 1}


def test_top_p_takes_no_more_than_it_needs():
    """Probabilities 1/2, 1/4, 1/4: the first alone has a half, so that nothing else is drawn with top_p=0.5."""
    logits = -np.log(np.array([1, 2, 2], np.float32))
    np.testing.assert_array_equal(np.exp(logits), [1, 0.5, 0.5])  # no sum of these is rounded
    assert set(tokens_of(logits, top_p=0.5, count=64)) == {0}
    assert set(tokens_of(logits, top_p=np.nextafter(np.float32(0.5), np.float32(1)), count=64)) == {0, 1, 2}


def test_top_p_takes_no_more_than_half_of_what_top_k_keeps():
    """Top_k keeps 1/2, 1/4, 1/4 of these, as in the test above."""
    logits = np.log(np.array([1 / 2, 1 / 4, 1 / 4, 1 / 8, 1 / 16], np.float32))
    assert set(tokens_of(logits, top_k=3, top_p=0.5, count=64)) == {0}
    assert set(tokens_of(logits, top_k=3, top_p=np.nextafter(np.float32(0.5), np.float32(1)), count=64)) == {0, 1, 2}


def test_top_p_is_a_part_of_what_top_k_keeps():
    """Of 4/8, 2/8, 1/8, 1/8 top_k keeps 6/8, of which the first has two thirds."""
    logits = np.log(np.array([4, 2, 1, 1], np.float32))
    assert set(tokens_of(logits, top_k=2, top_p=0.6, count=64)) == {0}
    assert set(tokens_of(logits, top_k=2, top_p=0.7, count=64)) == {0, 1}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_end(value):
    logits = np.full((3, 300), value, np.float32)
    logits[1] = np.arange(300)
    tokens = drawn(logits, parameters(1.0, [5, 1, 81], 0.5, 0, np.arange(3)))
    assert tokens[1] == 299
    assert (tokens < 300).all()
    assert (drawn(logits[:, :100], parameters(1.0, 0, [1, 0.5, 1], 0, np.arange(3))) < 100).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_logits_are_those_widened(dtype):
    logits = jnp.asarray(logits_with_ties(300), dtype)
    for mix in MIXES.values():
        assert (tokens_of(logits, *mix, count=64) == tokens_of(logits.astype(jnp.float32), *mix, count=64)).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kth_largest_is_that_of_a_sort(dtype):
    size = 3000
    x = np.random.default_rng(0).normal(size=(4, size)).astype(np.float32)
    x[1] = np.round(x[1])
    x[2, : size // 2] = -np.inf
    x[3] *= 1e30
    x = np.asarray(jnp.asarray(x, dtype).astype(jnp.float32))
    ordered = -np.sort(-x, axis=1)
    for k in (1, 50, size // 2, size):
        assert (jax.jit(kth_largest)(jnp.asarray(x, dtype), np.full(4, k, np.int32)) == ordered[:, k - 1]).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_processed_logprobs_are_those_with_which_tokens_are_drawn(dtype):
    logits = np.asarray(jnp.asarray(logits_with_ties(300), dtype).astype(jnp.float32))
    mixes = [(0, 5, 0.5, 0.5), (1, 0, 1 - 2**-24, 0), *MIXES.values()]
    seats = 8 * len(mixes)
    params = parameters(*np.array([mixes[i % len(mixes)] for i in range(seats)]).T, np.arange(seats))
    given = np.where(np.arange(seats) < 2 * len(mixes), 3, -1).astype(np.int32)
    processed = jax.jit(functools.partial(product.sample, is_processed=True))
    arguments = (
        jnp.asarray(np.tile(logits, (seats, 1)), dtype),
        params,
        np.zeros(seats, np.int32),
        np.bool_(True),
        given,
    )
    tokens, logprobs, _ = processed(*arguments)
    assert (tokens == jitted(*arguments)[0]).all()
    for i in range(seats):
        temperature, *cut = mixes[i % len(mixes)]
        is_own = given[i] < 0 and temperature > 0
        weights = np.exp((logits.astype(np.float64) - logits.max()) / (temperature if is_own else 1))
        weights *= kept(weights, *cut) if is_own else 1
        wanted = tokens[i] if given[i] < 0 else given[i]
        assert logprobs[i] == pytest.approx(np.log(weights[wanted] / weights.sum()), abs=1e-5)
    assert (processed(*arguments[:3], np.bool_(False))[1] == 0).all()


def test_logprobs_are_the_models():
    logits = logits_with_ties(300)
    wide = logits.astype(np.float64)
    expected = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    params = parameters([0, 1, 2.0, 0.5], [0, 5, 0, 3], [1, 0.5, 0.9, 1], [0, 0, 0.1, 0], np.arange(4))
    arguments = np.tile(logits, (4, 1)), params, np.zeros(4, np.int32)
    tokens, logprobs, _ = jitted(*arguments, np.bool_(True))
    np.testing.assert_allclose(logprobs, expected[np.asarray(tokens)], rtol=1e-5)
    assert (jitted(*arguments, np.bool_(False))[1] == 0).all()
