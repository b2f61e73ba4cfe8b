"""What the command lines of the examples share: the model, the prompts, sampling, words to the person who waits."""

import argparse
import contextlib
import dataclasses
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax

from lib.checkpoint import Checkpoint, CheckpointError, default_path, load_model, one_line, read_checkpoint
from lib.extras import missing_extra
from lib.generation import PoolError
from lib.sampling import Sampling
from lib.tensor_parallel import DevicesError

MOST_TEXT_BYTES = 2**28  # beyond this a file of prompts is a slip of the keyboard, or /dev/zero


class RequestError(Exception):
    """What the command line asks for cannot be done; the message is one sentence for the user."""


@dataclasses.dataclass(frozen=True)
class Request:
    checkpoint: Checkpoint  # the model's weights are read later, by load_model
    texts: list[str]
    prompts: list[list[int]]  # the texts' tokens


def model_arguments() -> argparse.ArgumentParser:
    """A parent for a script's own parser: the model and the prompts."""
    parser = argparse.ArgumentParser(add_help=False, parents=[checkpoint_arguments()])
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
    return parser


def checkpoint_arguments() -> argparse.ArgumentParser:
    """A parent for a script's own parser: the model."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--model",
        type=Path,
        help="a GGUF file of the Llama family, or a Hugging Face folder of a Llama, Mistral, Qwen2, Qwen3, Gemma 2, "
        "Gemma 3 or gpt-oss; default: SmolLM2-135M-Instruct",
    )
    parser.add_argument(
        "--allow-control-tokens",
        action="store_true",
        help="let chat messages spell control tokens, such as <|im_end|>; they are plain text otherwise",
    )
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
    """Raises `RequestError`."""
    if not 0 <= args.temperature < float("inf") or not 0 < args.top_p <= 1:
        raise RequestError("--temperature must be 0 or a positive number, --top-p above 0 and at most 1.")
    if not 0 <= args.seed < 2**32:
        raise RequestError(f"--seed must be within 0 and 2^32 - 1; got {args.seed}.")
    return Sampling(args.temperature, args.top_k, args.top_p)


def read_request(args: argparse.Namespace, *, prefix: str = "") -> Request:
    """Raises `RequestError` or `CheckpointError`. The prefix is put before each text."""
    texts = read_prompts(args)
    checkpoint = read_checkpoint(args.model or default_path())
    return Request(checkpoint, texts, encode_prompts([prefix + text for text in texts], checkpoint, args))


def compute[Result](
    args: argparse.Namespace, function: Callable[..., Result], **options: Any
) -> tuple[Request, Result]:
    """What the command line asks for, and what the function makes of it.

    Calls `function(model, config, prompts, max_new_tokens=, block_size=, eos_ids=, dtype=, **options)`.
    """
    request = read_request(args)
    model = load_model(request.checkpoint, args.dtype)
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


def describe_blocks(peak_blocks: jax.Array, peak_unshared: jax.Array, block_size: int) -> str:
    return (
        f"{peak_blocks} of {block_size} tokens in use at the peak where a loop that never shares takes "
        f"{peak_unshared}: {peak_unshared - peak_blocks} saved"
    )


def read_text(path: Path, name: str) -> str:
    """Raises `RequestError` that calls the file by its name."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_TEXT_BYTES + 1)
        if len(content) > MOST_TEXT_BYTES:
            raise RequestError(f"The {name} {path} holds more than {MOST_TEXT_BYTES} bytes.")
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"The {name} {path} cannot be read: {error}.") from error


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Raises `RequestError`."""
    prompts = list(args.prompt)
    if args.prompt_file is not None:
        lines = read_text(args.prompt_file, "prompt file").split("\n")
        prompts += [line.rstrip("\r") for line in lines if line.strip()]
    if not prompts:
        raise RequestError("There is no prompt; pass --prompt TEXT or a --prompt-file that has a line.")
    if not all(prompts):
        raise RequestError("A prompt is empty; write something in it or leave it out.")
    if any("\udc80" <= character <= "\udcff" for prompt in prompts for character in prompt):
        raise RequestError("A prompt is not valid UTF-8.")
    return prompts


def encode_prompts(prompts: list[str], checkpoint: Checkpoint, args: argparse.Namespace) -> list[list[int]]:
    """Raises `RequestError` or `CheckpointError`."""
    tokenizer, config = checkpoint.tokenizer, checkpoint.config
    if args.chat:
        encoded = tokenizer.encode_chat(prompts, allow_control_tokens=args.allow_control_tokens)
    else:
        encoded = [tokenizer.encode(prompt) for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise RequestError(f"The prompt {prompt!r} holds no token.")
        if len(ids) > config.context:
            raise RequestError(
                f"The prompt {prompt[:40]!r}... has {len(ids)} tokens; the model's context is {config.context}."
            )
        if max(ids) >= config.vocab_size:
            raise CheckpointError(
                f"The checkpoint's tokenizer gives token {max(ids)}; the model knows {config.vocab_size} tokens."
            )
    return encoded


def add_tensor_parallel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tensor-parallel",
        type=positive,
        default=1,
        metavar="DEVICES",
        help="cut the model's heads and hidden features over so many devices",
    )


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


def say(text: str) -> None:
    """A line for the person who waits: on stderr, since stdout holds results alone."""
    print(text, file=sys.stderr, flush=True)


def dtype_name(text: str) -> str:
    """By default on a GPU one that the kernels take; a CPU computes faster in float32. Raises `RequestError`."""
    try:
        backend = jax.default_backend()
    except RuntimeError as error:  # JAX_PLATFORMS names one that is not here
        raise RequestError(f"JAX does not start: {one_line(error)}.") from error
    if text != "default":
        return text
    return "bfloat16" if backend == "gpu" else "float32"


def matmul_precision(args: argparse.Namespace) -> contextlib.AbstractContextManager:
    """To compute in: float32 is float32 on a GPU too, not TF32."""
    return jax.default_matmul_precision("highest" if args.dtype == "float32" else "default")


# A script from its start to its end.


def run(main: Callable[[], int | None]) -> NoReturn:
    """Ends the process with the exit code of `main`; 141 where the reader of stdout is gone, 130 after Ctrl-C."""
    end_on_interrupt()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or io.TextIOWrapper(io.BytesIO())  # None where it is closed
        stream.reconfigure(errors="backslashreplace")  # ASCII cannot say all that a model does
        setattr(sys, name, stream)
    try:
        try:
            code = exit_code(main)
        except SystemExit as done:  # argparse: after --help, or a bad option
            code = done.code
        print(end="", flush=True)
    except OSError as error:  # of writing: what is read has errors of its own
        # Not sys.exit, which would write once more what could not be written.
        if isinstance(error, BrokenPipeError):
            os._exit(141)
        with contextlib.suppress(OSError):
            say(f"{script()}: The results cannot be written: {error.strerror}.")
        os._exit(2)
    sys.exit(code)


def exit_code(main: Callable[..., int | None], *arguments: Any) -> int | str | None:
    """What `main` returns; 2 and one sentence on stderr where it refuses what it is asked for."""
    try:
        return main(*arguments)
    except (RequestError, CheckpointError, PoolError, DevicesError) as error:
        sentence = str(error)
    except ModuleNotFoundError as error:
        if (found := missing_extra(error)) is None:
            raise
        sentence = found
    say(f"{script()}: {sentence}")
    return 2


def script() -> str:
    return Path(sys.argv[0]).name


def end_on_interrupt() -> None:
    """Ctrl-C ends the process with 130 at once.

    Python alone raises KeyboardInterrupt once a call of XLA returns, and one call may be all of decoding. So a thread
    waits for the byte that Python writes when the signal arrives.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # a job in the background ignores it
    wakes, byte = os.pipe()
    os.set_blocking(byte, False)
    signal.set_wakeup_fd(byte)
    signal.signal(signal.SIGINT, lambda *_: None)

    def wait() -> None:
        os.read(wakes, 1)
        with contextlib.suppress(OSError):
            say(f"\n{script()}: Interrupted.")
        os._exit(130)

    threading.Thread(target=wait, daemon=True).start()
