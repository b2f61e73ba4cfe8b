"""Unedited models of other packages give their own greedy tokens and logprobs in an engine.

Skipped if a package is missing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the packages

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [1, 5]]
NUM_TOKENS = 8


@pytest.fixture(autouse=True)
def promotion():
    """Allows promotion: the packages promote dtypes and ranks implicitly."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def spread(weights):
    """Makes weights larger than their initial values, so that mistakes show."""
    leaves, tree = jax.tree.flatten(weights)
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [x + jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype) for x in leaves])


def greedy(logits_of, prompt):
    """Greedy tokens of the model itself, without a cache. `logits_of(tokens)` is [tokens, vocab] for padded tokens."""
    tokens, logprobs = list(prompt), []
    for _ in range(NUM_TOKENS):
        padded = np.ones(16, np.int32)
        padded[: len(tokens)] = tokens
        logits = np.asarray(logits_of(padded)[len(tokens) - 1], np.float64)
        tokens.append(int(logits.argmax()))
        logprobs.append(-np.log(np.exp(logits - logits.max()).sum()))
    return tokens[len(prompt) :], logprobs


def check(apply, weights, head, logits_of):
    params = jaxpaged.SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=True)
    sizes = dict(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32")
    outputs = jaxpaged.generate(apply, weights, PROMPTS, params, head=head, **sizes)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens, logprobs = greedy(logits_of, prompt)
        assert output.outputs[0].token_ids == tokens
        np.testing.assert_allclose(output.outputs[0].logprobs, logprobs, rtol=1e-3, atol=1e-3)


def test_qwen3_of_tunix_in_nnx():
    pytest.importorskip("tunix.models.qwen3.model")
    from flax import nnx

    import tunix_qwen3

    model = tunix_qwen3.small_model()
    nnx.update(model, spread(nnx.state(model)))
    causal, positions = jnp.tril(jnp.ones((1, 16, 16), bool)), jnp.arange(16)[None]
    graph, weights = nnx.split(model)
    own = jax.jit(lambda tokens: nnx.merge(graph, weights)(tokens[None], positions, None, causal)[0][0])
    check(*tunix_qwen3.paged(model), own)


def test_gemma_3_in_linen():
    pytest.importorskip("gemma.gm.nn._transformer")
    import gemma_linen

    model = gemma_linen.small_model()
    weights = spread(model.init(jax.random.key(0), jnp.ones((1, 1), jnp.int32)))
    own = jax.jit(lambda tokens: model.apply(weights, tokens[None]).logits[0])
    apply, head = gemma_linen.paged(model)
    check(apply, weights, head, own)


def test_tunix_learns_with_a_rollout_on_an_engine():
    pytest.importorskip("tunix.rl.grpo.grpo_learner")
    from tunix.rl import common

    import tunix_rollout

    rewards = tunix_rollout.train(60)
    assert np.mean(rewards[:3]) < 0.1
    assert np.mean(rewards[-5:]) > 0.8
    assert tunix_rollout.train(3) == rewards[:3]

    model, letters = tunix_rollout.toy_model(), tunix_rollout.Letters()
    config = tunix_rollout.RolloutConfig(max_tokens_to_generate=8, max_prompt_length=12, return_logprobs=True)
    options = jaxpaged.EngineOptions(max_num_seqs=8, prefix_cache=True)
    rollout = tunix_rollout.EngineRollout(model, letters, config, block_size=4, options=options)
    from flax import nnx

    for change in (0.0, 0.1):  # in place, like a trainer that shares the variables
        nnx.update(model, jax.tree.map(lambda x, change=change: x * (1 + change), nnx.state(model)))
        found = rollout.sampler.engine.stats().num_found
        output = rollout.generate(["abcabcab"] * 3 + ["b"], config)
        assert rollout.sampler.engine.stats().num_found - found == 2 * 8
        tokens = np.zeros((4, 8), np.int32)
        for row, of_one in zip(tokens, output.tokens, strict=True):
            row[: len(of_one)] = of_one
        prompts = jnp.asarray(output.left_padded_prompt_tokens)
        scores = rollout.get_per_token_logps(prompts, jnp.asarray(tokens))
        own = common.compute_per_token_logps(*nnx.split(model), prompts, jnp.asarray(tokens), pad_id=0, eos_id=2)
        for row, its_own, of_one, row_of_tokens in zip(scores, own, output.logprobs, tokens, strict=True):
            np.testing.assert_allclose(row[: len(of_one)], of_one, atol=1e-4)
            until = np.argmax(np.append(row_of_tokens[: len(of_one)], 0) == 0) + 1  # Tunix ignores padding
            np.testing.assert_allclose(its_own[:until][: len(of_one)], of_one[:until], atol=1e-4)
            assert not row[len(of_one) :].any()


def test_sampler_on_an_engine_gives_the_greedy_tokens_of_tunix():
    sampler = pytest.importorskip("tunix.generate.sampler")
    import tunix_rollout

    model, letters = tunix_rollout.toy_model(), tunix_rollout.Letters()
    own = sampler.Sampler(model, letters, sampler.CacheConfig(cache_size=32, num_layers=1, num_kv_heads=2, head_dim=16))
    ours = tunix_rollout.EngineSampler(model, letters, 32, block_size=4, options=jaxpaged.EngineOptions(max_num_seqs=4))
    arguments = ["abcabcab", "b"], 8, 12
    expected, output = own(*arguments), ours(*arguments)
    assert output.text == expected.text
    for row, its_own in zip(output.tokens, expected.tokens, strict=True):
        assert row[row != letters.eos_id()].tolist() == its_own.tolist()  # Tunix's Sampler drops the end token
    np.testing.assert_array_equal(output.padded_prompt_tokens, expected.padded_prompt_tokens)
    with pytest.raises(ValueError, match="beam_size=2"):
        ours(*arguments, beam_size=2)
