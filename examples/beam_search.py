"""Beam search over a paged cache: finds the most probable completions of each prompt, inside one `jax.jit`.

    python examples/beam_search.py --width 4 --chat --prompt "Name the largest planet."

Each step extends every beam of a prompt by one token and keeps the `width` best. A beam that ends in an end-of-text
token is complete and keeps its row. The search ends when all beams are complete, and ranks them by summed log
probability divided by `length ** length_penalty`.

Each beam is a row of the allocator. One `fork` per step reorders them: a beam may continue in several rows, in none, or
in its own. Beams share full blocks, and a partly filled last block is copied only if two beams would write to it.
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxpaged import AttentionStep
from jaxpaged.ops import copy_blocks
from lib.command_line import compute, describe_blocks, model_arguments, positive, read_request, run
from lib.generation import Generation, generated, retire
from lib.llama import Llama
from lib.llama_config import LlamaConfig
from lib.prefill import Prompts, pad_prompts, write_prompts
from lib.start import start

# A `Generation`, and the summed log probability of each beam, f32 [prompts, width]; -inf: the row has no beam. Beam j
# of prompt i is row `i * width + j`. A beam that is not running is complete: it ended in eos or at its limit.
Beams = tuple[Generation, jax.Array]


def choose(beams: Beams, i: jax.Array, logits: jax.Array, eos_ids: tuple[int, ...]) -> Beams:
    """Replaces the incomplete beams with their best continuations. `logits` is f32 [prompts, width, vocab_size]."""
    state, log_probabilities = beams
    num_prompts, width, vocab_size = logits.shape
    own = jnp.arange(width, dtype=jnp.int32)[None]
    running, num_tokens, limits, tokens = (
        array.reshape(num_prompts, width, *array.shape[1:])
        for array in (state.running, state.num_tokens, state.limits, state.tokens)
    )
    complete = ~running & jnp.isfinite(log_probabilities)

    # 1. The best candidates, in order, go to the rows without a complete beam.
    so_far = jnp.where(running, log_probabilities, -jnp.inf)[..., None]
    candidates = (so_far + jax.nn.log_softmax(logits, axis=-1)).reshape(num_prompts, -1)
    best, chosen = lax.top_k(candidates, width)
    rank = jnp.cumsum(~complete, axis=1, dtype=jnp.int32) - 1
    best, chosen = (jnp.take_along_axis(values, jnp.maximum(rank, 0), axis=1) for values in (best, chosen))
    continued = ~complete & jnp.isfinite(best)
    parent = jnp.where(continued, chosen // vocab_size, own)
    token = chosen % vocab_size

    # 2. Each beam copies its parent's tokens.
    tokens = jnp.take_along_axis(tokens, parent[..., None], axis=1)
    is_new = continued[..., None] & (jnp.arange(tokens.shape[-1]) == i)[None, None]
    ended = jnp.isin(token, jnp.asarray(eos_ids, jnp.int32)) | (i + 1 >= limits)
    running = (continued & ~ended).ravel()

    # 3. Running beams share their parent's blocks.
    row_of_first = jnp.arange(num_prompts, dtype=jnp.int32)[:, None] * width
    parents = jnp.where(running, (row_of_first + parent).ravel(), -1)
    allocator, copies, ok = state.allocator.fork(parents, replace=True)
    state = dataclasses.replace(
        state,
        caches=tuple(copy_blocks(cache, *copies) for cache in state.caches),
        allocator=allocator,
        tokens=jnp.where(is_new, token[..., None], tokens).reshape(state.tokens.shape),
        num_tokens=jnp.where(continued, i + 1, num_tokens).ravel(),
        running=running,
    )
    return drop((state, jnp.where(complete, log_probabilities, best)), ~ok)


def drop(beams: Beams, refused: jax.Array) -> Beams:
    """Drops refused beams, bool [prompts * width], which got no block, and frees all rows without a running beam."""
    state, log_probabilities = beams
    lost = (state.running & refused).reshape(log_probabilities.shape)
    running = state.running & ~refused
    state = dataclasses.replace(state, running=running, allocator=state.allocator.free(~running))
    return state, jnp.where(lost, -jnp.inf, log_probabilities)


@functools.partial(jax.jit, static_argnames=("graph", "eos_ids"), donate_argnames="state")
def search(
    graph: nnx.GraphDef,
    weights: nnx.State,
    state: Generation,  # empty
    prompts: Prompts,
    eos_ids: tuple[int, ...],
) -> Beams:
    model = nnx.merge(graph, weights)
    num_prompts = len(prompts.rows)
    width = len(state.running) // num_prompts

    def one_step(carry: tuple[jax.Array, Beams]) -> tuple[jax.Array, Beams]:
        i, (state, log_probabilities) = carry
        allocator, slots, ok = state.allocator.append(state.running)
        state = retire(dataclasses.replace(state, allocator=allocator))
        caches, x = model(state.tokens[:, i - 1], state.caches, AttentionStep.create(allocator, slots))
        beams = dataclasses.replace(state, caches=caches), log_probabilities
        logits = model.logits(x).reshape(num_prompts, width, -1)
        return i + 1, choose(drop(beams, ~ok), i, logits, eos_ids)

    firsts = jnp.arange(num_prompts, dtype=jnp.int32) * width
    caches, allocator, logits, ok = write_prompts(model, state.caches, state.allocator, prompts, seqs=firsts)
    is_first = jnp.arange(width)[None] == 0  # each prompt starts with one beam
    log_probabilities = jnp.where(is_first & ok[:, None], 0.0, -jnp.inf)
    running = jnp.isfinite(log_probabilities).ravel()
    state = dataclasses.replace(state, caches=caches, allocator=allocator, running=running)
    logits = jnp.broadcast_to(logits[:, None], (num_prompts, width, logits.shape[-1]))
    beams = choose((state, log_probabilities), jnp.int32(0), logits, eos_ids)
    return lax.while_loop(lambda carry: carry[1][0].running.any(), one_step, (jnp.int32(1), beams))[1]


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
) -> tuple[list[list[Hypothesis]], Generation]:
    """Returns up to `width` hypotheses per prompt, best first, and the final state.

    Raises `PoolError` if the prompts do not fit into the pool."""
    empty = start(
        config,
        [prompt for prompt in prompts for _ in range(width)],
        max_new_tokens=max_new_tokens,
        block_size=block_size,
        num_blocks=None,
        dtype=dtype,
        seed=0,
        # The beams of a prompt share its full blocks. A fork allocates a block per beam before it frees the old ones.
        num_saved_blocks=sum((width - 1) * (len(prompt) // block_size) - width for prompt in prompts),
    )
    state, log_probabilities = search(*nnx.split(model), empty, pad_prompts(prompts), eos_ids)
    tokens = generated(state)
    scores = np.ravel(log_probabilities) / np.maximum(state.num_tokens, 1) ** length_penalty
    best_first = [i * width + np.argsort(-scores[i * width : (i + 1) * width]) for i in range(len(prompts))]
    found = [[Hypothesis(tokens[row], float(scores[row])) for row in rows] for rows in best_first]
    return [[one for one in hypotheses if one.score > -np.inf] for hypotheses in found], state


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], parents=[model_arguments()])
    parser.add_argument("--width", type=positive, default=4, metavar="N", help="beams of each prompt")
    parser.add_argument("--length-penalty", type=float, default=1.0, metavar="P", help="0: none; default: %(default)s")
    args = parser.parse_args(arguments)
    request = read_request(args)
    options = dict(width=args.width, length_penalty=args.length_penalty)
    hypotheses, state = compute(args, request, beam_search, **options)
    for i, (text, found) in enumerate(zip(request.texts, hypotheses, strict=True)):
        print(f"[{i}] {text}")
        for one in found:
            print(f"--> {one.score:7.3f}  {request.checkpoint.tokenizer.decode(one.tokens).strip()}")
        print()
    print(f"blocks:  {describe_blocks(state.peak_blocks, state.peak_unshared, args.block_size)}")


if __name__ == "__main__":
    run(main)
