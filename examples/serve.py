"""Serves a Llama, Mistral, Mixtral, Qwen, Gemma, gpt-oss or DeepSeek model over OpenAI's HTTP API, with an `Engine`.

    python examples/serve.py --port 8000
    curl localhost:8000/v1/chat/completions -H "Content-Type: application/json" -d '
        {"messages": [{"role": "user", "content": "What is a page table?"}]}'

The parts to copy are `lib/engine_loop.py`, which runs an engine in its own thread or process, and `lib/engines.py`,
which limits and routes its requests. The HTTP server around them is in `lib/app.py`, `lib/completions.py` and
`lib/http_server.py`.
`docs/serving.md` explains them.
"""

import argparse
import bisect
import dataclasses
import functools
import gc
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jaxpaged import CacheCapacity, EngineOptions, cache_capacity, layer_groups
from jaxpaged.grammar import Vocabulary
from lib.answer_start import control_ids
from lib.checkpoint import READ_ERRORS, Checkpoint, default_path, one_line, read_checkpoint
from lib.command_line import (
    RequestError,
    add_data_parallel,
    add_generation_config,
    add_tensor_parallel,
    checkpoint_arguments,
    dtype_on,
    parse_command,
    positive,
    read_sampling_defaults,
    run,
    say,
    start_backend,
)
from lib.engine_llama import layer_windows
from lib.engine_process import EngineProcesses
from lib.engine_runner import EngineRunner
from lib.engine_thread import EngineThread
from lib.engines import Engines
from lib.llama_config import LlamaConfig
from lib.replicas import with_own_seed
from lib.router import Router
from lib.served_model import ServedModel
from lib.tensor_parallel import repeated_kv_heads
from lib.tool_formats import FORMATS, find_format

if TYPE_CHECKING:  # from the extra "serve"; imported where it is used, so that --help works without it
    from lib.service import Service

API_KEY = "JAXPAGED_API_KEY"  # the environment variable
LOOPBACK = ("127.0.0.1", "::1", "localhost")  # hosts that only this machine reaches
# Options with a positive number: the default and the help text.
NUMBERS: dict[str, tuple[int | None, str]] = {
    "--max-num-seqs": (16, "completions that run at once on an engine"),
    "--max-model-len": (2048, "most tokens of a request, prompt and answer; at most the model's context"),
    "--chunk-tokens": (64, "most prompt tokens in a step; 256 to 512 suits a large model on a GPU"),
    "--steps-per-slice": (None, "steps between two pieces of a stream; default: the engine's own"),
    "--runtime-adapters": (
        0,
        "number of adapters that /v1/load_lora_adapter may load while the server runs, from any folder that it can "
        "read; default: none, and the route does not exist",
    ),
    "--max-adapter-rank": (16, "with --runtime-adapters: their largest rank"),
    "--num-speculative-tokens": (
        0,
        "maximum number of tokens per completion to draft in a step, from its repetitions; default: none",
    ),
    # OpenAI's API allows 5 in completions, and 20 in chats.
    "--max-logprobs": (5, "maximum number of likely tokens that a request may get with each token"),
    "--host-cache-mb": (
        None,
        "with --prefix-cache: host memory of an engine for blocks that leave its pool, in 10^6 bytes; default: none",
    ),
    "--max-queue": (128, "completions that may wait for others to end"),
    "--max-body-bytes": (2**20, "larger bodies are refused"),
    "--drain-seconds": (30, "time for requests under way after SIGTERM or Ctrl-C"),
}
FLAGS = {
    "--prefix-cache": "let requests share the blocks of equal beginnings",
    "--reasoning-in-content": "leave the reasoning of a chat's answer in its content, instead of in reasoning_content",
    "--log-requests": "print a line for each POST request",
    "--enable-tokenizer-info-endpoint": "answer /tokenizer_info, for clients that count tokens, such as lm-eval",
}
# Options of --help; --help-all shows the others too.
USUAL = """--host --port --api-key --served-model-name --adapter --data-parallel --tensor-parallel --dtype --cache-mb
    --max-num-seqs --max-model-len --chunk-tokens --num-speculative-tokens --prefix-cache"""


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parents = [checkpoint_arguments(starts_jax=False)]
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], parents=parents)
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s, which only this machine reaches")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one; default: %(default)s")
    parser.add_argument(
        "--api-key",
        help=f"the key that clients must send; default: ${API_KEY}, which other users of the machine cannot see",
    )
    parser.add_argument(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="let the scripts of web pages from there send requests; '*': from anywhere; default: none",
    )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names of the model in requests; answers have the first; default: the file's or folder's name",
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        type=named_folder,
        metavar="NAME=FOLDER",
        help="an adapter (LoRA) in PEFT's form, which requests name as their model; may be given several times",
    )
    parser.add_argument(
        "--tool-call-parser",
        choices=FORMATS,
        help="how the model writes tool calls; default: chosen from the chat template",
    )
    add_data_parallel(parser)
    add_tensor_parallel(parser)
    add_generation_config(parser)
    pool = parser.add_mutually_exclusive_group()
    pool.add_argument(
        "--num-blocks",
        type=positive,
        help="blocks in an engine's pool; default: what --max-num-seqs completions need at --max-model-len",
    )
    pool.add_argument("--cache-mb", type=positive, metavar="N", help="memory of an engine's pool, in 10^6 bytes")
    for name, (default, meaning) in NUMBERS.items():
        meaning += "; default: %(default)s" if default else ""
        parser.add_argument(name, type=positive, default=default, metavar="N", help=meaning)
    for name, meaning in FLAGS.items():
        parser.add_argument(name, action="store_true", help=meaning)
    args = parse_command(parser, arguments, usual=USUAL)
    args.api_key = args.api_key or os.environ.get(API_KEY) or None
    return args


