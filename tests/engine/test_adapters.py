"""Adapters: a request's tokens equal the tokens of merged weights, whatever adapters other requests have."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged
from tests.toy_model import (
    BLOCK_SIZE,
    BLOCKS,
    ENGINES,
    FEATURES,
    FREQUENCIES,
    HEAD_DIM,
    HEADS,
    TIGHT,
    VOCAB,
    continuation,
    counting,
    create_engine,
    fewer_blocks,
    finish,
    greedy,
    random_weights,
    requests,
    tokens_of,
    until_module_ends,
)

pytestmark = pytest.mark.usefixtures("idle_engines", "one_kind")
NUM_ADAPTERS, RANK = 3, 2
CHOSEN = None, *range(NUM_ADAPTERS)
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


def with_adapters(adapters):
    return random_weights() | {"adapters": adapters}


@until_module_ends
def create_adapted_engine(**options):
    model = dict(model=adapted, head=adapted_head, weights=with_adapters(random_adapters()))
    ENGINES.append(create_engine(**model, num_adapters=NUM_ADAPTERS, widths=(), prefix_cache=True, **options))
    return ENGINES[-1]


@pytest.fixture
def engine():
    """An engine without cached prefixes."""
    engine = create_adapted_engine()
    engine.update_weights(with_adapters(random_adapters()))
    return engine


def requests_with_adapters(count):
    prompts, params = requests(count)
    return prompts, [
        dataclasses.replace(request_params, adapter=CHOSEN[i % 4]) for i, request_params in enumerate(params)
    ]


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
    assert jaxpaged.lora(*(array.astype(jnp.bfloat16) for array in (x, a, b)), ids).dtype == "bfloat16"


def test_wrong_shapes_are_refused():
    x, a, b, ids = jnp.ones((5, 4)), jnp.ones((2, 3, 4)), jnp.ones((2, 3, 7)), jnp.zeros(5, jnp.int32)
    assert jaxpaged.lora(x, a, b, ids).shape == (5, 7)
    for wrong in ((x[0], a, b, ids), (x, a[0], b, ids), (x, a[:1], b, ids), (x, a[:, :2], b, ids), (x, b, b, ids)):
        with pytest.raises(ValueError, match=r"pass x \[tokens, features\], a \[adapters, rank, features\]"):
            jaxpaged.lora(*wrong)
    with pytest.raises(ValueError, match=r"got \[5, 4\], \[2, 3, 4\], \[2, 3, 7\] and \[4\]"):
        jaxpaged.lora(x, a, b, ids[:4])


@pytest.mark.parametrize("left", [BLOCKS, TIGHT], ids=["plenty", "tight"])
def test_tokens_equal_merged_weights_next_to_other_adapters(engine, left):
    prompts, params = requests_with_adapters(16)
    with counting(engine) as counts, fewer_blocks(engine, left):
        outputs = engine.generate(prompts, params)
    assert (counts.num_preempted > 0) == (left == TIGHT)
    for prompt, request_params, output in zip(prompts, params, outputs, strict=True):
        tokens, logprobs = continuation(merged(request_params.adapter), prompt, request_params)
        assert output.outputs[0].token_ids == tokens
        if request_params.logprobs:
            np.testing.assert_allclose(output.outputs[0].logprobs, logprobs, atol=1e-4)


def test_a_batch_invariant_engine_gives_the_same_bits_next_to_other_adapters():
    prompts, params = requests_with_adapters(8)
    params = [dataclasses.replace(request_params, logprobs=True, n=1) for request_params in params]
    exact_engine = create_adapted_engine(batch_invariant=True)
    together = exact_engine.generate(prompts, params)
    for prompt, request_params, output in zip(prompts, params, together, strict=True):
        assert exact_engine.generate([prompt], request_params)[0].outputs == output.outputs
        (score,) = exact_engine.score([prompt], tokens_of([output]), adapter=request_params.adapter)
        assert score.logprobs == output.outputs[0].logprobs


def test_a_prefix_matches_only_its_own_adapter(engine):
    prompt, long = [*range(2 * BLOCK_SIZE + 1)], greedy(30)

    def num_found(chosen, adapters=None):
        params = [dataclasses.replace(greedy(2), adapter=adapter) for adapter in chosen]
        with counting(engine) as counts:
            outputs = engine.generate([prompt] * len(params), params)
        assert tokens_of(outputs) == [continuation(merged(i, adapters), prompt, greedy(2))[0] for i in chosen]
        return counts.num_found

    assert [num_found([adapter]) for adapter in CHOSEN] == [0] * 4
    assert num_found(CHOSEN) == 4 * 2 * BLOCK_SIZE

    # Replaces adapter 1 while a request of each adapter runs.
    other = random_adapters(2)
    new = {
        name: tuple(a.at[1].set(b[1]) for a, b in zip(pair, other[name], strict=True))
        for name, pair in random_adapters().items()
    }
    for adapter in CHOSEN:
        engine.add_request([7] * 9, dataclasses.replace(long, adapter=adapter))
    engine.step()
    engine.update_weights(with_adapters(new), adapters=[1])
    assert [num_found([adapter], new) for adapter in CHOSEN] == [8, 8, 0, 8]
    for adapter, tokens in zip(CHOSEN, tokens_of(finish(engine).values()), strict=True):
        assert adapter == 1 or tokens == continuation(merged(adapter), [7] * 9, long)[0]
    assert num_found(CHOSEN, new) == 4 * 2 * BLOCK_SIZE
    engine.update_weights(with_adapters(new))
    assert [num_found([adapter], new) for adapter in CHOSEN] == [0] * 4
