"""Rollouts for a learner: prompts with several completions each, in two rounds, with new weights in between.

    python -m benchmarks.engine.rollout               # Llama-3-8B's shape; about two minutes on an H100
    python -m benchmarks.engine.rollout --model toy   # on a CPU, to try the script out

Random bfloat16 weights, temperature 1, no stop tokens, a prefix cache. `Engine.rollout` returns tokens and logprobs as
arrays on the device. Each round checks that every completion has the right number of tokens, a logprob for each, and
the weights of its round. `update` is the time from `update_weights` to the first token of a request.
`benchmarks.engine.vllm_peer --rollout` runs the same rounds.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checks import require
from benchmarks.engine.model import CONFIGS, random_weights
from benchmarks.engine.workload import SIZES, Request, create_engine, rollout_work
from benchmarks.harness import add_output, add_xla, open_store
from jaxpaged import Engine, SamplingParams

PROMPTS, COMPLETIONS = 64, 8


def run_round(engine: Engine, work: Sequence[Request], *, version: int) -> dict[str, Any]:
    params = [
        SamplingParams(max_tokens=new, n=COMPLETIONS, seed=1000 * version + i, logprobs=True)
        for i, (_, new) in enumerate(work)
    ]
    before, begin = engine.stats(), time.perf_counter()
    rollout = jax.block_until_ready(engine.rollout([prompt for prompt, _ in work], params))
    seconds, after = time.perf_counter() - begin, engine.stats()
    wanted = np.repeat([new for _, new in work], COMPLETIONS)
    mask = np.asarray(rollout.mask)
    require((mask.sum(axis=1) == wanted).all(), "a completion has not the tokens that it should have")
    logprobs = np.asarray(rollout.logprobs)[mask]
    require(np.isfinite(logprobs).all() and (logprobs < 0).any(), "these are no logprobs")
    require((np.asarray(rollout.weight_versions)[mask] == version).all(), "a token was made by other weights")
    return {
        "completions": len(wanted),
        "tokens": int(wanted.sum()),
        "seconds": seconds,
        "tokens_per_s": int(wanted.sum()) / seconds,
        "steps": after.num_steps - before.num_steps,
        "found": after.num_found - before.num_found,
        "preempted": after.num_preempted - before.num_preempted,
    }


def time_update(engine: Engine, weights: Any, prompt: list[int]) -> dict[str, Any]:
    """`weights` are ready before the clock starts."""
    jax.block_until_ready(weights)
    begin = time.perf_counter()
    engine.update_weights(weights)
    updated = time.perf_counter() - begin
    [output] = engine.generate([prompt], SamplingParams(max_tokens=1))
    require(output.outputs[0].weight_versions == [1], "the first token after the update is of other weights")
    return {"update_s": updated, "to_first_token_s": time.perf_counter() - begin}


def line(name: str, point: dict[str, Any]) -> str:
    return f"{name:<8} " + ", ".join(f"{key} {value:.5g}" for key, value in point.items())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=tuple(CONFIGS))
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    add_xla(parser)
    add_output(parser)
    options = parser.parse_args(arguments)
    options.toy = options.model == "toy"
    store = open_store(f"rollout_{options.model}", options, prompts=options.prompts, completions=COMPLETIONS)
    weights, begin = random_weights(CONFIGS[options.model]), time.perf_counter()
    engine = create_engine(options.model, weights, prefix_cache=True, compiler_options=options.xla)
    print(
        f"compiled in {time.perf_counter() - begin:.0f} s, {engine.stats().max_num_seqs} requests at once", flush=True
    )
    scaled = jax.jit(lambda weights: jax.tree.map(lambda x: x * jnp.asarray(1.01, x.dtype), weights))
    longest = SIZES[options.model].longest
    engine.rollout([[1, 2, 3]], SamplingParams(max_tokens=4, n=2))

    def add(name: str, point: dict[str, Any]) -> None:
        store.add(name, point)
        print(line(name, point), flush=True)

    new_weights = scaled(weights)
    first, second = (rollout_work(options.prompts, longest, seed=version) for version in range(2))
    add("round 1", run_round(engine, first, version=0))
    add("update", time_update(engine, new_weights, first[0][0]))
    add("round 2", run_round(engine, second, version=1))


if __name__ == "__main__":
    main()