def named_folder(text: str) -> tuple[str, Path]:
    name, separator, folder = text.partition("=")
    if not (name and separator and folder):
        raise argparse.ArgumentTypeError(f"must be NAME=FOLDER; got {text}")
    return name, Path(folder)


def model_name(path: Path) -> str:
    if not path.exists():
        return str(path)  # a name on the hub
    return path.stem if path.is_file() else path.resolve().name


def find_capacity(config: LlamaConfig, args: argparse.Namespace) -> CacheCapacity:
    """Size of the pool that fits into --cache-mb. Raises `RequestError`."""
    # Repeated KV heads count each time. A latent counts once, though each device holds all of it.
    sizes = repeated_kv_heads(config, args.tensor_parallel).cache_sizes
    try:
        capacity = cache_capacity(
            args.cache_mb * 10**6,
            [min(args.max_model_len, config.context)],
            num_layers=config.num_layers,
            **sizes,
            block_size=args.block_size,
            dtype=args.dtype,
            windows=config.windows,
        )
    except ValueError as error:
        raise RequestError(f"--cache-mb {args.cache_mb} is too small: {error}") from error
    say(
        f"The cache takes {capacity.num_bytes / 1e6:,.1f} MB: {capacity.num_blocks:,} blocks for "
        f"{capacity.num_tokens:,} tokens, or {capacity.num_seqs:,} of the longest requests."
    )
    return capacity


def find_max_model_len(config: LlamaConfig, args: argparse.Namespace, num_blocks: int | None) -> int:
    """Maximum number of tokens of a request. Prints a message if it is below --max-model-len. Raises `RequestError`."""
    max_model_len, reason = min(args.max_model_len, config.context), f"the model's context is {config.context:,}"
    if num_blocks is not None:
        groups = layer_groups(layer_windows(config))
        blocks_for = functools.partial(groups.num_blocks, block_size=args.block_size)
        that_fit = bisect.bisect_right(range(max_model_len + 1), num_blocks - 1, key=blocks_for) - 1
        if that_fit < max_model_len:
            max_model_len, reason = that_fit, f"the pool has {num_blocks:,} blocks"
    if max_model_len < 2:
        raise RequestError("A request must have room for two tokens; pass a larger --max-model-len or --num-blocks.")
    if max_model_len < args.max_model_len:
        say(f"Requests may have {max_model_len:,} tokens, fewer than --max-model-len {args.max_model_len:,}: {reason}.")
    return max_model_len


def check_arguments(args: argparse.Namespace, config: LlamaConfig, served_names: list[str]) -> None:
    """Raises `RequestError` if options conflict."""
    names = [*served_names, *(name for name, _ in args.adapter)]
    if len(set(names)) < len(names):
        raise RequestError(f"Each --adapter and --served-model-name needs a name of its own; got {', '.join(names)}.")
    if (args.adapter or args.runtime_adapters) and args.tensor_parallel > 1:
        raise RequestError("Adapters are for one device; leave --tensor-parallel out.")
    if args.host_cache_mb and not args.prefix_cache:
        raise RequestError("--host-cache-mb keeps cached beginnings: pass --prefix-cache too.")
    if args.host_cache_mb and set(layer_windows(config)) != {None}:
        raise RequestError("--host-cache-mb is not for models with windows; leave it out.")


def read_vocabulary(checkpoint: Checkpoint) -> Vocabulary | None:
    """The bytes of the tokens, for grammars. Prints a message and returns None if the tokenizer does not have them."""
    tokenizer = checkpoint.tokenizer
    try:
        return Vocabulary.from_tokenizer(
            tokenizer.tokenizer,
            tokenizer.eos_ids,
            vocab_size=checkpoint.config.vocab_size,
            control_token_ids=control_ids(tokenizer),
        )
    except READ_ERRORS as error:
        say(f"Requests with a grammar are refused: {one_line(error)}.")
        return None


