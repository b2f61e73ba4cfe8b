"""Parallel sampling: several completions per prompt, which share the prompt's keys and values.

    python examples/parallel_sampling.py --num-completions 4 --prompt "The old lighthouse keeper opened the door and"

Everything runs in one `jax.jit`. Each prompt is prefilled once, into the row of its first completion. A `fork` copies
that row to the other completions, and `copy_blocks` gives each its own copy of a partly filled last block. The decode
loop then samples all completions. They share the prompt's full blocks until the last of them ends.
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.ops import copy_blocks
from lib.command_line import (
    compute,
    describe_blocks,
    model_arguments,
    positive,
    read_request,
    read_sampling,
    run,
    sampling_arguments,
)
from lib.generation import Generation, accept, decode, generated
from lib.llama import Llama
from lib.llama_config import LlamaConfig
from lib.prefill import Prompts, pad_prompts, write_prompts
from lib.sampling import Sampling
from lib.start import start


@functools.partial(jax.jit, static_argnames=("graph", "eos_ids", "sampling"), donate_argnames="state")
def complete(
    graph: nnx.GraphDef,
    weights: nnx.State,
    state: Generation,  # empty, one row per completion; the rows of a prompt are adjacent
    prompts: Prompts,
    eos_ids: tuple[int, ...],
    sampling: Sampling,
) -> tuple[Generation, jax.Array]:
    """Generates all completions. Returns the final state and the number of shared blocks after the fork, int32 []."""
    model = nnx.merge(graph, weights)
    num_seqs, num_prompts = state.running.shape[0], prompts.lengths.shape[0]
    num_completions = num_seqs // num_prompts
    prompt_of = jnp.arange(num_seqs, dtype=jnp.int32) // num_completions
    firsts = jnp.arange(num_prompts, dtype=jnp.int32) * num_completions

    caches, allocator, logits, ok = write_prompts(model, state.caches, state.allocator, prompts, seqs=firsts)
    allocator, copies, forked = allocator.fork(firsts[prompt_of])  # the first completion is its own parent
    caches = tuple(copy_blocks(cache, *copies) for cache in caches)
    num_shared = allocator.num_shared

    ok = ok[prompt_of] & forked
    state = dataclasses.replace(state, caches=caches, allocator=allocator, running=ok, starved=~ok)
    state = accept(state, ok, logits[prompt_of], eos_ids, sampling)
    state = decode(graph, weights, state, state.limits.max(), eos_ids, sampling, share_reads=True)
    return state, num_shared


def sample_in_parallel(
    model: Llama,
    config: LlamaConfig,
    prompts: list[list[int]],
    *,
    num_completions: int,
    max_new_tokens: int,
    block_size: int,
    sampling: Sampling,
    seed: int = 0,
    eos_ids: tuple[int, ...] = (),
    dtype: str = "float32",
) -> tuple[Generation, int]:
    """Returns the final state, `num_completions` rows per prompt, and the number of shared blocks after the fork.

    Raises `PoolError` if the prompts do not fit into the pool."""
    state = start(
        config,
        [prompt for prompt in prompts for _ in range(num_completions)],  # each completion gets its own random key
        max_new_tokens=max_new_tokens,
        block_size=block_size,
        num_blocks=None,
        dtype=dtype,
        seed=seed,
        num_saved_blocks=sum((num_completions - 1) * (len(prompt) // block_size) for prompt in prompts),
    )
    state, num_shared = complete(*nnx.split(model), state, pad_prompts(prompts), eos_ids, sampling)
    return state, int(num_shared)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], parents=[model_arguments(), sampling_arguments(temperature=0.8)]
    )
    parser.add_argument("-n", "--num-completions", type=positive, default=4, metavar="N", help="completions per prompt")
    args = parser.parse_args(arguments)
    request = read_request(args)
    sampling = read_sampling(args, request.checkpoint)
    state, num_shared = compute(
        args, request, sample_in_parallel, num_completions=args.num_completions, sampling=sampling, seed=args.seed
    )
    completions = iter(generated(state))
    for i, text in enumerate(request.texts):
        print(f"[{i}] {text}")
        for _ in range(args.num_completions):
            print(f"--> {request.checkpoint.tokenizer.decode(next(completions)).strip()}")
        print()
    blocks = describe_blocks(state.peak_blocks, state.peak_unshared, args.block_size)
    print(f"blocks:  {num_shared} shared after the fork; {blocks}")


if __name__ == "__main__":
    run(main)
