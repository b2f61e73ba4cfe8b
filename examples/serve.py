"""A Llama, Mistral, Qwen, Gemma, gpt-oss or DeepSeek behind an OpenAI-compatible HTTP server, on a `jaxpaged.Engine`.

    python examples/serve.py --port 8000
    curl localhost:8000/v1/chat/completions -H "Content-Type: application/json" -d '
        {"messages": [{"role": "user", "content": "What is a page table?"}]}'

`lib/engine_thread.py` is the part to copy: the thread that owns the engine. The HTTP around it is `lib/app.py`,
`lib/completions.py` and `lib/http_server.py`; `docs/serving.md` explains them.
"""

import argparse
import bisect
import functools
import os
import secrets
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged import CacheCapacity, EngineOptions, cache_capacity, layer_groups
from lib.adapters import adapt, read_adapter, replace_adapter
from lib.checkpoint import default_path, load_model, read_checkpoint
from lib.command_line import (
    RequestError,
    add_generation_config,
    add_tensor_parallel,
    checkpoint_arguments,
    matmul_precision,
    positive,
    read_sampling_defaults,
    run,
    say,
)
from lib.engine_llama import create_engine, layer_windows
from lib.engine_thread import EngineThread
from lib.llama_config import LlamaConfig
from lib.tensor_parallel import spread

if TYPE_CHECKING:  # the extra "serve" is imported where it is used, so that --help works without
    from lib.service import Service

API_KEY = "JAXPAGED_API_KEY"  # the environment variable
MOST_TOKENS = 2048  # in a request, by default
MOST_LOGPROBS = 5  # by default; OpenAI's API allows 5 in completions, and 20 in chats


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], parents=[checkpoint_arguments()])
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s, which only this machine reaches")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one; default: %(default)s")
    parser.add_argument(
        "--api-key",
        help=f"the key that clients must send; default: ${API_KEY}, which other users of the machine cannot see",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=positive,
        default=16,
        metavar="N",
        help="completions that run at once; default: %(default)s",
    )
    parser.add_argument(
        "--max-model-len",
        type=positive,
        default=MOST_TOKENS,
        metavar="N",
        help="most tokens of a request, prompt and answer; default: %(default)s, or the model's context if smaller",
    )
    pool = parser.add_mutually_exclusive_group()
    pool.add_argument(
        "--num-blocks",
        type=positive,
        help="blocks in the pool; default: what --max-num-seqs completions need at --max-model-len",
    )
    pool.add_argument("--cache-mb", type=positive, metavar="N", help="memory of the pool, all layers, in 10^6 bytes")
    parser.add_argument(
        "--chunk-tokens",
        type=positive,
        default=64,
        metavar="N",
        help="most prompt tokens in a step; 256 to 512 suits a large model on a GPU; default: %(default)s",
    )
    parser.add_argument(
        "--steps-per-slice",
        type=positive,
        metavar="N",
        help="steps between two pieces of a stream; default: the engine's own",
    )
    add_tensor_parallel(parser)
    add_generation_config(parser)
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        type=named_folder,
        metavar="NAME=FOLDER",
        help="an adapter (LoRA) in PEFT's form, which requests name as their model; may be given several times",
    )
    parser.add_argument(
        "--runtime-adapters",
        type=positive,
        default=0,
        metavar="N",
        help="how many more adapters /v1/load_lora_adapter may load while the server runs, from any folder that it can "
        "read; default: none, and the path does not exist",
    )
    parser.add_argument(
        "--max-adapter-rank",
        type=positive,
        default=16,
        metavar="N",
        help="with --runtime-adapters: their largest rank; default: %(default)s",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=positive,
        default=0,
        metavar="N",
        help="most tokens of a completion to guess in a step, from what it repeats; default: none",
    )
    parser.add_argument(
        "--max-logprobs",
        type=positive,
        default=MOST_LOGPROBS,
        metavar="N",
        help="the most likely tokens that a request may ask for beside each of its tokens; default: %(default)s",
    )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="what requests may name as their model; answers have the first; default: the file's or folder's name",
    )
    parser.add_argument(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="let the scripts of web pages from there send requests; '*': from anywhere; default: none",
    )
    parser.add_argument(
        "--reasoning-in-content",
        action="store_true",
        help="leave the reasoning of a chat's answer in its content, instead of in reasoning_content",
    )
    parser.add_argument("--log-requests", action="store_true", help="print a line for each POST request")
    parser.add_argument(
        "--enable-tokenizer-info-endpoint",
        action="store_true",
        help="answer /tokenizer_info, for clients that count tokens, such as lm-eval",
    )
    parser.add_argument("--prefix-cache", action="store_true", help="let requests share the blocks of equal beginnings")
    parser.add_argument(
        "--host-cache-mb",
        type=positive,
        metavar="N",
        help="with --prefix-cache: host memory for what the pool has no room for, in 10^6 bytes; default: none",
    )
    parser.add_argument(
        "--max-queue",
        type=positive,
        default=128,
        metavar="N",
        help="completions that may wait for others to end; default: %(default)s",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=positive,
        default=2**20,
        metavar="N",
        help="larger bodies are refused; default: %(default)s",
    )
    parser.add_argument(
        "--drain-seconds",
        type=positive,
        default=30,
        metavar="N",
        help="time for requests under way after SIGTERM or Ctrl-C; default: %(default)s",
    )
    args = parser.parse_args(arguments)
    args.api_key = args.api_key or os.environ.get(API_KEY) or None
    return args


def named_folder(text: str) -> tuple[str, Path]:
    name, separator, folder = text.partition("=")
    if not (name and separator and folder):
        raise argparse.ArgumentTypeError(f"must be NAME=FOLDER; got {text}")
    return name, Path(folder)


