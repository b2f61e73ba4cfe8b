"""Speculative greedy decoding: generates several tokens per step, the same tokens as plain decoding.

    python examples/speculative.py --prompt "Repeat after me: one two three four. One two three four. One two"

Each step looks for earlier occurrences of the newest tokens in the prompt and the generated text. It drafts the tokens
that followed them, as a tree of branches that differ in their first token, and verifies the tree in one attention call
with a tree mask. The branch that agrees longest with the model's choices is accepted, together with the model's next
token. Its keys and values are moved into place, and `rollback` releases the rest. All steps run in one `jax.jit`.

In bfloat16, matrix products round differently for several tokens than for one, so nearly tied tokens may swap.
"""

import argparse
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jaxpaged
from lib.command_line import compute, model_arguments, positive, read_request, run
from lib.generation import Generation, claim, extend, generated, prefill
from lib.llama import Llama
from lib.llama_config import LlamaConfig
from lib.prefill import Prompts, pad_prompts
from lib.sampling import Sampling
from lib.start import start


class Tally(NamedTuple):
    """Counts, int32 [seqs] each."""

    steps: jax.Array  # steps in which the sequence advanced
    drafted: jax.Array  # drafted tokens
    accepted: jax.Array  # accepted drafted tokens


def draft(
    text: jax.Array,  # int32 [seqs, tokens]
    begins: jax.Array,  # int32 [seqs], first column of each sequence's text
    ends: jax.Array,  # int32 [seqs], column after its last token
    *,
    ngram: int,
    num_draft: int,
    num_branches: int,
) -> tuple[jax.Array, jax.Array]:
    """Drafts the tokens that followed earlier occurrences of the last `ngram` tokens.

    Occurrences with more tokens after them, up to `num_draft`, come first; of equal ones, the latest. No two branches
    start with the same token.

    Returns the tokens, int32 [seqs, num_branches, num_draft], and their number in each branch, [seqs, num_branches].
    """
    num_tokens = text.shape[1]
    position = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    num_following = ends[:, None] - position - ngram
    found = (position >= begins[:, None]) & (num_following > 0)
    for i in range(ngram):
        newest = jnp.take_along_axis(text, jnp.maximum(ends - ngram + i, 0)[:, None], axis=1)
        found &= jnp.roll(text, -i, axis=1) == newest
    worth = jnp.where(found, jnp.minimum(num_following, num_draft) * num_tokens + position, -1)
    branches, counts = [], []
    for _ in range(num_branches):
        best = worth.argmax(axis=1).astype(jnp.int32)
        follows = best[:, None] + ngram + jnp.arange(num_draft, dtype=jnp.int32)[None]
        branches.append(jnp.take_along_axis(text, jnp.minimum(follows, num_tokens - 1), axis=1))
        counts.append(jnp.where((worth >= 0).any(axis=1), jnp.minimum(ends - best - ngram, num_draft), 0))
        worth = jnp.where(jnp.roll(text, -ngram, axis=1) == branches[-1][:, :1], -1, worth)
    return jnp.stack(branches, axis=1), jnp.stack(counts, axis=1)


def move(cache: jaxpaged.KVCache, source: jax.Array, destination: jax.Array) -> jaxpaged.KVCache:
    """Copies keys and values from slots to slots, int32 [...] each. A destination outside the pool is dropped."""
    k, v = (pool.reshape(-1, *pool.shape[2:])[source] for pool in (cache.k, cache.v))
    return jaxpaged.ops.write_kv(cache, k, v, destination)


def chains(num_branches: int, num_draft: int) -> tuple[jax.Array, jax.Array]:
    """The tree of a step: the newest token, followed by the branches, each of them a chain of drafted tokens.

    Returns the depth of each node, int32 [nodes], and the tree mask.
    """
    depths = jnp.concatenate(
        [jnp.zeros(1, jnp.int32), jnp.tile(jnp.arange(num_draft, dtype=jnp.int32) + 1, num_branches)]
    )
    parents = jnp.where(depths > 1, jnp.arange(depths.size, dtype=jnp.int32) - 1, jnp.minimum(depths - 1, 0))
    return depths, jaxpaged.tree_mask(parents)


