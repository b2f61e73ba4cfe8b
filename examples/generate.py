"""Generates text with a Llama, Mistral, Mixtral, Qwen, Gemma, gpt-oss or DeepSeek model and a paged cache.

    python examples/generate.py --chat --prompt "What is a page table?" --prompt "Name three rivers."
    python examples/generate.py --shared-prefix LICENSE --prompt "In short, this license" --prompt "A user of it must"
    python examples/generate.py --chat --num-speculative-tokens 8 --prompt "Count from one to twenty, twice."

The part to copy is `lib/generation.py`, which decodes in one `jax.jit`; this file is the command line around it. With
--num-speculative-tokens a `jaxpaged.Engine` generates instead, and drafts tokens from repetitions in the text.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO, get_args

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpaged import EngineOptions, SamplingParams
from lib.checkpoint import load_model
from lib.command_line import (
    Request,
    RequestError,
    add_tensor_parallel,
    matmul_precision,
    model_arguments,
    parse_command,
    positive,
    read_request,
    read_sampling,
    read_text,
    run,
    sampling_arguments,
    say,
)
from lib.engine_llama import create_engine
from lib.generation import Generation, Timing, generated, run_generation
from lib.llama import Llama
from lib.llama_config import LlamaConfig
from lib.sampling import Sampling
from lib.shared_prefix import common_prefix, num_saved_blocks
from lib.start import Granularity, calibrate, num_bytes, start
from lib.tensor_parallel import spread
from lib.text_stream import TextStream
from lib.tokenizer import Tokenizer

STREAM_STEPS = 8  # decode steps between two updates of the output
# Options of --help; --help-all shows the others too.
USUAL = """--chat --prompt-file --max-new-tokens --temperature --top-k --top-p --seed --num-speculative-tokens
    --tensor-parallel --dtype --stream --json"""
QUANTISED = ("float8_e4m3fn", "float8_e5m2", "int8")


class Stream:
    """Prints the text of a batch as it is generated. With several sequences, each piece has its sequence's number."""

    def __init__(self, tokenizer: Tokenizer, prompts: list[list[int]], file: TextIO):
        self.texts, self.file = [TextStream(tokenizer, prompt_ids=prompt) for prompt in prompts], file

    def show(self, tokens: list[list[int]]) -> None:
        for i, (text, ids) in enumerate(zip(self.texts, tokens, strict=True)):
            new = text.extend(ids, is_last=False)
            if new and len(tokens) == 1:
                print(new, end="", file=self.file, flush=True)
            elif new:
                print(f"[{i}] {new}", file=self.file, flush=True)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parents = [model_arguments(), sampling_arguments(temperature=0.0)]
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], parents=parents)
    parser.add_argument(
        "--shared-prefix",
        type=Path,
        metavar="FILE",
        help="put this file's text before every prompt; its keys and values are computed once and shared",
    )
    parser.add_argument(
        "--cache-dtype",
        choices=("float32", "bfloat16", "float16", *QUANTISED),
        help="dtype of keys and values in the cache; default: --dtype",
    )
    parser.add_argument(
        "--cache-scale",
        choices=get_args(Granularity),
        help="scales of a quantised cache: one per token and head (the default), or one per head or layer, "
        "calibrated on all prompts together",
    )
    parser.add_argument(
        "--num-blocks", type=positive, help="blocks in the pool, including the null block; default: as many as needed"
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=positive,
        default=0,
        metavar="N",
        help="maximum number of tokens per text to draft in a step, from its repetitions; default: none",
    )
    add_tensor_parallel(parser)
    parser.add_argument("--stream", action="store_true", help="print the text as it is generated")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt on stdout, and nothing else"
    )
    args = parse_command(parser, arguments, usual=USUAL, has_prompts=True)
    args.cache_dtype = args.cache_dtype or args.dtype
    if args.cache_scale is None and args.cache_dtype in QUANTISED:
        args.cache_scale = "token_head"
    return args


