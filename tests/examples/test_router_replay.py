"""An engine returns the experts that the model's routers chose, and a forward pass uses the ones it is given."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpaged
import router_replay
from lib.checkpoint import load_model, read_checkpoint
from lib.engine_llama import create_engine
from lib.routed_experts import keep_experts
from tests.examples.tiny_families import EXPERTS, PROMPT, ROUTED, write_family

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_kind")]


@pytest.mark.parametrize(("family", "num_layers", "num_experts"), [("gpt_oss", 2, EXPERTS), ("deepseek_v3", 1, ROUTED)])
def test_an_engine_returns_the_experts_of_each_token(family, num_layers, num_experts, tmp_path):
    write_family(tmp_path, family)
    checkpoint = read_checkpoint(tmp_path)
    model = load_model(checkpoint, "float32")
    options = jaxpaged.EngineOptions(
        max_num_seqs=2, max_model_len=20, chunk_tokens=8, widths=(), prefix_cache=True, prompt_aux=True
    )
    engine = create_engine(model, checkpoint.config, options, block_size=4, dtype="float32", returns_experts=True)
    params = jaxpaged.SamplingParams(max_tokens=8, temperature=0.0, logprobs=True, n=2)
    completions = engine.generate([PROMPT], params)[0].outputs
    graph, weights = nnx.split(model)
    cache = jaxpaged.KVCache.create(num_blocks=2, block_size=4, **checkpoint.config.cache_sizes, dtype="float32")
    caches = [cache if checkpoint.config.latent else None] * len(model.layers)
    logprobs_of = jax.jit(functools.partial(router_replay.logprobs_of, graph, weights, caches))
    for completion in completions:
        text = jnp.asarray(PROMPT + completion.token_ids, jnp.int32)
        found = np.concatenate([completion.prompt_aux, completion.aux])
        assert (found.shape, found.dtype) == ((len(text) - 1, num_layers, 2), np.uint8)
        logprobs, chosen = logprobs_of(text)
        assert np.sort(found).tolist() == np.sort(chosen).tolist()
        np.testing.assert_allclose(completion.logprobs, logprobs[len(PROMPT) - 1 :], atol=1e-4)

        same, used = logprobs_of(text, jnp.asarray(found))
        assert used.tolist() == found.tolist()
        np.testing.assert_allclose(same, logprobs, atol=1e-5)
        wrong = (found + 3) % num_experts
        others, used = logprobs_of(text, jnp.asarray(wrong))
        assert used.tolist() == wrong.tolist()
        assert not np.allclose(others, logprobs, atol=1e-2)


def test_a_learner_with_the_samplers_experts_is_closer_to_it(monkeypatch, capsys):
    for name, value in dict(NEW=16, PROMPTS=2).items():
        monkeypatch.setattr(router_replay, name, value)
    monkeypatch.setattr(router_replay, "CONFIG", dataclasses.replace(router_replay.CONFIG, num_layers=2))
    without, replayed = router_replay.compare("bfloat16", seed=0)
    assert without.rerouted > replayed.rerouted == 0
    assert replayed.mean < 0.8 * without.mean
    assert replayed.largest < without.largest

    monkeypatch.setattr(router_replay, "compare", lambda dtype, seed: (without, replayed))
    router_replay.main(["--seed=3"])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"without replay: mean {without.mean:.2e}")
    assert second.endswith("rerouted 0.00%")


def test_the_router_of_replayed_experts_is_trained():
    model = router_replay.Llama(dataclasses.replace(router_replay.CONFIG, num_layers=1), rngs=nnx.Rngs(0))
    graph, weights = nnx.split(model)
    text = jnp.arange(6, dtype=jnp.int32)
    experts = jnp.full((5, 1, 1), 3, jnp.uint8) + jnp.arange(4, dtype=jnp.uint8)[None, None]

    def loss(weights):
        return -router_replay.logprobs_of(graph, weights, [None], text, experts)[0].mean()

    router = jax.grad(loss)(weights)["layers"][0]["mlp"]["router"]["weight"][...]
    is_used = np.abs(router).sum(axis=1) > 0
    assert np.flatnonzero(is_used).tolist() == [3, 4, 5, 6]


def test_a_model_without_routers_is_refused():
    with pytest.raises(ValueError, match="no layer of this model has a router"):
        keep_experts([])
