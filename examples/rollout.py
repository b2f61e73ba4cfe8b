"""Rollouts for reinforcement learning: n completions of each prompt with logprobs, and weights that change.

    python examples/rollout.py -n 8 --rounds 3 --prompt "Write one sentence about the sea."

The reward is a toy: the share of the letter e in a completion. A completion's advantage is its reward minus the mean
over its prompt's completions, divided by their standard deviation, as in GRPO (Shao et al., 2024,
https://arxiv.org/abs/2402.03300). A learner would follow its gradient; here the weights take a small random step. The
engine is compiled once for all rounds.
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpaged import RequestOutput, SamplingParams
from lib.command_line import compute, model_arguments, positive, read_sampling, run, sampling_arguments, say
from lib.engine_llama import create_engine
from lib.llama import Llama, LlamaConfig
from lib.sampling import Sampling

MOST_SEATS = 64
STEP = 1e-3  # of the weights' own standard deviation


def advantages(rewards: np.ndarray) -> np.ndarray:
    """The advantage of each completion of a prompt, from the rewards of all."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


@jax.jit
def moved(weights: nnx.State, seed: Any) -> nnx.State:
    """The weights after a small random step."""
    leaves, tree = jax.tree.flatten(weights)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noise = (jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True))
    return jax.tree.unflatten(tree, [leaf + STEP * leaf.std() * n for leaf, n in zip(leaves, noise, strict=True)])


def roll_out(
    model: Llama,
    config: LlamaConfig,
    prompts: list[list[int]],
    *,
    num_completions: int,
    num_rounds: int,
    max_new_tokens: int,
    block_size: int,
    sampling: Sampling,
    seed: int = 0,
    eos_ids: tuple[int, ...] = (),
    dtype: str = "float32",
) -> Iterator[list[RequestOutput]]:
    """Yields each round's outputs for all prompts, with the weights of that round."""
    longest = max(map(len, prompts))
    max_length = min(config.context, longest + max_new_tokens)
    engine = create_engine(
        model,
        config,
        num_seats=min(MOST_SEATS, len(prompts) * num_completions),
        max_length=max_length,
        block_size=block_size,
        dtype=dtype,
        num_stop_ids=len(eos_ids),
        prefix_cache=True,  # the completions of a prompt share its blocks, and it is computed once
    )
    params = SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=sampling.top_p,
        stop_token_ids=eos_ids,
        n=num_completions,
        logprobs=True,
    )
    weights = nnx.state(model)
    for i in range(num_rounds):
        each = [
            dataclasses.replace(
                params,
                max_tokens=min(max_new_tokens, max_length - len(prompt)),
                seed=int(np.random.SeedSequence([seed, i, j]).generate_state(1)[0]),
            )
            for j, prompt in enumerate(prompts)
        ]
        yield engine.generate(prompts, each, progress=True)
        weights = moved(weights, jnp.uint32(i))
        engine.update_weights(weights)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], parents=[model_arguments(), sampling_arguments(temperature=1.0)]
    )
    parser.add_argument("-n", "--num-completions", type=positive, default=4, metavar="N", help="of each prompt")
    parser.add_argument("--rounds", type=positive, default=2, metavar="N", help="the weights change between rounds")
    args = parser.parse_args(arguments)
    sampling = read_sampling(args)
    options = dict(num_completions=args.num_completions, num_rounds=args.rounds, sampling=sampling, seed=args.seed)
    request, rounds = compute(args, roll_out, **options)
    begin = time.perf_counter()
    for i, outputs in enumerate(rounds):
        completions = [completion for output in outputs for completion in output.outputs]
        for text, output in zip(request.texts, outputs, strict=True):
            print(f"[round {i}] {text}")
            texts = [request.checkpoint.tokenizer.decode(completion.token_ids).strip() for completion in output.outputs]
            rewards = np.array([text.count("e") / max(len(text), 1) for text in texts])
            for text, completion, advantage in zip(texts, output.outputs, advantages(rewards), strict=True):
                print(f"--> {advantage:+.2f}, logprob {sum(completion.logprobs or ()):.1f}: {text}")
            print()
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        end = time.perf_counter()
        say(f"round {i}: {num_tokens} tokens, {num_tokens / (end - begin):.1f} a second")
        begin = end


if __name__ == "__main__":
    run(main)
