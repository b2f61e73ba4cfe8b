"""Shared parts of the examples' command lines: model, prompts, sampling, messages and exit codes."""

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

from lib.chat_template import ChatTemplateError, RendererBusyError
from lib.checkpoint import Checkpoint, CheckpointError, default_path, load_model, one_line, read_checkpoint
from lib.extras import missing_extra
from lib.sampling import Sampling
from lib.start import PoolError
from lib.tensor_parallel import DevicesError

MODEL_HELP = (
    "a GGUF file of the Llama family, or a Hugging Face folder of a Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, "
    "Gemma 2, Gemma 3, gpt-oss, DeepSeek V2 or V3, or its name on the hub, such as Qwen/Qwen3-0.6B; default: "
    "SmolLM2-135M-Instruct"
)
MOST_TEXT_BYTES = 2**28  # a larger file of prompts is a mistake, or /dev/zero


class RequestError(Exception):
    """The command line is impossible; the message is one sentence for the user."""


# Errors that are one sentence for the user.
REFUSALS = RequestError, CheckpointError, ChatTemplateError, RendererBusyError, PoolError, DevicesError


@dataclasses.dataclass(frozen=True)
class Request:
    checkpoint: Checkpoint  # the model's weights are read later, by load_model
    texts: list[str]
    prompts: list[list[int]]  # the texts' tokens


def model_arguments() -> argparse.ArgumentParser:
    """Arguments for the model and the prompts, as a parent of a script's own parser."""
    parser = argparse.ArgumentParser(add_help=False, parents=[checkpoint_arguments()])
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        help="may be given several times; --prompt=TEXT if it begins with a dash",
    )
    parser.add_argument(
        "--prompt-file", type=Path, help="one prompt a line, after the prompts of --prompt; empty lines are skipped"
    )
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    parser.add_argument(
        "--max-new-tokens", type=positive, default=64, metavar="N", help="of each prompt; default: %(default)s"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    return parser


def checkpoint_arguments(*, starts_jax: bool = True) -> argparse.ArgumentParser:
    """Arguments for the model, as a parent of a script's own parser.

    If the script does not start JAX, `--dtype` is None by default; see `dtype_on`.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--model",
        type=Path,
        help=MODEL_HELP,
    )
    parser.add_argument(
        "--allow-control-tokens",
        action="store_true",
        help="let chat messages spell control tokens, such as <|im_end|>; they are plain text otherwise",
    )
    parser.add_argument(
        "--dtype",
        type=dtype_name if starts_jax else str,
        choices=("float32", "bfloat16"),
        default="default" if starts_jax else None,  # argparse converts a text: --help does not start a backend
        help="dtype of weights and activations; default: float32, on a GPU bfloat16",
    )
    parser.add_argument("--block-size", type=positive, default=16, metavar="TOKENS", help="default: %(default)s")
    return parser


def sampling_arguments(*, temperature: float) -> argparse.ArgumentParser:
    """Arguments for sampling, as a parent of a script's own parser; `read_sampling` reads them."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.set_defaults(usual_temperature=temperature)
    parser.add_argument(
        "--temperature", type=float, help=f"0: the most likely token; default: the model's, else {temperature:g}"
    )
    parser.add_argument(
        "--top-k", type=positive, help="sample among the k most likely tokens; default: the model's, else all"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        help="sample among the most likely tokens whose probabilities add up to this; default: the model's, else 1",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    add_generation_config(parser)
    return parser


def add_generation_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="auto: temperature, top_p and top_k default to the model's generation_config.json; default: %(default)s",
    )


def read_sampling_defaults(args: argparse.Namespace, checkpoint: Checkpoint) -> dict[str, float]:
    """The model's sampling defaults, unless --generation-config is none. Prints them."""
    if args.generation_config == "none" or not checkpoint.sampling_defaults:
        return {}
    values = ", ".join(f"{name} {value:g}" for name, value in checkpoint.sampling_defaults.items())
    say(f"Default sampling of the model: {values}; --generation-config none ignores it.")
    return checkpoint.sampling_defaults


def read_sampling(args: argparse.Namespace, checkpoint: Checkpoint) -> Sampling:
    """Raises `RequestError`."""
    given = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p") if getattr(args, name) is not None}
    usual: dict[str, Any] = dict(temperature=args.usual_temperature)
    sampling = Sampling(**usual | read_sampling_defaults(args, checkpoint) | given)
    if not 0 <= sampling.temperature < float("inf") or not 0 < sampling.top_p <= 1:
        raise RequestError("--temperature must be 0 or a positive number, --top-p above 0 and at most 1.")
    if not 0 <= args.seed < 2**32:
        raise RequestError(f"--seed must be within 0 and 2^32 - 1; got {args.seed}.")
    return sampling


def read_request(args: argparse.Namespace, *, prefix: str = "") -> Request:
    """Reads the checkpoint and the prompts. `prefix` is put before each text.

    Raises `RequestError` or `CheckpointError`.
    """
    texts = read_prompts(args)
    checkpoint = read_checkpoint(args.model or default_path())
    return Request(checkpoint, texts, encode_prompts([prefix + text for text in texts], checkpoint, args))


def compute[Result](
    args: argparse.Namespace, request: Request, function: Callable[..., Result], **options: Any
) -> Result:
    """Loads the model and calls the function for the request.

    Calls `function(model, config, prompts, max_new_tokens=, block_size=, eos_ids=, dtype=, **options)`.
    """
    model = load_model(request.checkpoint, args.dtype)
    with matmul_precision(args.dtype):
        return function(
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
        f"{peak_blocks} of {block_size} tokens in use at the peak; without sharing {peak_unshared}: "
        f"{peak_unshared - peak_blocks} saved"
    )


def read_text(path: Path, name: str) -> str:
    """The file's text. Raises `RequestError` with `name` in its message."""
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
        raise RequestError("There is no prompt; write it after the model, or pass a --prompt-file that has a line.")
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
        help="shard the model's heads and hidden features over this many devices; default: %(default)s",
    )


