"""Text from a Llama-family model through a paged cache.

Prefill is one jitted call over the ragged batch. Decoding is one `jax.jit` around `lax.while_loop`: allocate, write,
attend, sample, stop, free, with no way back to the host until it ends.

    python examples/generate.py --chat --prompt "What is a page table?" --prompt "Name three rivers."
"""

import argparse
import dataclasses
import functools
import json
import math
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

import jax
import jax.numpy as jnp
import numpy as np
from checkpoint import CheckpointError, Tokenizer, default_path, load_model, read_checkpoint
from flax import nnx
from jax import lax
from llama import Llama, LlamaConfig
from sampling import Sampling, sample
from tqdm import tqdm

import jaxpaged

PREFILL_CHUNK = 256  # tokens a sequence; bounds the memory that a long prompt's activations take
MOST_CACHE_BYTES = 64e9  # beyond this a pool is a slip of the keyboard
STREAM_STEPS = 8  # decode steps between two looks at the tokens
QUANTISED = ("float8_e4m3fn", "float8_e5m2", "int8")
Granularity = Literal["token_head", "head", "tensor"]  # of a quantised cache's scales


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generation:
    """A batch of sequences being generated."""

    caches: tuple[jaxpaged.KVCache, ...]  # one a layer
    allocator: jaxpaged.BlockAllocator
    keys: jax.Array  # a random key a sequence
    tokens: jax.Array  # int32 [seqs, max_new_tokens], generated so far
    num_tokens: jax.Array  # int32 [seqs], how many that is
    limits: jax.Array  # int32 [seqs], how many it may become
    running: jax.Array  # bool [seqs]
    starved: jax.Array  # bool [seqs], stopped for want of a block
    peak_blocks: jax.Array  # int32 [], the most blocks held at one time


def accept(
    state: Generation, advanced: jax.Array, logits: jax.Array, eos_ids: tuple[int, ...], sampling: Sampling
) -> Generation:
    """Samples the next token of the sequences that advanced, and frees those that no longer run."""
    seqs = jnp.arange(state.running.shape[0])
    token = sample(logits, jax.vmap(jax.random.fold_in)(state.keys, state.num_tokens), sampling)
    place = jnp.where(advanced, state.num_tokens, state.tokens.shape[1])  # past the end: dropped
    num_tokens = state.num_tokens + advanced.astype(jnp.int32)
    ended = (num_tokens >= state.limits) | jnp.isin(token, jnp.asarray(eos_ids, jnp.int32))
    running = state.running & ~(advanced & ended)
    return dataclasses.replace(
        state,
        allocator=state.allocator.free(~running),
        tokens=state.tokens.at[seqs, place].set(token, mode="drop"),
        num_tokens=num_tokens,
        running=running,
        peak_blocks=jnp.maximum(state.peak_blocks, state.allocator.num_held),
    )


@functools.partial(jax.jit, static_argnames=("graph", "eos_ids", "sampling"), donate_argnames="state")
def prefill(
    graph: nnx.GraphDef,
    weights: nnx.State,
    state: Generation,
    prompts: jax.Array,  # int32 [chunks, seqs, tokens], each sequence's prompt at the end, padding before it
    lengths: jax.Array,  # int32 [seqs]
    eos_ids: tuple[int, ...],
    sampling: Sampling,
) -> Generation:
    """Writes the prompts into the cache and samples each sequence's first token."""
    model = nnx.merge(graph, weights)
    num_chunks, num_seqs, chunk = prompts.shape
    allocator, slots, ok = state.allocator.append(lengths, max_tokens=num_chunks * chunk)
    chunk_slots = slots.reshape(num_seqs, num_chunks, chunk).swapaxes(0, 1)

    def one_chunk(i: jax.Array, carry: tuple) -> tuple:
        caches, _ = carry
        # As long as each sequence is after this chunk: the chunk's tokens are then its newest.
        still_to_come = (num_chunks - 1 - i) * chunk
        so_far = dataclasses.replace(allocator, lengths=jnp.maximum(allocator.lengths - still_to_come, 0))
        return model(prompts[i], caches, so_far, chunk_slots[i])

    logits = jnp.zeros((num_seqs, model.embed_tokens.num_embeddings), jnp.float32)
    caches, logits = lax.fori_loop(0, num_chunks, one_chunk, (state.caches, logits))
    state = dataclasses.replace(state, caches=caches, allocator=allocator, running=ok, starved=~ok)
    return accept(state, ok, logits, eos_ids, sampling)