def model_name(path: Path) -> str:
    if not path.exists():
        return str(path)  # of the hub
    return path.stem if path.is_file() else path.resolve().name


def find_capacity(config: LlamaConfig, args: argparse.Namespace) -> CacheCapacity:
    """What fits into --cache-mb. Raises `RequestError`."""
    # Fewer than devices are repeated. The latent counts once: each device holds all of it.
    kv_heads = 1 if config.latent is not None else max(config.num_kv_heads, args.tensor_parallel)
    try:
        return cache_capacity(
            args.cache_mb * 10**6,
            [min(args.max_model_len, config.context)],
            num_layers=config.num_layers,
            **config.cache_sizes | dict(num_kv_heads=kv_heads),
            block_size=args.block_size,
            dtype=args.dtype,
            windows=config.windows,
        )
    except ValueError as error:
        raise RequestError(f"--cache-mb {args.cache_mb} is too small: {error}") from error


def find_max_model_len(config: LlamaConfig, args: argparse.Namespace, num_blocks: int | None) -> int:
    """The most tokens of a request. Reports that it is less than --max-model-len. Raises `RequestError`."""
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


def create_service(args: argparse.Namespace) -> "Service":
    """Loads the model and compiles the engine. Raises `CheckpointError`."""
    from lib.adapter_slots import AdapterSlots
    from lib.openai_forms import MOST_STOP_IDS
    from lib.service import Service

    path = args.model or default_path()
    checkpoint = read_checkpoint(path)
    served_names = args.served_model_name or [model_name(path)]
    names = [*served_names, *(name for name, _ in args.adapter)]
    if len(set(names)) < len(names):
        raise RequestError(f"Each --adapter and --served-model-name needs a name of its own; got {', '.join(names)}.")
    num_adapters = len(args.adapter) + args.runtime_adapters
    if num_adapters and args.tensor_parallel > 1:
        raise RequestError("Adapters are for one device; leave --tensor-parallel out.")
    if args.host_cache_mb and not args.prefix_cache:
        raise RequestError("--host-cache-mb keeps cached beginnings: pass --prefix-cache too.")
    if args.host_cache_mb and set(layer_windows(checkpoint.config)) != {None}:
        raise RequestError("--host-cache-mb is not for models with windows; leave it out.")
    num_blocks = args.num_blocks
    if args.cache_mb is not None:
        capacity = find_capacity(checkpoint.config, args)
        num_blocks = capacity.num_blocks
        say(
            f"The cache takes {capacity.num_bytes / 1e6:,.1f} MB: {num_blocks:,} blocks for "
            f"{capacity.num_tokens:,} tokens, or {capacity.num_seqs:,} of the longest requests."
        )
    max_model_len = find_max_model_len(checkpoint.config, args, num_blocks)
    load = functools.partial(load_model, checkpoint, args.dtype)
    model, config, mesh = spread(load, checkpoint.config, args.tensor_parallel)
    if num_adapters:
        factors = [read_adapter(folder) for _, folder in args.adapter]
        empty: dict[str, Any] = dict(num_empty=args.runtime_adapters, most_rank=args.max_adapter_rank)
        adapt(model, config, factors, args.dtype, **empty if args.runtime_adapters else {})
    options = EngineOptions(
        max_num_seqs=args.max_num_seqs,
        max_model_len=max_model_len,
        chunk_tokens=args.chunk_tokens,
        steps_per_slice=args.steps_per_slice,
        prefix_cache=args.prefix_cache,
        host_cache_bytes=args.host_cache_mb and args.host_cache_mb * 10**6,
        num_adapters=num_adapters,
        num_speculative_tokens=args.num_speculative_tokens,
        max_logprobs=args.max_logprobs,
        num_stop_ids=len(checkpoint.tokenizer.eos_ids) + MOST_STOP_IDS,
        seed=secrets.randbits(32),
    )
    with matmul_precision(args):
        engine = create_engine(
            model, config, options, mesh=mesh, block_size=args.block_size, num_blocks=num_blocks, dtype=args.dtype
        )
    return Service(
        EngineThread(engine, most_completions=args.max_num_seqs + args.max_queue),
        checkpoint,
        served_names=tuple(served_names),
        adapters=AdapterSlots(
            [name for name, _ in args.adapter],
            num_empty=args.runtime_adapters,
            write=functools.partial(replace_adapter, model) if args.runtime_adapters else None,
        ),
        max_model_len=max_model_len,
        max_logprobs=args.max_logprobs,
        api_key=args.api_key,
        max_body_bytes=args.max_body_bytes,
        allow_control_tokens=args.allow_control_tokens,
        sampling_defaults=read_sampling_defaults(args, checkpoint),
        splits_reasoning=not args.reasoning_in_content,
        has_tokenizer_info=args.enable_tokenizer_info_endpoint,
        allowed_origins=tuple(args.allowed_origins),
        logs_requests=args.log_requests,
    )


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    from lib.http_server import Server, bind

    with bind(args.host, args.port) as listener:
        say("Loading the model and compiling the engine.")
        service = create_service(args)
        if args.api_key is None and args.host not in ("127.0.0.1", "::1", "localhost"):
            say(f"Warning: anyone who can reach {args.host} can use this server; set ${API_KEY} to prevent that.")
        host = f"[{args.host}]" if ":" in args.host else args.host

        def on_start() -> None:
            signal.set_wakeup_fd(-1)  # from here on Ctrl-C drains; before, it ends the process at once
            say(f"Serving {service.served_names[0]} at http://{host}:{listener.getsockname()[1]}")

        Server(service, drain_seconds=args.drain_seconds, on_start=on_start).run([listener])
    if service.engine.failure is not None:
        say(f"The engine failed: {service.engine.failure}")
        return 1
    return 0


if __name__ == "__main__":
    run(main)