def add_data_parallel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data-parallel",
        type=positive,
        default=1,
        metavar="N",
        help="engines, each with a whole model on its own devices; default: %(default)s",
    )


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


def say(text: str) -> None:
    """Prints a message on stderr; stdout holds only results."""
    print(text, file=sys.stderr, flush=True)


def dtype_name(text: str) -> str:
    """Raises `RequestError`."""
    backend = start_backend()
    return dtype_on(backend) if text == "default" else text


def dtype_on(backend: str) -> str:
    """The default is bfloat16 on a GPU, which the kernels need, and float32, which is faster, on a CPU."""
    return "bfloat16" if backend == "gpu" else "float32"


def start_backend() -> str:
    """The name of JAX's backend. Raises `RequestError`."""
    try:
        return jax.default_backend()
    except RuntimeError as error:  # JAX_PLATFORMS names a platform that is missing
        raise RequestError(f"JAX does not start: {one_line(error)}.") from error


def matmul_precision(dtype: str) -> contextlib.AbstractContextManager:
    """With --dtype float32, matrix products on a GPU use float32 instead of TF32."""
    return jax.default_matmul_precision("highest" if dtype == "float32" else "default")


def parse_command(
    parser: argparse.ArgumentParser, arguments: list[str] | None, *, usual: str, has_prompts: bool = False
) -> argparse.Namespace:
    """Parses the options and, before, between or after them, MODEL and the PROMPTs of a program that has them.

    Without MODEL, the first PROMPT must have a space. --help shows the options in `usual`, --help-all every option.
    """
    parser.usage = "%(prog)s [options] [MODEL]" + " [PROMPT ...]" * has_prompts
    parser.add_argument("--help-all", action="help", help="show all options and exit")
    if "--help-all" not in (sys.argv if arguments is None else arguments):
        for action in parser._actions:
            if not {"--help", "--help-all", *usual.split()} & {*action.option_strings}:
                action.help = argparse.SUPPRESS
    parser.add_argument("words", nargs="?", metavar="MODEL", help=MODEL_HELP)
    if has_prompts:
        parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a text to continue, or a message with --chat")
    args = parser.parse_intermixed_args(arguments)
    words = [*([] if args.words is None else [args.words]), *(args.prompts if has_prompts else [])]
    if words and args.model is None and not (has_prompts and is_prompt(words[0])):
        args.model = Path(words.pop(0))
    if has_prompts:
        args.prompt = [*words, *args.prompt]
    elif words:
        parser.error(f"there is one model; got {words[0]} and --model {args.model}")
    return args


def is_prompt(word: str) -> bool:
    """Whether a word that may be a model is a prompt: no name on the hub has a space, and a path exists."""
    return any(map(str.isspace, word)) and not Path(word).exists()


# Running a script.


def run(main: Callable[[], int | None]) -> NoReturn:
    """Ends the process with the exit code of `main`; 141 if the reader of stdout is gone, 130 after Ctrl-C."""
    keep_compiled_programs()
    end_on_interrupt()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or io.TextIOWrapper(io.BytesIO())  # None if it is closed
        stream.reconfigure(errors="backslashreplace")  # a model's text need not fit into ASCII
        setattr(sys, name, stream)
    try:
        try:
            code = exit_code(main)
        except SystemExit as done:  # argparse: after --help, or a bad option
            code = done.code
        print(end="", flush=True)
    except OSError as error:  # from writing: reading raises other errors
        # Not sys.exit, which would try to write the same again.
        if isinstance(error, BrokenPipeError):
            os._exit(141)
        with contextlib.suppress(OSError):
            say(f"{script()}: The results cannot be written: {error.strerror}.")
        os._exit(2)
    sys.exit(code)


def exit_code(main: Callable[..., int | None], *arguments: Any) -> int | str | None:
    """The result of `main`, or 2 if it refuses the request, with one sentence on stderr."""
    try:
        return main(*arguments)
    except (*REFUSALS, ModuleNotFoundError) as error:
        if (sentence := refusal(error)) is None:
            raise
        say(f"{script()}: {sentence}")
        return 2


def refusal(error: BaseException) -> str | None:
    """The sentence for the user, if the error refuses a request or tells of a missing extra."""
    if isinstance(error, REFUSALS):
        return str(error)
    return missing_extra(error) if isinstance(error, ModuleNotFoundError) else None


def script() -> str:
    return Path(sys.argv[0]).name


def keep_compiled_programs() -> None:
    """Caches compiled programs in the user's cache folder. JAX_COMPILATION_CACHE_DIR overrides it; empty: no cache."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxpaged" / "compiled"
    with contextlib.suppress(OSError):  # a user may have no folder to write to
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))


def end_on_interrupt() -> None:
    """Ctrl-C ends the process with 130 at once.

    Python raises KeyboardInterrupt only after a call of XLA returns, and one call may decode everything. So a thread
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
