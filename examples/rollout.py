"""Reinforcement learning with a `jaxpaged.Engine`: GRPO on a toy task, on a CPU, without a checkpoint.

    python examples/rollout.py
    python examples/rollout.py --rounds 20 --seed 1
    python examples/rollout.py --num-speculative-tokens 2

A prompt repeats one letter eight times. The reward is the fraction of a completion that is the same letter. Each round
samples several completions per prompt; the engine computes the prompt once. As in GRPO (Shao et al., 2024,
https://arxiv.org/abs/2402.03300), the advantage of a completion is its reward, normalised over the completions of the
same prompt. The learner then makes one Adam step, and the engine gets the new weights. Both run the same `model` and
`head`, the engine with paged and the learner with dense attention.

With --num-speculative-tokens, the engine drafts tokens of a completion from its own text and from other completions of
the same prompt. The sampled tokens stay the same.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged import Engine, EngineOptions, KVCache, Rollout, SamplingParams, dense_step

LETTERS, FEATURES, HEADS, HEAD_DIM = 16, 64, 4, 16  # the last letter ends every prompt
PROMPT, NEW, PROMPTS, COMPLETIONS = 9, 8, 16, 8
LEARNING_RATE, CLIP = 3e-3, 0.2


def first_weights(seed: int) -> dict[str, jax.Array]:
    shapes = {
        "letters": (LETTERS, FEATURES),
        "positions": (PROMPT + NEW, FEATURES),
        "qkv": (FEATURES, 3 * HEADS * HEAD_DIM),
        "out": (HEADS * HEAD_DIM, FEATURES),
        "head": (FEATURES, LETTERS),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: jax.random.normal(key, shape) / FEATURES**0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def model(weights: Any, tokens: jax.Array, positions: jax.Array, cache: Any, step: Any) -> tuple[Any, jax.Array]:
    def normalise(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)

    x = weights["letters"][tokens] + weights["positions"][positions]
    qkv = (normalise(x) @ weights["qkv"]).reshape(len(tokens), 3, HEADS, HEAD_DIM)
    cache, out = step.attend(qkv[:, 0], qkv[:, 1], qkv[:, 2], cache)
    return cache, normalise(x + out.reshape(len(tokens), -1) @ weights["out"])


def head(weights: Any, x: jax.Array) -> jax.Array:
    return x @ weights["head"]


def logprobs_of(weights: Any, texts: jax.Array) -> jax.Array:
    """Log probability of each token except the first, float32 `[texts, length - 1]`."""
    step = dense_step(texts.shape[1])
    logits = head(weights, jax.vmap(lambda text: model(weights, text, step.positions, None, step)[1])(texts))
    return jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), texts[:, 1:, None], axis=2)[..., 0]


def loss(weights: Any, prompts: jax.Array, rollout: Rollout, advantages: jax.Array) -> jax.Array:
    texts = jnp.concatenate([jnp.repeat(prompts, COMPLETIONS, axis=0), rollout.tokens], axis=1)
    ratio = jnp.exp(logprobs_of(weights, texts)[:, PROMPT - 1 :] - rollout.logprobs)
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
    return -jnp.where(rollout.mask, gain, 0).sum() / rollout.mask.sum(dtype=jnp.float32)


@jax.jit
def learn(learner: Any, prompts: jax.Array, rollout: Rollout) -> tuple[Any, jax.Array]:
    """Makes one Adam step. Returns the new learner and the mean reward."""
    weights, mean, square, count = learner
    rewards = (rollout.tokens == jnp.repeat(prompts[:, :1], COMPLETIONS, axis=0)).mean(axis=1)
    groups = rewards.reshape(-1, COMPLETIONS)
    centred = groups - groups.mean(axis=1, keepdims=True)
    advantages = (centred / (groups.std(axis=1, keepdims=True) + 1e-4)).reshape(-1, 1)
    gradient = jax.grad(loss)(weights, prompts, rollout, advantages)
    count += 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, gradient)
    rate = LEARNING_RATE * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
    weights = jax.tree.map(lambda w, m, s: w - rate * m / (jnp.sqrt(s) + 1e-8), weights, mean, square)
    return (weights, mean, square, count), rewards.mean()


def create_engine(weights: Any, num_drafts: int = 0) -> Engine:
    completions, block_size = PROMPTS * COMPLETIONS, 4
    cache = KVCache.create(
        num_blocks=1 + completions * -(-(PROMPT + NEW) // block_size),
        block_size=block_size,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        dtype=jnp.float32,
    )
    options = EngineOptions(
        vocab_size=LETTERS,
        max_num_seqs=completions,
        max_model_len=PROMPT + NEW,
        chunk_tokens=PROMPTS * PROMPT,
        widths=(),
        prefix_cache=True,
        steps_per_slice=NEW + 2,
        num_speculative_tokens=num_drafts,
        # Every step then has the width of the widest one, with room for drafts of every completion.
        batch_invariant=num_drafts > 0,
    )
    return Engine(model, weights, cache, head=head, options=options)


def train(num_rounds: int, seed: int, num_drafts: int = 0) -> Iterator[tuple[float, Rollout]]:
    """Trains. Yields the mean reward and the rollout of each round."""
    rng = np.random.default_rng(seed)
    weights = first_weights(seed)
    zeros = jax.tree.map(jnp.zeros_like, weights)
    learner = (weights, zeros, zeros, jnp.zeros(()))
    engine = create_engine(weights, num_drafts)
    for _ in range(num_rounds):
        said = rng.integers(0, LETTERS - 1, (PROMPTS, 1))
        prompts = np.concatenate([said.repeat(PROMPT - 1, axis=1), np.full_like(said, LETTERS - 1)], axis=1)
        params = [SamplingParams(max_tokens=NEW, n=COMPLETIONS, seed=int(rng.integers(2**32))) for _ in range(PROMPTS)]
        rollout = engine.rollout(prompts.tolist(), params)
        learner, reward = learn(learner, jnp.asarray(prompts, jnp.int32), rollout)
        engine.update_weights(learner[0])
        yield float(reward), rollout


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        default=0,
        help="maximum tokens per completion to draft in a step",
    )
    args = parser.parse_args(arguments)
    begin = time.perf_counter()
    for i, (reward, _) in enumerate(train(args.rounds, args.seed, args.num_speculative_tokens)):
        if i % 10 == 0 or i == args.rounds - 1:
            print(f"round {i}: mean reward {reward:.3f}")
    print(f"{time.perf_counter() - begin:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