def check_together(args: argparse.Namespace) -> None:
    """Raises `RequestError` for options that do not go together."""
    if args.cache_scale is not None and args.cache_dtype not in QUANTISED:
        raise RequestError(f"--cache-scale goes with --cache-dtype {', '.join(QUANTISED)}; got {args.cache_dtype}.")
    if args.num_speculative_tokens and (
        args.shared_prefix or args.num_blocks or args.stream or args.cache_dtype != args.dtype
    ):
        raise RequestError(
            "--num-speculative-tokens: leave out --shared-prefix, --num-blocks, --stream and --cache-dtype."
        )
    if args.cache_scale in ("tensor", "head") and args.tensor_parallel > 1:
        raise RequestError(
            f"--cache-scale {args.cache_scale} is calibrated on one device; leave --tensor-parallel out."
        )


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    from tqdm import tqdm  # from the extra "examples"; imported here, so that --help works without it

    check_together(args)
    shared_text = read_text(args.shared_prefix, "shared prefix") if args.shared_prefix else ""
    request = read_request(args, prefix=shared_text)
    sampling = read_sampling(args, request.checkpoint)
    config, prompts = request.checkpoint.config, request.prompts
    prefix = common_prefix(prompts, args.block_size) if shared_text else None
    load = functools.partial(load_model, request.checkpoint, args.dtype)
    model, config, mesh = spread(load, config, args.tensor_parallel)
    if args.num_speculative_tokens:
        with matmul_precision(args.dtype):
            generate_with_drafts(model, config, request, sampling, args, mesh)
        return 0
    state = start(
        config,
        prompts,
        max_new_tokens=args.max_new_tokens,
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        dtype=args.cache_dtype,
        seed=args.seed,
        scale=args.cache_scale,
        num_saved_blocks=num_saved_blocks(prompts, prefix, args.block_size) if prefix else 0,
        mesh=mesh,
    )

    tokenizer = request.checkpoint.tokenizer
    stream = Stream(tokenizer, prompts, sys.stderr if args.json else sys.stdout) if args.stream else None
    # The progress bar needs a terminal. Without a bar or a stream, decoding is a single call.
    bar = tqdm(total=int(state.limits.sum()), desc="generating", unit="token", disable=True if stream else None)
    watched = stream is not None or not bar.disable

    def look(state: Generation) -> None:
        bar.update(int(state.num_tokens.sum()) - bar.n)
        if stream is not None:
            stream.show(generated(state))

    with bar, matmul_precision(args.dtype):
        if args.cache_scale in ("tensor", "head"):
            state = calibrate(model, state, config, prompts, dtype=args.dtype, scale=args.cache_scale)
        state, timing = run_generation(
            model,
            state,
            prompts,
            () if args.ignore_eos else tokenizer.eos_ids,
            sampling,
            steps_at_once=STREAM_STEPS if watched else state.tokens.shape[1],
            look=look,
            prefix=prefix,
            mesh=mesh,
        )
    report(state, timing, request, prefix, args)
    return 3 if np.asarray(state.starved).any() else 0


def generate_with_drafts(
    model: Llama, config: LlamaConfig, request: Request, sampling: Sampling, args: argparse.Namespace, mesh: Mesh | None
) -> None:
    """Generates with an engine, and prints the results and its measurements."""
    prompts, tokenizer = request.prompts, request.checkpoint.tokenizer
    stop_ids = () if args.ignore_eos else tuple(tokenizer.eos_ids)
    # The last token is never input to the model, so it may be one past the context.
    limits = [min(args.max_new_tokens, config.context + 1 - len(prompt)) for prompt in prompts]
    params = [
        SamplingParams(
            max_tokens=limit,
            temperature=sampling.temperature,
            top_k=sampling.top_k or 0,
            top_p=sampling.top_p,
            seed=(args.seed + i) % 2**32,
            stop_token_ids=stop_ids,
        )
        for i, limit in enumerate(limits)
    ]
    max_model_len = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
    options = EngineOptions(
        max_num_seqs=len(prompts),
        max_model_len=max_model_len,
        num_speculative_tokens=min(args.num_speculative_tokens, max_model_len),
        num_stop_ids=len(stop_ids),
    )
    begin = time.perf_counter()
    engine = create_engine(model, config, options, block_size=args.block_size, dtype=args.dtype, mesh=mesh)
    compiled, begin = time.perf_counter() - begin, time.perf_counter()
    tokens = [output.outputs[0].token_ids for output in engine.generate(prompts, params)]
    seconds, stats = time.perf_counter() - begin, engine.stats()
    show(request, tokens, [False] * len(tokens), args)
    print(
        f"engine:  {rate(sum(map(len, tokens)), seconds)}, {stats.num_steps} steps, compiled in {compiled:.1f} s",
        f"drafts:  {stats.num_accepted} of {stats.num_drafted} were right",
        sep="\n",
        file=sys.stderr if args.json else sys.stdout,
    )


