"""Greedy decoding that guesses: several tokens a step, and token for token what plain decoding gives.

    python examples/speculative.py --prompt "Repeat after me: one two three four. One two three four. One two"

A step drafts what followed the newest tokens where they stood before, in the prompt or in what was generated; gives the
whole draft to the model as queries of one attention; accepts it as far as the model would have chosen the same, and one
token of the model's own behind it; and takes back the room of the others with `rollback`. All steps are one `jax.jit`.
In bfloat16 products of several tokens may round other than those of one, and tokens that are almost tied may swap.
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
from command_line import compute, model_arguments, positive, run
from flax import nnx
from generation import Generation, claim, extend, generated, prefill, start
from jax import lax
from llama import Llama, LlamaConfig
from prefill import Prompts, pad_prompts
from sampling import Sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tally:
    """int32 [seqs] each."""

    steps: jax.Array  # that the sequence took part in
    drafted: jax.Array  # tokens
    accepted: jax.Array  # of those


def draft(
    text: jax.Array,  # int32 [seqs, tokens]
    begins: jax.Array,  # int32 [seqs], where each sequence's text begins in its row
    ends: jax.Array,  # int32 [seqs], and where it ends
    *,
    ngram: int,
    num_draft: int,
) -> tuple[jax.Array, jax.Array]:
    """What followed the last `ngram` tokens where they stood before: int32 [seqs, num_draft], and how many, [seqs].

    Of several places the one with the most tokens behind it, up to `num_draft`, and of those the latest.
    """
    num_tokens = text.shape[1]
    place = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    num_behind = ends[:, None] - place - ngram
    found = (place >= begins[:, None]) & (num_behind > 0)
    for i in range(ngram):
        newest = jnp.take_along_axis(text, jnp.maximum(ends - ngram + i, 0)[:, None], axis=1)
        found &= jnp.roll(text, -i, axis=1) == newest
    worth = jnp.where(found, jnp.minimum(num_behind, num_draft) * num_tokens + place, -1)
    best = worth.argmax(axis=1).astype(jnp.int32)
    follows = best[:, None] + ngram + jnp.arange(num_draft, dtype=jnp.int32)[None]
    tokens = jnp.take_along_axis(text, jnp.minimum(follows, num_tokens - 1), axis=1)
    return tokens, jnp.where(found.any(axis=1), jnp.minimum(ends - best - ngram, num_draft), 0)


@functools.partial(jax.jit, static_argnames=("graph", "eos_ids", "ngram", "num_draft"), donate_argnames="state")
def speculate(
    graph: nnx.GraphDef,
    weights: nnx.State,
    state: Generation,  # after the prefill
    prompts: Prompts,
    eos_ids: tuple[int, ...],
    ngram: int,
    num_draft: int,
) -> tuple[Generation, Tally]:
    """From the first token of every sequence to its last."""
    model = nnx.merge(graph, weights)
    rows = prompts.rows
    begins = rows.shape[1] - prompts.lengths
    column = jnp.arange(num_draft + 1, dtype=jnp.int32)[None]

    def one_step(carry: tuple[Generation, Tally]) -> tuple[Generation, Tally]:
        state, tally = carry

        # 1. Draft, but not beyond where the sequence must end: the last token that it may get is the model's own.
        text = jnp.concatenate([rows, state.tokens], axis=1)  # prompts end where what was generated begins
        drafted, counts = draft(text, begins, rows.shape[1] + state.num_tokens, ngram=ngram, num_draft=num_draft)
        counts = jnp.minimum(counts, state.limits - state.num_tokens - 1)

        # 2. Verify: the newest token and the draft behind it, at the end of their row.
        state, slots, advanced = claim(state, 1 + counts, max_tokens=num_draft + 1)
        padding = (num_draft - counts)[:, None]
        newest = jnp.take_along_axis(state.tokens, jnp.maximum(state.num_tokens - 1, 0)[:, None], axis=1)
        tokens = jnp.concatenate([newest, drafted], axis=1)
        tokens = jnp.take_along_axis(tokens, jnp.maximum(column - padding, 0), axis=1)
        caches, logits = model(tokens, state.caches, state.allocator, slots, num_logits=num_draft + 1)

        # 3. What the model chooses after each of them, the newest first; accepted as far as the draft is the same.
        chosen = logits.argmax(axis=-1).astype(jnp.int32)
        chosen = jnp.take_along_axis(chosen, jnp.minimum(column + padding, num_draft), axis=1)
        same = (chosen[:, :-1] == drafted) & (column[:, :-1] < counts[:, None])
        accepted = jnp.cumprod(same.astype(jnp.int32), axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)

        # 4. Roll back the others. Nobody shares what this step appended: there is nothing to copy.
        rejected = jnp.where(advanced, counts - accepted, 0)
        allocator, _, _ = state.allocator.rollback(state.allocator.lengths - rejected)
        state = dataclasses.replace(state, caches=caches, allocator=allocator)
        took_part = advanced.astype(jnp.int32)
        extended = extend(state, chosen, took_part * (accepted + 1), eos_ids)
        gained = extended.num_tokens - state.num_tokens  # eos may have cut some off
        tally = Tally(tally.steps + took_part, tally.drafted + took_part * counts, tally.accepted + gained - took_part)
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
    eos_ids: tuple[int, ...] = (),
    dtype: str = "float32",
) -> tuple[Generation, Tally]:
    """The final state, and what was drafted and accepted in each sequence."""
    state = start(
        config, prompts, max_new_tokens=max_new_tokens, block_size=block_size, num_blocks=None, dtype=dtype, seed=0
    )
    graph, weights = nnx.split(model)
    padded = pad_prompts(prompts)
    state = prefill(graph, weights, state, padded, None, eos_ids, Sampling())
    return speculate(graph, weights, state, padded, eos_ids, ngram, num_draft)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], parents=[model_arguments()])
    parser.add_argument("--ngram", type=positive, default=2, metavar="N", help="look for the newest N tokens")
    parser.add_argument("--num-draft", type=positive, default=4, metavar="N", help="draft at most N tokens a step")
    args = parser.parse_args(arguments)
    request, (state, tally) = compute(args, decode_speculatively, ngram=args.ngram, num_draft=args.num_draft)
    for i, (text, tokens) in enumerate(zip(request.texts, generated(state), strict=True)):
        steps, drafted, accepted = (int(count[i]) for count in (tally.steps, tally.drafted, tally.accepted))
        print(f"[{i}] {text}\n--> {request.checkpoint.tokenizer.decode(tokens).strip()}")
        print(
            f"    {len(tokens) - 1} tokens in {steps} steps: {accepted} of {drafted} drafted tokens accepted, "
            f"{accepted / max(steps, 1):.2f} a step\n"
        )


if __name__ == "__main__":
    run(main)
