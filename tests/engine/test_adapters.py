"""Adapters: each request's tokens are those of weights into which its adapter was merged, whatever runs beside it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged
from jaxpaged import SamplingParams
from tests.toy_model import (
    BLOCK_SIZE,
    BLOCKS,
    FEATURES,
    FREQUENCIES,
    HEAD_DIM,
    HEADS,
    TIGHT,
    VOCAB,
    continuation,
    create_engine,
    fewer_blocks,
    finish,
    random_weights,
    requests,
)

NUM_ADAPTERS, RANK = 3, 2
LAYERS = {"qkv": 3 * HEADS * HEAD_DIM, "head": VOCAB}


def random_adapters(seed=1):
    keys = iter(jax.random.split(jax.random.key(seed), 2 * len(LAYERS)))
    return {
        name: tuple(jax.random.normal(next(keys), (NUM_ADAPTERS, RANK, size)) * 0.5 for size in (FEATURES, outputs))
        for name, outputs in LAYERS.items()
    }


def linear(weights, name, x, ids):
    return x @ weights[name] + jaxpaged.lora(x, *weights["adapters"][name], ids)


def adapted(weights, tokens, positions, cache, step):
    """`toy_model.apply` with adapters of qkv and of the head."""
    x = weights["embedding"][tokens]
    q, k, v = jnp.split(linear(weights, "qkv", x, step.adapters).reshape(len(x), 3 * HEADS, HEAD_DIM), 3, axis=1)
    cache, out = step.attend(q, k, v, cache, rotary_frequencies=FREQUENCIES)
    return cache, (x + out.reshape(x.shape), step.adapters)


def adapted_head(weights, hidden):
    return linear(weights, "head", *hidden)


def merged(adapter, adapters=None):
    weights, adapters = random_weights(), adapters or random_adapters()
    if adapter is None:
        return weights
    return weights | {
        name: weights[name] + jnp.einsum("rf,ro->fo", a[adapter], b[adapter]) for name, (a, b) in adapters.items()
    }


@functools.cache
def adapted_engine(**options):
    weights = random_weights() | {"adapters": random_adapters()}
    model = dict(model=adapted, head=adapted_head, weights=weights)
    return create_engine(**model, num_adapters=NUM_ADAPTERS, widths=(), **options)


def engine_with(adapters=None, **options):
    engine = adapted_engine(**options)
    engine.update_weights(random_weights() | {"adapters": adapters or random_adapters()})
    return engine


def some_requests(count=16):
    prompts, params = requests(count)
    chosen = [None, *range(NUM_ADAPTERS)]
    return prompts, [dataclasses.replace(of_one, adapter=chosen[i % 4]) for i, of_one in enumerate(params)]


@pytest.mark.parametrize("tokens", [1, 2, 24, 25])
def test_equal_to_merged_weights(tokens):
    rng = np.random.default_rng(tokens)
    x, w, a, b = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((tokens, 24), (24, 40), (6, 3, 24), (6, 3, 40))
    )
    ids = rng.integers(-1, 6, tokens)
    ids[0] = tokens % 2 - 1
    out = x @ w + jaxpaged.lora(x, a, b, ids)
    for t, i in enumerate(ids):
        expected = x[t] @ (w if i < 0 else w + a[i].T @ b[i])
        np.testing.assert_allclose(out[t], expected, rtol=1e-4, atol=1e-4)
    assert (
        jaxpaged.lora(x.astype(jnp.bfloat16), a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), ids).dtype == "bfloat16"
    )


def test_shapes_that_do_not_fit_are_refused():
    x, a, b, ids = jnp.ones((5, 4)), jnp.ones((2, 3, 4)), jnp.ones((2, 3, 7)), jnp.zeros(5, jnp.int32)
    assert jaxpaged.lora(x, a, b, ids).shape == (5, 7)
    for wrong in ((x[0], a, b, ids), (x, a[0], b, ids), (x, a[:1], b, ids), (x, a[:, :2], b, ids), (x, b, b, ids)):
        with pytest.raises(ValueError, match=r"pass x \[tokens, features\], a \[adapters, rank, features\]"):
            jaxpaged.lora(*wrong)
    with pytest.raises(ValueError, match=r"got \[5, 4\], \[2, 3, 4\], \[2, 3, 7\] and \[4\]"):
        jaxpaged.lora(x, a, b, ids[:4])


@pytest.mark.parametrize("left", [BLOCKS, TIGHT], ids=["plenty", "tight"])
def test_tokens_are_those_of_merged_weights_among_other_adapters(left):
    prompts, params = some_requests()
    engine = engine_with(prefix_cache=True)
    before = engine.stats()
    with fewer_blocks(engine, left):
        outputs = engine.generate(prompts, params)
    assert left == BLOCKS or engine.stats().num_preempted > before.num_preempted
    for prompt, of_one, output in zip(prompts, params, outputs, strict=True):
        tokens, logprobs = continuation(merged(of_one.adapter), prompt, of_one)
        assert output.outputs[0].token_ids == tokens
        if of_one.logprobs:
            np.testing.assert_allclose(output.outputs[0].logprobs, logprobs, atol=1e-4)
    for i in (1, 6, 11):  # alone
        assert engine.generate([prompts[i]], params[i])[0].outputs[0].token_ids == outputs[i].outputs[0].token_ids


def test_a_batch_invariant_engine_gives_the_same_bits_among_other_adapters():
    prompts, params = some_requests(8)
    params = [dataclasses.replace(of_one, logprobs=True, n=1) for of_one in params]
    engine = engine_with(batch_invariant=True, prefix_cache=True)
    together = engine.generate(prompts, params)
    for prompt, of_one, output in zip(prompts, params, together, strict=True):
        assert engine.generate([prompt], of_one)[0].outputs == output.outputs
        (score,) = engine.score([prompt], [output.outputs[0].token_ids], adapter=of_one.adapter)
        assert score.logprobs == output.outputs[0].logprobs


def test_a_prefix_is_found_by_its_own_adapter_only():
    engine = engine_with(prefix_cache=True)
    prompt, new_tokens = [*range(2 * BLOCK_SIZE + 1)], 2
    chosen = [None, *range(NUM_ADAPTERS)]

    def found(adapters, engine_adapters=None):
        before = engine.stats().num_found
        params = [SamplingParams(max_tokens=new_tokens, temperature=0, adapter=adapter) for adapter in adapters]
        for adapter, output in zip(adapters, engine.generate([prompt] * len(params), params), strict=True):
            expected, _ = continuation(merged(adapter, engine_adapters), prompt, params[0])
            assert output.outputs[0].token_ids == expected
        return engine.stats().num_found - before

    assert [found([adapter]) for adapter in chosen] == [0] * 4
    assert found(chosen) == 4 * 2 * BLOCK_SIZE

    # Another adapter 1, while a request of each runs on.
    new = {
        name: tuple(old.at[1].set(other[1]) for old, other in zip(pair, random_adapters(2)[name], strict=True))
        for name, pair in random_adapters().items()
    }
    for adapter in chosen:
        engine.add_request([7] * 9, SamplingParams(max_tokens=30, temperature=0, adapter=adapter))
    engine.step()
    engine.update_weights(random_weights() | {"adapters": new}, adapters=[1])
    assert [found([adapter], new) for adapter in chosen] == [8, 8, 0, 8]
    outputs = finish(engine)
    for adapter, output in zip(chosen, outputs.values(), strict=True):
        if adapter != 1:
            expected = continuation(merged(adapter), [7] * 9, SamplingParams(max_tokens=30, temperature=0))[0]
            assert output.outputs[0].token_ids == expected
    assert found(chosen, new) == 4 * 2 * BLOCK_SIZE
    engine.update_weights(random_weights() | {"adapters": new})
    assert [found([adapter], new) for adapter in chosen] == [0] * 4


def test_scores_and_rollouts_take_adapters():
    engine = engine_with(prefix_cache=True)
    prompt = [3, 1, 4, 1, 5]
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=5, n=2, adapter=2, prompt_logprobs=True)
    rollout = engine.rollout([prompt], params)
    texts = rollout.tokens.tolist()
    scores = engine.score([prompt] * 2, texts, adapter=2)
    for row, (tokens, score) in enumerate(zip(texts, scores, strict=True)):
        np.testing.assert_allclose(rollout.logprobs[row], score.logprobs, atol=1e-4)
        if row == 0:
            expected = continuation(merged(2), prompt, dataclasses.replace(params, n=1))
            assert tokens == expected[0]
            np.testing.assert_allclose(score.logprobs, expected[1], atol=1e-4)
    (other,) = engine.score([prompt], texts[:1])
    assert not np.allclose(other.logprobs, scores[0].logprobs, atol=0.1)


def test_what_no_adapter_is_is_refused():
    engine = engine_with(prefix_cache=True)
    with pytest.raises(ValueError, match="below the engine's num_adapters=3; got adapter=3"):
        engine.add_request([1], SamplingParams(adapter=3))
    for wrong in (-1, True, 1.0):
        with pytest.raises(ValueError, match="adapter must be"):
            SamplingParams(adapter=wrong)
    with pytest.raises(ValueError, match="adapters must be below the engine's num_adapters=3; got adapters=3"):
        engine.update_weights(random_weights() | {"adapters": random_adapters()}, adapters=[3])
    with pytest.raises(ValueError, match="adapters must be a sequence; got adapters=0"):
        engine.update_weights(random_weights() | {"adapters": random_adapters()}, adapters=0)