def longest_branch(
    drafted: jax.Array,  # int32 [seqs, num_branches, num_draft]
    counts: jax.Array,  # int32 [seqs, num_branches], drafted tokens of each branch
    chosen: jax.Array,  # int32 [seqs, nodes], the model's choice after each node
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Accepts each branch up to its first difference from the model's choices.

    Returns the branch with the most accepted tokens, int32 [seqs]; their number, int32 [seqs]; and the model's choices
    after the newest token and after each token of that branch, int32 [seqs, 1 + num_draft].
    """
    after_newest, chosen = chosen[:, :1], chosen[:, 1:].reshape(drafted.shape)
    root = jnp.broadcast_to(after_newest[:, None], (*counts.shape, 1))
    expected = jnp.concatenate([root, chosen[:, :, :-1]], axis=2)
    is_drafted = jnp.arange(drafted.shape[2])[None, None] < counts[..., None]
    same = ((drafted == expected) & is_drafted).astype(jnp.int32)
    accepted = jnp.cumprod(same, axis=2, dtype=jnp.int32).sum(axis=2, dtype=jnp.int32)
    best = accepted.argmax(axis=1).astype(jnp.int32)
    chosen = jnp.take_along_axis(chosen, best[:, None, None], axis=1)[:, 0]
    return best, accepted.max(axis=1), jnp.concatenate([after_newest, chosen], axis=1)


@functools.partial(
    jax.jit, static_argnames=("graph", "eos_ids", "ngram", "num_draft", "num_branches"), donate_argnames="state"
)
def speculate(
    graph: nnx.GraphDef,
    weights: nnx.State,
    state: Generation,  # after the prefill
    prompts: Prompts,
    eos_ids: tuple[int, ...],
    ngram: int,
    num_draft: int,
    num_branches: int,
) -> tuple[Generation, Tally]:
    """Generates all tokens of each sequence after its first generated one."""
    model = nnx.merge(graph, weights)
    rows = prompts.rows
    begins = rows.shape[1] - prompts.lengths
    num_seqs = state.running.shape[0]
    depth = jnp.arange(num_draft, dtype=jnp.int32)
    depths, mask = chains(num_branches, num_draft)
    masks = jnp.broadcast_to(mask, (num_seqs, *mask.shape)) if num_branches > 1 else None

    def one_step(carry: tuple[Generation, Tally]) -> tuple[Generation, Tally]:
        state, tally = carry

        # 1. Draft, but leave room below the sequence's limit for the model's own token.
        text = jnp.concatenate([rows, state.tokens], axis=1)  # right-aligned prompts, then the generated tokens
        ends = rows.shape[1] + state.num_tokens
        drafted, counts = draft(text, begins, ends, ngram=ngram, num_draft=num_draft, num_branches=num_branches)
        counts = jnp.minimum(counts, (state.limits - state.num_tokens - 1)[:, None])

        # 2. Verify. Missing branches are computed as garbage, which is never accepted.
        before = state.allocator.lengths
        state, slots, advanced = claim(state, jnp.full_like(before, depths.size), q_len=depths.size)
        newest = jnp.take_along_axis(state.tokens, jnp.maximum(state.num_tokens - 1, 0)[:, None], axis=1)
        tokens = jnp.concatenate([newest, drafted.reshape(num_seqs, -1)], axis=1)
        positions = before[:, None] + depths[None]
        step = jaxpaged.AttentionStep.create(state.allocator, slots, positions=positions, tree_mask=masks)
        caches, x = model(tokens, state.caches, step)

        # 3. Accept the branch that agrees longest with the model's choices.
        chosen = model.logits(x).argmax(axis=-1).astype(jnp.int32)
        best, accepted, chosen = longest_branch(drafted, counts, chosen)

        # 4. Move the longest branch right after the newest token, and roll back the rest. The rollback needs no copies,
        # because no other sequence shares the tokens that this step appended.
        source = jnp.take_along_axis(slots, 1 + best[:, None] * num_draft + depth[None], axis=1)
        destination = jnp.where(depth[None] < accepted[:, None], slots[:, 1 : 1 + num_draft], -1)
        caches = tuple(move(cache, source, destination) for cache in caches)
        allocator, _, _ = state.allocator.rollback(jnp.where(advanced, before + 1 + accepted, before))
        state = dataclasses.replace(state, caches=caches, allocator=allocator)
        took_part = advanced.astype(jnp.int32)
        extended = extend(state, chosen, took_part * (accepted + 1), eos_ids)
        gained = extended.num_tokens - state.num_tokens  # fewer than accepted if eos comes first
        drafted_now = took_part * counts.sum(axis=1, dtype=jnp.int32)
        tally = Tally(tally.steps + took_part, tally.drafted + drafted_now, tally.accepted + gained - took_part)
        return extended, tally

    zeros = jnp.zeros_like(state.num_tokens)
    return lax.while_loop(lambda carry: carry[0].running.any(), one_step, (state, Tally(zeros, zeros, zeros)))


def decode_speculatively(
    model: Llama,
    config: LlamaConfig,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    block_size: int,
    ngram: int = 2,
    num_draft: int = 4,
    num_branches: int = 2,
    eos_ids: tuple[int, ...] = (),
    dtype: str = "float32",
) -> tuple[Generation, Tally]:
    """Returns the final state and the counts of each sequence."""
    state = start(
        config,
        prompts,
        max_new_tokens=max_new_tokens,
        block_size=block_size,
        num_blocks=None,
        dtype=dtype,
        seed=0,
        num_drafted=num_branches * num_draft,
    )
    graph, weights = nnx.split(model)
    padded = pad_prompts(prompts)
    state = prefill(graph, weights, state, padded, None, eos_ids, Sampling())
    return speculate(graph, weights, state, padded, eos_ids, ngram, num_draft, num_branches)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], parents=[model_arguments()])
    parser.add_argument(
        "--ngram",
        type=positive,
        default=2,
        metavar="N",
        help="look for earlier occurrences of the newest N tokens; default: %(default)s",
    )
    parser.add_argument(
        "--num-draft",
        type=positive,
        default=4,
        metavar="N",
        help="draft at most N tokens per branch; default: %(default)s",
    )
    parser.add_argument(
        "--num-branches", type=positive, default=2, metavar="N", help="branches per step; default: %(default)s"
    )
    args = parser.parse_args(arguments)
    options = dict(ngram=args.ngram, num_draft=args.num_draft, num_branches=args.num_branches)
    request = read_request(args)
    state, tally = compute(args, request, decode_speculatively, **options)
    for i, (text, tokens) in enumerate(zip(request.texts, generated(state), strict=True)):
        steps, drafted, accepted = (int(count[i]) for count in (tally.steps, tally.drafted, tally.accepted))
        print(f"[{i}] {text}\n--> {request.checkpoint.tokenizer.decode(tokens).strip()}")
        print(
            f"    {len(tokens) - 1} tokens in {steps} steps: {accepted} of {drafted} drafted tokens accepted, "
            f"{accepted / max(steps, 1):.2f} a step\n"
        )


if __name__ == "__main__":
    run(main)
