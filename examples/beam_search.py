"""Beam search: the continuations of each prompt with the best probability for their length.

    python examples/beam_search.py --width 4 --chat --prompt "Name the largest planet."

Each step extends every beam of a prompt by one token and keeps the `width` best. A beam that ends in eos is complete
and keeps its row; the search ends when all beams are complete. Their score is the summed log probability over
`length ** length_penalty`.

Beams are rows of the allocator, and one `fork` reorders them: a beam may go on in several rows, in none, or stay in its
own. Beams share full blocks; a partly filled last block is copied if two beams would write to it. The whole search is
one `jax.jit`, with prefill, allocator and copies.
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxpaged import AttentionStep, BlockAllocator
from jaxpaged.ops import copy_blocks
from lib.command_line import compute, describe_blocks, model_arguments, positive, read_request, run
from lib.generation import num_entries
from lib.llama import Llama
from lib.llama_config import LlamaConfig
from lib.prefill import Caches, Prompts, pad_prompts, write_prompts
from lib.start import start


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Beams:
    """Beam j of prompt i is row `i * width + j` of the allocator."""

    caches: Caches
    allocator: BlockAllocator
    tokens: jax.Array  # int32 [prompts, width, max_new_tokens]
    num_tokens: jax.Array  # int32 [prompts, width]
    log_probabilities: jax.Array  # f32 [prompts, width], summed over the tokens; -inf: there is no beam here
    complete: jax.Array  # bool [prompts, width], ended in eos or at its limit
    peak_blocks: jax.Array  # int32 [], the most blocks held at one time
    peak_unshared: jax.Array  # int32 [], the most that would have been held without sharing

    @property
    def running(self) -> jax.Array:
        """bool [prompts, width]"""
        return ~self.complete & jnp.isfinite(self.log_probabilities)


def choose(beams: Beams, i: jax.Array, logits: jax.Array, limits: jax.Array, eos_ids: tuple[int, ...]) -> Beams:
    """Puts the best continuations in the beams that are not complete; logits are f32 [prompts, width, vocab_size]."""
    num_prompts, width, vocab_size = logits.shape
    own = jnp.arange(width, dtype=jnp.int32)[None]

    # 1. The best go, best first, to the beams that are not complete.
    so_far = jnp.where(beams.running, beams.log_probabilities, -jnp.inf)[..., None]
    candidates = (so_far + jax.nn.log_softmax(logits, axis=-1)).reshape(num_prompts, -1)
    best, chosen = lax.top_k(candidates, width)
    rank = jnp.cumsum(~beams.complete, axis=1, dtype=jnp.int32) - 1
    best, chosen = (jnp.take_along_axis(values, jnp.maximum(rank, 0), axis=1) for values in (best, chosen))
    continued = ~beams.complete & jnp.isfinite(best)
    parent = jnp.where(continued, chosen // vocab_size, own)
    token = chosen % vocab_size

    # 2. A beam copies its parent's tokens, ...
    tokens = jnp.take_along_axis(beams.tokens, parent[..., None], axis=1)
    is_new = continued[..., None] & (jnp.arange(tokens.shape[-1]) == i)[None, None]
    ended = jnp.isin(token, jnp.asarray(eos_ids, jnp.int32)) | (i + 1 >= limits[:, None])
    beams = dataclasses.replace(
        beams,
        tokens=jnp.where(is_new, token[..., None], tokens),
        num_tokens=jnp.where(continued, i + 1, beams.num_tokens),
        log_probabilities=jnp.where(beams.complete, beams.log_probabilities, best),
        complete=beams.complete | (continued & ended),
    )

    # 3. ... and its blocks, if it goes on.
    row_of_first = jnp.arange(num_prompts, dtype=jnp.int32)[:, None] * width
    parents = jnp.where(beams.running, row_of_first + parent, -1).ravel()
    allocator, copies, ok = beams.allocator.fork(parents, replace=True)
    caches = tuple(copy_blocks(cache, *copies) for cache in beams.caches)
    beams = dataclasses.replace(beams, caches=caches, allocator=allocator)
    return drop(beams, ~ok)


def drop(beams: Beams, refused: jax.Array) -> Beams:
    """Frees the rows that hold no running beam; a beam that found no block, bool [prompts * width], is given up."""
    lost = beams.running & refused.reshape(beams.complete.shape)
    beams = dataclasses.replace(beams, log_probabilities=jnp.where(lost, -jnp.inf, beams.log_probabilities))
    return dataclasses.replace(beams, allocator=beams.allocator.free(~beams.running.ravel()))


@functools.partial(jax.jit, static_argnames=("graph", "eos_ids"), donate_argnames="beams")
def search(
    graph: nnx.GraphDef,
    weights: nnx.State,
    beams: Beams,  # empty
    prompts: Prompts,
    limits: jax.Array,  # int32 [prompts], how many tokens a continuation may have
    eos_ids: tuple[int, ...],
) -> Beams:
    model = nnx.merge(graph, weights)
    num_prompts, width, max_new_tokens = beams.tokens.shape

    def one_step(carry: tuple[jax.Array, Beams]) -> tuple[jax.Array, Beams]:
        i, beams = carry
        allocator, slots, ok = beams.allocator.append(beams.running.ravel())
        step = AttentionStep.create(allocator, slots)
        caches, x = model(beams.tokens[:, :, i - 1].ravel(), beams.caches, step)
        beams = dataclasses.replace(
            beams,
            caches=caches,
            allocator=allocator,
            peak_blocks=jnp.maximum(beams.peak_blocks, allocator.num_held),
            peak_unshared=jnp.maximum(beams.peak_unshared, num_entries(allocator)),
        )
        logits = model.logits(x).reshape(num_prompts, width, -1)
        return i + 1, choose(drop(beams, ~ok), i, logits, limits, eos_ids)

    firsts = jnp.arange(num_prompts, dtype=jnp.int32) * width
    caches, allocator, logits, ok = write_prompts(model, beams.caches, beams.allocator, prompts, seqs=firsts)
    alone = beams.log_probabilities.at[:, 0].set(jnp.where(ok, 0.0, -jnp.inf))  # each prompt begins with one beam
    beams = dataclasses.replace(beams, caches=caches, allocator=allocator, log_probabilities=alone)
    logits = jnp.broadcast_to(logits[:, None], (num_prompts, width, logits.shape[-1]))
    beams = choose(beams, jnp.int32(0), logits, limits, eos_ids)
    return lax.while_loop(lambda carry: carry[1].running.any(), one_step, (jnp.int32(1), beams))[1]


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    tokens: list[int]
    score: float  # summed log probability / length ** length_penalty


def beam_search(
    model: Llama,
    config: LlamaConfig,
    prompts: list[list[int]],
    *,
    width: int,
    max_new_tokens: int,
    block_size: int,
    length_penalty: float = 1.0,
    eos_ids: tuple[int, ...] = (),
    dtype: str = "float32",
) -> tuple[list[list[Hypothesis]], Beams]:
    """Up to `width` hypotheses a prompt, the best first, and the final state.

    Raises `PoolError` if the prompts do not fit."""
    empty = start(
        config,
        [prompt for prompt in prompts for _ in range(width)],
        max_new_tokens=max_new_tokens,
        block_size=block_size,
        num_blocks=None,
        dtype=dtype,
        seed=0,
        # The beams of a prompt share its full blocks; a fork allocates a block for each before it frees the old ones.
        num_saved_blocks=sum((width - 1) * (len(prompt) // block_size) - width for prompt in prompts),
    )
    shape = len(prompts), width
    beams = Beams(
        caches=empty.caches,
        allocator=empty.allocator,
        tokens=jnp.zeros((*shape, empty.tokens.shape[1]), jnp.int32),
        num_tokens=jnp.zeros(shape, jnp.int32),
        log_probabilities=jnp.full(shape, -jnp.inf, jnp.float32),
        complete=jnp.zeros(shape, bool),
        peak_blocks=empty.peak_blocks,
        peak_unshared=empty.peak_unshared,
    )
    beams = search(*nnx.split(model), beams, pad_prompts(prompts), empty.limits[::width], eos_ids)
    scores = np.asarray(beams.log_probabilities) / np.maximum(beams.num_tokens, 1) ** length_penalty
    tokens, counts = np.asarray(beams.tokens), np.asarray(beams.num_tokens)
    found = [
        [Hypothesis(tokens[i, j, : counts[i, j]].tolist(), float(scores[i, j])) for j in np.argsort(-scores[i])]
        for i in range(len(prompts))
    ]
    return [[one for one in hypotheses if one.score > -np.inf] for hypotheses in found], beams


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], parents=[model_arguments()])
    parser.add_argument("--width", type=positive, default=4, metavar="N", help="beams of each prompt")
    parser.add_argument("--length-penalty", type=float, default=1.0, metavar="P", help="0: none; default: %(default)s")
    args = parser.parse_args(arguments)
    request = read_request(args)
    options = dict(width=args.width, length_penalty=args.length_penalty)
    hypotheses, beams = compute(args, request, beam_search, **options)
    for i, (text, found) in enumerate(zip(request.texts, hypotheses, strict=True)):
        print(f"[{i}] {text}")
        for one in found:
            print(f"--> {one.score:7.3f}  {request.checkpoint.tokenizer.decode(one.tokens).strip()}")
        print()
    print(f"blocks:  {describe_blocks(beams.peak_blocks, beams.peak_unshared, args.block_size)}")


if __name__ == "__main__":
    run(main)
