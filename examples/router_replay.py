"""Router replay with a `jaxpaged.Engine`: a learner's forward pass uses the experts that the sampler used.

    python examples/router_replay.py
    python examples/router_replay.py --dtype float32

Sampler and learner round differently, so the routers of a mixture of experts choose differently now and then, and a
token with other experts gets another log probability. The engine returns the experts of each prompt token and each new
token (`EngineOptions.prompt_aux`); the learner's forward pass uses them instead of its own choice. The router is still
computed, and trained, because it weights the experts.

The model is random and tiny. The program prints the difference of the logprobs of sampler and learner, with and without
replay, and how often their routers disagree.
"""

import argparse
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxpaged
from lib.engine_llama import create_engine
from lib.llama import Llama
from lib.llama_config import Clipped, LlamaConfig
from lib.routed_experts import keep_experts, kept_experts, replay

PROMPT, NEW, PROMPTS, COMPLETIONS = 32, 64, 8, 4
VOCAB, FEATURES, HIDDEN, LAYERS, HEADS, HEAD_DIM, EXPERTS, CHOSEN = 512, 128, 64, 4, 4, 32, 32, 4
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    context=PROMPT + NEW,
    features=FEATURES,
    hidden_features=HIDDEN,
    num_layers=LAYERS,
    num_heads=HEADS,
    num_kv_heads=HEADS // 2,
    head_dim=HEAD_DIM,
    norm_epsilon=1e-5,
    rotary_frequencies=tuple(jaxpaged.rotary_frequencies(HEAD_DIM)),
    num_experts=EXPERTS,
    experts_per_token=CHOSEN,
    clipped=Clipped(alpha=1.702, limit=7.0),
)


class Difference(NamedTuple):
    """The difference between sampler and learner.

    Attributes:
        mean: mean absolute difference of the logprobs of new tokens, in nats.
        largest: largest absolute difference.
        rerouted: fraction of the choices, one for each layer and token, in which an expert differs.
    """

    mean: float
    largest: float
    rerouted: float


def logprobs_of(
    graph: nnx.GraphDef[Llama],
    weights: nnx.State,
    caches: Sequence[Any],  # None for each layer; latent attention needs an empty KVCache
    text: jax.Array,  # int32 [tokens]
    routed_experts: jax.Array | None = None,  # [tokens - 1, layers, k]; None: the routers choose
) -> tuple[jax.Array, jax.Array]:
    """A learner's forward pass, with dense attention: the logprobs of text[1:], and the experts of text[:-1]."""
    model = nnx.merge(graph, weights)
    keep_experts(model.layers)
    if routed_experts is not None:
        replay(model.layers, routed_experts)
    step = jaxpaged.dense_step(len(text) - 1)
    _, x = model(text[:-1], caches, step)  # type: ignore[arg-type]
    logprobs = jax.nn.log_softmax(model.logits(x))
    return jnp.take_along_axis(logprobs, text[1:, None], axis=1)[:, 0], kept_experts(model.layers)


def sample(model: Llama, dtype: str, seed: int) -> tuple[jax.Array, jaxpaged.Rollout]:
    """Random prompts, int32 `[completions, PROMPT]`, and a rollout with the experts of all tokens."""
    options = jaxpaged.EngineOptions(
        max_num_seqs=PROMPTS * COMPLETIONS,
        max_model_len=PROMPT + NEW,
        chunk_tokens=64,
        widths=(),
        prefix_cache=True,
        prompt_aux=True,
    )
    engine = create_engine(model, CONFIG, options, block_size=16, dtype=dtype, returns_experts=True)
    prompts = np.random.default_rng(seed).integers(0, VOCAB, (PROMPTS, PROMPT))
    params = [jaxpaged.SamplingParams(max_tokens=NEW, n=COMPLETIONS, seed=seed + i) for i in range(PROMPTS)]
    rollout = engine.rollout(prompts.tolist(), params)
    return jnp.asarray(prompts.repeat(COMPLETIONS, axis=0), jnp.int32), rollout


def compare(dtype: str, seed: int) -> tuple[Difference, Difference]:
    """The differences without and with replay."""
    model = Llama(CONFIG, dtype=dtype, rngs=nnx.Rngs(seed))
    prompts, rollout = sample(model, dtype, seed)
    graph, weights = nnx.split(model)
    texts = jnp.concatenate([prompts, rollout.tokens], axis=1)
    experts = jnp.concatenate([rollout.prompt_aux, rollout.aux], axis=1)  # all tokens except the last
    learn = jax.jit(jax.vmap(functools.partial(logprobs_of, graph, weights, [None] * CONFIG.num_layers)))

    def difference(logprobs: jax.Array, chosen: jax.Array) -> Difference:
        distance = jnp.abs(logprobs[:, PROMPT - 1 :] - rollout.logprobs)
        differ = jnp.sort(chosen, axis=-1) != jnp.sort(experts, axis=-1)
        return Difference(float(distance.mean()), float(distance.max()), float(differ.any(axis=-1).mean()))

    return difference(*learn(texts)), difference(*learn(texts, experts))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    for name, found in zip(("without replay", "with replay"), compare(args.dtype, args.seed), strict=True):
        print(f"{name}: mean {found.mean:.2e} nats, largest {found.largest:.2e}, rerouted {found.rerouted:.2%}")


if __name__ == "__main__":
    main()