def create_service(args: argparse.Namespace) -> "Service":
    """Loads the model and compiles the engines. Raises `CheckpointError` and `RequestError`."""
    if args.data_parallel == 1:
        return make_service(args, start_backend, create_thread)
    with EngineProcesses(args.data_parallel, num_devices=args.tensor_parallel) as processes:

        def create(model: ServedModel, checkpoint: Checkpoint) -> Sequence[EngineRunner]:
            options = [with_own_seed(model.options, i) for i in range(args.data_parallel)]
            return processes.create([dataclasses.replace(model, options=own) for own in options])

        return make_service(args, processes.backend, create)


def create_thread(model: ServedModel, checkpoint: Checkpoint) -> Sequence[EngineRunner]:
    replica = model.load(checkpoint)
    return [EngineThread(model.create(replica), replica)]


def make_service(
    args: argparse.Namespace,
    find_backend: Callable[[], str],
    create: Callable[[ServedModel, Checkpoint], Sequence[EngineRunner]],
) -> "Service":
    """A service with the engines that `create` makes. `find_backend` returns their backend."""
    from lib.adapter_slots import AdapterSlots
    from lib.openai_forms import MOST_STOP_IDS
    from lib.openai_logits import MOST_LISTED
    from lib.service import Service

    path = args.model or default_path()
    checkpoint = read_checkpoint(path)
    backend = find_backend()
    args.dtype = args.dtype or dtype_on(backend)
    served_names = args.served_model_name or [model_name(path)]
    check_arguments(args, checkpoint.config, served_names)
    num_blocks = args.num_blocks if args.cache_mb is None else find_capacity(checkpoint.config, args).num_blocks
    max_model_len = find_max_model_len(checkpoint.config, args, num_blocks)
    options = EngineOptions(
        max_num_seqs=args.max_num_seqs,
        max_model_len=max_model_len,
        chunk_tokens=args.chunk_tokens,
        steps_per_slice=args.steps_per_slice,
        prefix_cache=args.prefix_cache,
        host_cache_bytes=args.host_cache_mb and args.host_cache_mb * 10**6,
        num_adapters=len(args.adapter) + args.runtime_adapters,
        num_speculative_tokens=args.num_speculative_tokens,
        max_logprobs=args.max_logprobs,
        num_stop_ids=len(checkpoint.tokenizer.eos_ids) + MOST_STOP_IDS,
        num_listed_tokens=MOST_LISTED,
        seed=secrets.randbits(32),
    )
    vocabulary = read_vocabulary(checkpoint)
    model = ServedModel(
        path,
        options,
        dtype=args.dtype,
        block_size=args.block_size,
        adapters=[folder for _, folder in args.adapter],
        num_empty=args.runtime_adapters,
        most_rank=args.max_adapter_rank if args.runtime_adapters else 0,
        tensor_parallel=args.tensor_parallel,
        num_blocks=num_blocks,
        vocabulary=vocabulary,
    )
    return Service(
        Engines(
            create(model, checkpoint),
            most_completions=args.data_parallel * args.max_num_seqs + args.max_queue,
            router=Router(args.block_size, has_affinity=args.prefix_cache),
        ),
        checkpoint,
        served_names=tuple(served_names),
        adapters=AdapterSlots(
            [name for name, _ in args.adapter],
            num_empty=args.runtime_adapters,
        ),
        max_model_len=max_model_len,
        max_logprobs=args.max_logprobs,
        api_key=args.api_key,
        max_body_bytes=args.max_body_bytes,
        allow_control_tokens=args.allow_control_tokens,
        sampling_defaults=read_sampling_defaults(args, checkpoint),
        splits_reasoning=not args.reasoning_in_content,
        tool_format=FORMATS.get(args.tool_call_parser) or find_format(checkpoint.tokenizer.chat_template),
        vocabulary=vocabulary,
        has_tokenizer_info=args.enable_tokenizer_info_endpoint,
        allowed_origins=tuple(args.allowed_origins),
        logs_requests=args.log_requests,
        checks_host=args.api_key is None and args.host in LOOPBACK,
    )


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if args.data_parallel > 1:
        jax.config.update("jax_platforms", "cpu")  # the GPUs are for the engines' processes
    from lib.http_server import Server, bind

    with bind(args.host, args.port) as listener:
        say("Loading the model and compiling the engine.")
        service = create_service(args)
        if args.api_key is None and args.host not in LOOPBACK:
            say(f"Warning: anyone who can reach {args.host} can use this server; set ${API_KEY} to prevent that.")
        host = f"[{args.host}]" if ":" in args.host else args.host

        def on_start() -> None:
            signal.set_wakeup_fd(-1)  # from now on Ctrl-C drains, instead of ending the process at once
            gc.collect()
            gc.freeze()  # to look through all that JAX has traced would stop every answer for 0.1 s or more
            say(f"Serving {service.served_names[0]} at http://{host}:{listener.getsockname()[1]}")

        Server(service, drain_seconds=args.drain_seconds, on_start=on_start).run([listener])
    if service.engines.failure is not None:
        say(f"The engine failed: {service.engines.failure}")
        return 1
    return 0


if __name__ == "__main__":
    run(main)
