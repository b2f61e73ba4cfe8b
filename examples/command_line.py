"""What the command lines of the examples share: the model, the prompts, sampling, words to the person who waits."""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
from checkpoint import Checkpoint, CheckpointError, Tokenizer, default_path, load_model, read_checkpoint
from generation import PoolError
from llama import LlamaConfig
from sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Request:
    checkpoint: Checkpoint  # the model's weights are read later, by load_model
    texts: list[str]
    prompts: list[list[int]]  # the texts' tokens


def model_arguments() -> argparse.ArgumentParser:
    """A parent for a script's own parser."""
    parser = argparse.ArgumentParser(add_help=False)
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
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    parser.add_argument(
        "--dtype",
        type=dtype_name,
        choices=("float32", "bfloat16"),
        default="default",  # argparse converts it once it is needed: --help does not start a backend
        help="to compute in; default: float32, on a GPU bfloat16",
    )
    parser.add_argument("--block-size", type=positive, default=16, metavar="TOKENS")
    return parser


def sampling_arguments(*, temperature: float) -> argparse.ArgumentParser:
    """A parent for a script's own parser; `read_sampling` reads what it holds."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--temperature", type=float, default=temperature, help="0: the most likely token; default: %(default)s"
    )
    parser.add_argument("--top-k", type=positive, help="sample among the k most likely tokens")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample among the most likely with this probability together"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser


def read_sampling(args: argparse.Namespace) -> Sampling:
    """Raises `ValueError` with one sentence."""
    if not 0 <= args.temperature < float("inf") or not 0 < args.top_p <= 1:
        raise ValueError("--temperature must be 0 or a positive number, --top-p above 0 and at most 1.")
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed must be within 0 and 2^32 - 1; got {args.seed}.")
    return Sampling(args.temperature, args.top_k, args.top_p)


def read_request(args: argparse.Namespace, *, prefix: str = "") -> Request:
    """Raises `ValueError` or `CheckpointError` with one sentence. The prefix is put before each text."""
    texts = read_prompts(args)
    checkpoint = read_checkpoint(args.model or default_path())
    prompts = encode_prompts([prefix + text for text in texts], checkpoint.tokenizer, checkpoint.config, chat=args.chat)
    return Request(checkpoint, texts, prompts)


def compute[Result](
    parser: argparse.ArgumentParser, args: argparse.Namespace, function: Callable[..., Result], **options: Any
) -> tuple[Request, Result]:
    """What the command line asks for, and what the function makes of it.

    Calls `function(model, config, prompts, max_new_tokens=, block_size=, eos_ids=, dtype=, **options)`. Exits with 2
    and one sentence where the model, the prompts or the pool cannot be had.
    """
    try:
        request = read_request(args)
        model = load_model(request.checkpoint, args.dtype)
    except (ValueError, CheckpointError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    try:
        with matmul_precision(args):
            return request, function(
                model,
                request.checkpoint.config,
                request.prompts,
                max_new_tokens=args.max_new_tokens,
                block_size=args.block_size,
                eos_ids=() if args.ignore_eos else request.checkpoint.tokenizer.eos_ids,
                dtype=args.dtype,
                **options,
            )
    except PoolError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def describe_blocks(peak_blocks: jax.Array, peak_unshared: jax.Array, block_size: int) -> str:
    return (
        f"{peak_blocks} of {block_size} tokens in use at the peak where a loop that never shares takes "
        f"{peak_unshared}: {peak_unshared - peak_blocks} saved"
    )


def read_text(path: Path, name: str) -> str:
    """Raises `ValueError` with one sentence that calls the file by its name."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The {name} {path} cannot be read: {error}.") from error


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Raises `ValueError` with one sentence."""
    prompts = list(args.prompt)
    if args.prompt_file is not None:
        lines = read_text(args.prompt_file, "prompt file").split("\n")
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


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


def say(text: str) -> None:
    """A line for the person who waits: on stderr, since stdout holds results alone."""
    print(text, file=sys.stderr, flush=True)


def dtype_name(text: str) -> str:
    """By default on a GPU one that the kernels take; a CPU computes faster in float32."""
    if text != "default":
        return text
    return "bfloat16" if jax.default_backend() == "gpu" else "float32"


def matmul_precision(args: argparse.Namespace) -> AbstractContextManager:
    """To compute in: float32 is float32 on a GPU too, not TF32."""
    return jax.default_matmul_precision("highest" if args.dtype == "float32" else "default")