def show(request: Request, tokens: list[list[int]], starved: Sequence[bool], args: argparse.Namespace) -> None:
    """Prints the text of each prompt."""
    tokenizer = request.checkpoint.tokenizer
    for i, (text, prompt, ids) in enumerate(zip(request.texts, request.prompts, tokens, strict=True)):
        result: dict[str, Any] = {"prompt": text, "prompt_tokens": prompt, "tokens": ids}
        result["text"] = tokenizer.decode(ids, prompt_ids=prompt)
        if args.json:
            print(json.dumps(result | ({"out_of_blocks": True} if starved[i] else {})))
        elif not args.stream:
            print(f"[{i}] {text}\n--> {result['text'].strip()}\n")
        if starved[i]:
            say(f"[{i}] stopped after {len(ids)} tokens: the pool ran out of blocks; pass a larger --num-blocks.")


def report(
    state: Generation, timing: Timing, request: Request, prefix: list[int] | None, args: argparse.Namespace
) -> None:
    """Prints results on stdout, and measurements on stdout or, with --json, on stderr."""
    prompts, tokens = request.prompts, generated(state)
    show(request, tokens, np.asarray(state.starved).tolist(), args)
    if args.stream and not args.json:
        print()

    tokens_wide = state.tokens.shape[1]
    num_prompt_tokens, num_decoded = sum(map(len, prompts)), sum(map(len, tokens)) - len(prompts)
    num_cached = int(state.num_cached.sum())
    num_prefilled = len(prefix or ()) + num_prompt_tokens - num_cached
    longest = max(map(len, prompts)) + tokens_wide - 1  # the last token is never written
    reserved = len(prompts) * -(-longest // args.block_size)
    peak = int(state.peak_blocks)
    block_bytes = num_bytes(state.caches) // state.caches[0].k.shape[0]
    kernels = ", ".join(f"{name} {attention}" for name, attention in timing.attention.items())
    file = sys.stderr if args.json else sys.stdout
    if prefix is not None:
        print(
            f"prefix:  {len(prefix)} tokens in {len(prefix) // args.block_size} full blocks; the prompts found "
            f"{num_cached // args.block_size} blocks again, {num_cached} tokens: {num_prefilled} prefilled instead of "
            f"{num_prompt_tokens}",
            file=file,
        )
    print(
        f"prefill: {rate(num_prefilled, timing.prefill)}",
        f"decode:  {rate(num_decoded, timing.decode)}",
        f"cache:   {peak} blocks of {args.block_size} tokens in use at the peak, {peak * block_bytes / 1e6:.1f} MB; a "
        f"contiguous cache for this batch would reserve {reserved}, {reserved * block_bytes / 1e6:.1f} MB: "
        f"paging saved {100 * (1 - peak / reserved):.0f}%",
        f"kernel:  {kernels}, compiled in {timing.compile:.1f} s for {jax.devices()[0].device_kind}",
        sep="\n",
        file=file,
    )


def rate(num_tokens: int, seconds: float) -> str:
    return f"{num_tokens} tokens in {seconds:.2f} s" + (f", {num_tokens / seconds:.1f} tokens/s" if num_tokens else "")


if __name__ == "__main__":
    run(main)