@functools.partial(jax.jit, static_argnames=("graph", "eos_ids", "sampling"), donate_argnames="state")
def decode(
    graph: nnx.GraphDef,
    weights: nnx.State,
    state: Generation,
    num_steps: jax.Array,
    eos_ids: tuple[int, ...],
    sampling: Sampling,
) -> Generation:
    """Up to `num_steps` more tokens for every running sequence."""
    model = nnx.merge(graph, weights)

    def go_on(carry: tuple[jax.Array, Generation]) -> jax.Array:
        step, state = carry
        return (step < num_steps) & state.running.any()

    def one_token(carry: tuple[jax.Array, Generation]) -> tuple[jax.Array, Generation]:
        step, state = carry
        last = jnp.take_along_axis(state.tokens, jnp.maximum(state.num_tokens - 1, 0)[:, None], axis=1)
        allocator, slots, ok = state.allocator.append(state.running.astype(jnp.int32))
        advanced = state.running & ok
        # Who finds no block waits for one to come back. Where all wait, the last of them makes room for the others.
        seqs = jnp.arange(advanced.shape[0])
        stopped = ~advanced.any() & (seqs == jnp.where(state.running, seqs, -1).max())
        caches, logits = model(last, state.caches, allocator, slots)
        state = dataclasses.replace(
            state,
            caches=caches,
            allocator=allocator,
            running=state.running & ~stopped,
            starved=state.starved | stopped,
        )
        return step + 1, accept(state, advanced, logits, eos_ids, sampling)

    return lax.while_loop(go_on, one_token, (jnp.int32(0), state))[1]


