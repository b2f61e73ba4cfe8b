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


@pytest.fixture
def skyrl_tx():
    """The example, in tx's mesh."""
    pytest.importorskip("skyrl.tx.utils.generator")
    import skyrl_tx

    with jax.set_mesh(skyrl_tx.one_device()):
        yield skyrl_tx


def tx_model(family, num_adapters):
    import transformers
    from flax import nnx
    from skyrl.tx.models import llama3, qwen3
    from skyrl.tx.models.configs import ModelConfig

    from skyrl_tx import SIZES

    config_type, model_type, sizes = {
        "qwen3": (transformers.Qwen3Config, qwen3.Qwen3ForCausalLM, {}),
        "qwen3_moe": (
            transformers.Qwen3MoeConfig,
            qwen3.Qwen3ForCausalLM,
            dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        ),
        "llama3": (transformers.LlamaConfig, llama3.Llama3ForCausalLM, {}),
    }[family]
    options = dict(max_lora_adapters=num_adapters, max_lora_rank=4, shard_attention_heads=True)
    model = model_type(ModelConfig(config_type(**SIZES, **sizes), **options), dtype=jnp.float32, rngs=nnx.Rngs(0))
    nnx.update(model, spread(nnx.state(model)))
    return model


def tx_batch(prompts):
    mask = np.arange(8) < np.array([[len(prompt)] for prompt in prompts])
    return jnp.array([prompt + [0] * (8 - len(prompt)) for prompt in prompts]), jnp.int32(mask)


ENGINE = jaxpaged.EngineOptions(max_num_seqs=4, batch_invariant=True, prefix_cache=True)


@pytest.mark.parametrize(("family", "num_adapters"), [("qwen3", 3), ("qwen3_moe", 3), ("llama3", 0)])
def test_a_generator_on_an_engine_gives_the_greedy_tokens_of_skyrl_tx(skyrl_tx, family, num_adapters):
    from flax import nnx
    from skyrl.tinker.types import SamplingParams

    model = tx_model(family, num_adapters)
    generator = skyrl_tx.EngineGenerator(model, 32, block_size=8, options=ENGINE)
    prompts = [*PROMPTS, [7], *[PROMPTS[0]] * 2]
    batch, most = tx_batch(prompts), [8, 3, 8, 8, 8]
    adapters = jnp.array([0, 1, 2, 1, 2]) if num_adapters else None
    for _ in range(2):
        unstopped = [SamplingParams(temperature=0, max_tokens=n, seed=0) for n in most]
        expected = model.generate(*batch, sampling_params=unstopped, adapter_indices=adapters)
        if num_adapters:  # they differ, or a wrong adapter would not show
            assert len({tuple(expected.generated_ids[i]) for i in (0, 3, 4)}) == 3
        stops = [[], [], [63, expected.generated_ids[2][4]], [], None]
        params = [one.model_copy(update={"stop_tokens": stop}) for one, stop in zip(unstopped, stops, strict=True)]
        options = dict(sampling_params=params, adapter_indices=adapters, prompt_logprobs=True)
        expected, output = model.generate(*batch, **options), generator.generate(*batch, **options)
        assert output.generated_ids == expected.generated_ids
        assert output.stop_reasons == expected.stop_reasons == ["length", "length", "stop", "length", "length"]
        for name in ("logprobs", "prompt_logprobs"):
            for ours, its_own in zip(getattr(output, name), getattr(expected, name), strict=True):
                np.testing.assert_allclose(ours, its_own, rtol=1e-3, atol=1e-3)
        nnx.update(model, spread(nnx.state(model)))
        generator.update_weights(model)