def start(
    config: LlamaConfig,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    block_size: int,
    num_blocks: int | None,
    dtype: str,
    seed: int,
    scale: Granularity | None = None,
) -> Generation:
    """An empty generation; `dtype` and `scale` are the cache's, whose scales of a tensor or a head `calibrate` sets.
    Raises `ValueError` with one sentence where the prompts do not fit."""
    lengths = [len(prompt) for prompt in prompts]
    limits = [min(max_new_tokens, config.context - length + 1) for length in lengths]
    blocks_at_start = sum(-(-length // block_size) for length in lengths)
    # The last token of a sequence is never written: nothing attends to it.
    blocks_at_end = [-(-(length + limit - 1) // block_size) for length, limit in zip(lengths, limits, strict=True)]
    if num_blocks is None:
        num_blocks = 1 + sum(blocks_at_end)
    if num_blocks - 1 < blocks_at_start:
        raise ValueError(
            f"The prompts need {blocks_at_start} blocks of {block_size} tokens and --num-blocks {num_blocks} leaves "
            f"{num_blocks - 1} beside the null block; pass at least --num-blocks {blocks_at_start + 1}."
        )
    placeholder = 1.0 if scale in ("tensor", "head") else None
    create = functools.partial(
        jaxpaged.KVCache.create,
        num_blocks,
        block_size,
        config.num_kv_heads,
        config.head_dim,
        dtype=dtype,
        scale=scale,
        k_scale=placeholder,
        v_scale=placeholder,
    )
    cache_bytes = config.num_layers * num_bytes(jax.eval_shape(create))
    if cache_bytes > MOST_CACHE_BYTES:
        raise ValueError(
            f"A pool of {num_blocks} blocks of {block_size} tokens takes {cache_bytes / 1e9:.0f} GB; "
            "pass smaller --num-blocks, --block-size or --max-new-tokens."
        )
    return Generation(
        caches=tuple(create() for _ in range(config.num_layers)),
        allocator=jaxpaged.BlockAllocator.create(num_blocks, block_size, len(prompts), max(blocks_at_end)),
        keys=prompt_keys(prompts, seed),
        tokens=jnp.zeros((len(prompts), max(limits)), jnp.int32),
        num_tokens=jnp.zeros(len(prompts), jnp.int32),
        limits=jnp.asarray(limits, jnp.int32),
        running=jnp.zeros(len(prompts), bool),
        starved=jnp.zeros(len(prompts), bool),
        peak_blocks=jnp.int32(0),
    )


def num_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def calibrate(
    model: Llama, state: Generation, config: LlamaConfig, prompts: list[list[int]], *, dtype: str, scale: Granularity
) -> Generation:
    """`state` with the scales of each layer's cache set so that the keys and values of the prompts just fit."""
    trial = start(config, prompts, max_new_tokens=1, block_size=16, num_blocks=None, dtype=dtype, seed=0)
    lengths = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
    graph, weights = nnx.split(model)
    trial = prefill(graph, weights, trial, jnp.asarray(pad_prompts(prompts)), lengths, (), Sampling())
    caches = tuple(
        dataclasses.replace(
            cache,
            k_scale=jaxpaged.kv_scale(seen.k, cache.k.dtype, scale),  # slots that hold no token are zeros
            v_scale=jaxpaged.kv_scale(seen.v, cache.v.dtype, scale),
        )
        for cache, seen in zip(state.caches, trial.caches, strict=True)
    )
    return dataclasses.replace(state, caches=caches)


def prompt_keys(prompts: list[list[int]], seed: int) -> jax.Array:
    """A random key a prompt that depends on its own tokens, not on its place in the batch; repeats get other ones."""
    seen: Counter[int] = Counter()
    keys = []
    for prompt in prompts:
        digest = zlib.crc32(np.asarray(prompt, np.int32).tobytes())
        keys.append(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), digest), seen[digest]))
        seen[digest] += 1
    return jnp.stack(keys)


def pad_prompts(prompts: list[list[int]]) -> np.ndarray:
    """int32 [chunks, seqs, tokens]: each prompt at the end of its row, the rows cut into equal chunks."""
    longest = max(map(len, prompts))
    chunk = min(PREFILL_CHUNK, -(-longest // 16) * 16)
    num_chunks = -(-longest // chunk)
    rows = np.zeros((len(prompts), num_chunks * chunk), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[len(row) - len(prompt) :] = prompt
    return rows.reshape(len(prompts), num_chunks, chunk).swapaxes(0, 1)


@dataclasses.dataclass
class Timing:
    """Seconds, each waited for to the end, and which attention the decode loop was compiled with."""

    compile: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    attention: str = ""


class Stream:
    """Prints the text of a batch as it grows, each sequence's new part with its number before it if there are more."""

    def __init__(self, tokenizer: Tokenizer, num_seqs: int, file: TextIO):
        self.tokenizer, self.file = tokenizer, file
        self.shown = [""] * num_seqs

    def show(self, tokens: list[list[int]]) -> None:
        for i, ids in enumerate(tokens):
            text = self.tokenizer.decode(ids).rstrip("\ufffd")  # half of a character: wait for the rest
            new, self.shown[i] = text[len(self.shown[i]) :], text
            if new and len(tokens) == 1:
                print(new, end="", file=self.file, flush=True)
            elif new:
                print(f"[{i}] {new}", file=self.file, flush=True)


def generate(
    model: Llama,
    state: Generation,
    prompts: list[list[int]],
    eos_ids: tuple[int, ...],
    sampling: Sampling,
    *,
    steps_at_once: int,
    look: Callable[[Generation], None],
) -> tuple[Generation, Timing]:
    """Runs `state` to its end, calling `look` after the prefill and after every `steps_at_once` decode steps."""
    graph, weights = nnx.split(model)
    timing = Timing()

    def timed(name: str, function: Callable, *arguments: Any) -> Any:
        begin = time.perf_counter()
        result = jax.block_until_ready(function(*arguments))
        setattr(timing, name, getattr(timing, name) + time.perf_counter() - begin)
        return result

    padded, lengths = jnp.asarray(pad_prompts(prompts)), jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
    num_steps = jnp.int32(steps_at_once)
    first = timed("compile", prefill.lower(graph, weights, state, padded, lengths, eos_ids, sampling).compile)
    more = timed("compile", decode.lower(graph, weights, state, num_steps, eos_ids, sampling).compile)
    timing.attention = "mosaic_gpu" if "mosaic_gpu" in more.as_text() else "xla"
    state = timed("prefill", first, weights, state, padded, lengths)
    look(state)
    while bool(state.running.any()):
        state = timed("decode", more, weights, state, num_steps)
        look(state)
    return state, timing


def generated(state: Generation) -> list[list[int]]:
    rows, counts = np.asarray(state.tokens), np.asarray(state.num_tokens)
    return [row[:count].tolist() for row, count in zip(rows, counts, strict=True)]


def say(text: str) -> None:
    """A line for the person who waits: on stderr, since stdout holds results alone."""
    print(text, file=sys.stderr, flush=True)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--model", type=Path, help="a GGUF file or a Hugging Face folder; default: SmolLM2-135M-Instruct"
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        help="may be given several times; --prompt=TEXT if it begins with a dash",
    )
    parser.add_argument(
        "--prompt-file", type=Path, help="one prompt a line, after those of --prompt; empty lines are skipped"
    )
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default: the most likely token")
    parser.add_argument("--top-k", type=positive, help="sample among the k most likely tokens")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample among the most likely with this probability together"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--cache-dtype",
        choices=("float32", "bfloat16", "float16", *QUANTISED),
        help="of the keys and values in the cache; default: --dtype",
    )
    parser.add_argument(
        "--cache-scale",
        choices=get_args(Granularity),
        help="what one scale of a quantised cache is for: a token and head, which is the default; a head or a whole "
        "layer, calibrated on all the prompts together",
    )
    parser.add_argument("--block-size", type=positive, default=16, metavar="TOKENS")
    parser.add_argument(
        "--num-blocks", type=positive, help="blocks in the pool, the null block included; default: what is needed"
    )
    parser.add_argument("--stream", action="store_true", help="print the text as it grows")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a prompt on stdout, and nothing else there"
    )
    args = parser.parse_args(arguments)
    args.cache_dtype = args.cache_dtype or args.dtype
    if args.cache_scale is None and args.cache_dtype in QUANTISED:
        args.cache_scale = "token_head"
    return args


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Raises `ValueError` with one sentence."""
    prompts = list(args.prompt)
    if args.prompt_file is not None:
        try:
            lines = args.prompt_file.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"The prompt file {args.prompt_file} cannot be read: {error}.") from error
        prompts += [line.rstrip("\r") for line in lines if line.strip()]
    if not prompts:
        raise ValueError("There is no prompt; pass --prompt TEXT or a --prompt-file that has a line.")
    if not all(prompts):
        raise ValueError("A prompt is empty; write something in it or leave it out.")
    if any("\udc80" <= character <= "\udcff" for prompt in prompts for character in prompt):
        raise ValueError("A prompt is not valid UTF-8.")
    return prompts


def encode_prompts(prompts: list[str], tokenizer: Tokenizer, config: LlamaConfig, *, chat: bool) -> list[list[int]]:
    """Raises `ValueError` with one sentence."""
    encoded = [tokenizer.encode_chat(prompt) if chat else tokenizer.encode(prompt) for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise ValueError(f"The prompt {prompt!r} holds no token.")
        if len(ids) > config.context:
            raise ValueError(
                f"The prompt {prompt[:40]!r}... has {len(ids)} tokens; the model's context is {config.context}."
            )
    return encoded


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    try:
        if not 0 <= args.temperature < float("inf") or not 0 < args.top_p <= 1:
            raise ValueError("--temperature must be 0 or a positive number, --top-p above 0 and at most 1.")
        if not 0 <= args.seed < 2**32:
            raise ValueError(f"--seed must be within 0 and 2^32 - 1; got {args.seed}.")
        if args.cache_scale is not None and args.cache_dtype not in QUANTISED:
            raise ValueError(f"--cache-scale goes with --cache-dtype {', '.join(QUANTISED)}; got {args.cache_dtype}.")
        texts = read_prompts(args)
        checkpoint = read_checkpoint(args.model or default_path())
        prompts = encode_prompts(texts, checkpoint.tokenizer, checkpoint.config, chat=args.chat)
        state = start(
            checkpoint.config,
            prompts,
            max_new_tokens=args.max_new_tokens,
            block_size=args.block_size,
            num_blocks=args.num_blocks,
            dtype=args.cache_dtype,
            seed=args.seed,
            scale=args.cache_scale,
        )
        model = load_model(checkpoint, args.dtype)
    except (ValueError, CheckpointError) as error:
        say(f"generate.py: {error}")
        return 2

    tokenizer = checkpoint.tokenizer
    stream = Stream(tokenizer, len(prompts), sys.stderr if args.json else sys.stdout) if args.stream else None
    # A bar is drawn on a terminal alone; without one nobody looks, and the whole of decoding is one call.
    bar = tqdm(total=int(state.limits.sum()), desc="generating", unit="token", disable=True if stream else None)
    watched = stream is not None or not bar.disable

    def look(state: Generation) -> None:
        bar.update(int(state.num_tokens.sum()) - bar.n)
        if stream is not None:
            stream.show(generated(state))

    with bar, jax.default_matmul_precision("highest" if args.dtype == "float32" else "default"):
        if args.cache_scale in ("tensor", "head"):
            state = calibrate(model, state, checkpoint.config, prompts, dtype=args.dtype, scale=args.cache_scale)
        state, timing = generate(
            model,
            state,
            prompts,
            () if args.ignore_eos else tokenizer.eos_ids,
            Sampling(args.temperature, args.top_k, args.top_p),
            steps_at_once=STREAM_STEPS if watched else state.tokens.shape[1],
            look=look,
        )
    report(state, timing, texts, prompts, tokenizer, args)
    return 3 if np.asarray(state.starved).any() else 0


def report(
    state: Generation,
    timing: Timing,
    texts: list[str],
    prompts: list[list[int]],
    tokenizer: Tokenizer,
    args: argparse.Namespace,
) -> None:
    """Results on stdout; what was measured on stdout too, or on stderr beside JSON."""
    tokens, starved = generated(state), np.asarray(state.starved)
    for i, (text, prompt, ids) in enumerate(zip(texts, prompts, tokens, strict=True)):
        result: dict[str, Any] = {"prompt": text, "prompt_tokens": prompt, "tokens": ids, "text": tokenizer.decode(ids)}
        if args.json:
            print(json.dumps(result | ({"out_of_blocks": True} if starved[i] else {})))
        elif not args.stream:
            print(f"[{i}] {text}\n--> {result['text'].strip()}\n")
        if starved[i]:
            say(f"[{i}] stopped after {len(ids)} tokens: the pool ran out of blocks; pass a larger --num-blocks.")
    if args.stream and not args.json:
        print()

    tokens_wide = state.tokens.shape[1]
    num_prompt_tokens, num_decoded = sum(map(len, prompts)), sum(map(len, tokens)) - len(prompts)
    longest = max(map(len, prompts)) + tokens_wide - 1  # the last token is never written
    reserved = len(prompts) * -(-longest // args.block_size)
    peak = int(state.peak_blocks)
    block_bytes = num_bytes(state.caches) // state.caches[0].k.shape[0]
    print(
        f"prefill: {rate(num_prompt_tokens, timing.prefill)}",
        f"decode:  {rate(num_decoded, timing.decode)}",
        f"cache:   {peak} blocks of {args.block_size} tokens in use at the peak, {peak * block_bytes / 1e6:.1f} MB; a "
        f"contiguous cache for this batch would reserve {reserved}, {reserved * block_bytes / 1e6:.1f} MB: "
        f"paging saved {100 * (1 - peak / reserved):.0f}%",
        f"kernel:  {timing.attention}, compiled in {timing.compile:.1f} s for {jax.devices()[0].device_kind}",
        sep="\n",
        file=sys.stderr if args.json else sys.stdout,
    )


def rate(num_tokens: int, seconds: float) -> str:
    return f"{num_tokens} tokens in {seconds:.2f} s" + (f", {num_tokens / seconds:.1f} tokens/s" if num_tokens else "")


if __name__ == "__main__":
    sys.exit(main())