def test_a_generator_on_an_engine_draws_and_refuses_like_skyrl_tx(skyrl_tx):
    import tokenizers
    import transformers
    from flax import nnx
    from skyrl.tinker.types import SamplingParams

    model = tx_model("qwen3", 2)
    generator = skyrl_tx.EngineGenerator(model, 32, block_size=8, options=ENGINE)

    def generate(*params, prompts=None, indices=(0,), **options):
        batch = tx_batch(prompts or [[3, 1]] * len(params))
        adapters = None if indices is None else jnp.array([*indices] * len(params))
        return generator.generate(*batch, sampling_params=params, adapter_indices=adapters, **options)

    greedy = SamplingParams(temperature=0, max_tokens=8, seed=0)
    drawn = [SamplingParams(temperature=2, max_tokens=8, seed=seed) for seed in (1, 1, 2, -1)]
    filtered = [SamplingParams(temperature=2, max_tokens=8, seed=1, **x) for x in (dict(top_k=1), dict(top_p=1e-6))]
    tokens = generate(greedy, *drawn, *filtered).generated_ids
    assert tokens[1] == tokens[2]
    assert len(set(map(tuple, tokens))) == 4
    assert tokens[5] == tokens[6] == tokens[0]

    words = {f"w{i} ": i for i in range(64)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0 "))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    stop = greedy.model_copy(update={"stop_strings": [f"w{tokens[0][3]} "]})
    options = dict(sampling_params=[stop], adapter_indices=jnp.array([0]), tokenizer=tokenizer)
    expected, output = model.generate(*tx_batch([[3, 1]]), **options), generate(stop, tokenizer=tokenizer)
    assert output.generated_ids == expected.generated_ids
    assert output.stop_reasons == expected.stop_reasons == ["stop"]
    assert len(output.logprobs[0]) == len(output.generated_ids[0]) < 8

    padded = generate(greedy, greedy, prompts=[[3, 1], []], prompt_logprobs=True)  # by tx's backend
    assert padded.generated_ids == [tokens[0], []]
    assert [len(row) for row in padded.prompt_logprobs] == [1, 0]

    for match, call in {
        "adapter_indices=None": lambda: generate(greedy, indices=None),
        "tokenizer=None": lambda: generate(stop),
        "max_model_len": lambda: generate(greedy.model_copy(update={"max_tokens": 31})),
        "top_p=0": lambda: generate(greedy.model_copy(update={"top_p": 0.0})),
        "adapter=2": lambda: generate(greedy, indices=(2,)),
        "padding before a token": lambda: generator.generate(
            jnp.array([[0, 3]]), jnp.array([[0, 1]]), sampling_params=[greedy], adapter_indices=jnp.array([0])
        ),
        "one for each prompt": lambda: generate(greedy, prompts=[[3], [1]]),
        "got Linear": lambda: skyrl_tx.EngineGenerator(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), 32),
        "set max_num_seqs": lambda: skyrl_tx.EngineGenerator(model, 32, options=jaxpaged.EngineOptions()),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()


def test_skyrl_txs_backend_trains_and_samples_on_an_engine(skyrl_tx, tmp_path, monkeypatch):
    backend = pytest.importorskip("skyrl.backends.jax")
    import tokenizers
    import transformers
    from skyrl.tinker import types

    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    config = transformers.Qwen3Config(**skyrl_tx.SIZES, dtype="float32", tie_word_embeddings=True)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    options = dict(max_lora_adapters=2, max_lora_rank=4, sample_max_num_sequences=4)
    backend = backend.JaxBackendImpl(str(tmp_path), backend.JaxBackendConfig(**options), process_id=0)
    backend.create_model("trained", types.LoraConfig(rank=4, alpha=8.0, seed=0))
    backend.models["trained"].loaded_checkpoint_id = "in memory"

    prompt = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=PROMPTS[0])])
    lists = ("token_weights", "sampling_logprobs", "advantages", "values", "returns")
    a_pass = types.PreparedModelPassBatch(
        all_model_inputs=[prompt],
        all_targets=[[5] * 8],
        **{f"all_{name}": [[1.0] * 8] for name in lists},
        all_model_ids=["trained"],
        all_loss_fns=["cross_entropy"],
        all_loss_fn_configs=[None],
        request_batch_slices=[("pass", "trained", 0, 1)],
    )
    samples = types.PreparedSampleBatch(  # of the base model and the adapter, in batches of 4, the second padded
        all_model_inputs=[prompt] * 5,
        all_sampling_params=[types.SamplingParams(temperature=0, max_tokens=8, seed=0)] * 5,
        all_model_ids=["", "trained"] * 2 + ["trained"],
        all_checkpoint_ids=["", "in memory"] * 2 + ["in memory"],
        all_checkpoint_paths=[""] * 5,
        all_session_ids=[None] * 5,
        needs_prompt_logprobs=True,
        request_batch_slices=[("samples", "", 0, 5, True, 0)],
    )
    adam = types.AdamParams(learning_rate=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0)
    engine_generate, found = skyrl_tx.engine_generate(32, block_size=8, options=ENGINE), []
    for _ in range(2):
        own = backend.sample(samples)["samples"]
        with monkeypatch.context() as patch:
            patch.setattr(skyrl_tx.Qwen3ForCausalLM, "generate", engine_generate)
            ours = backend.sample(samples)["samples"]
        assert [one.tokens for one in ours.sequences] == [one.tokens for one in own.sequences]
        for one, its_own in zip(ours.sequences, own.sequences, strict=True):
            np.testing.assert_allclose(one.logprobs, its_own.logprobs, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(ours.prompt_logprobs, own.prompt_logprobs, rtol=1e-3, atol=1e-3)
        found.append([one.tokens for one in ours.sequences])
        backend.forward_backward(a_pass)
        backend.optim_step("trained", types.OptimStepInput(adam_params=adam))
    assert found[0][0] == found[0][1] == found[1][0] != found[1][1] == found[1][4]
