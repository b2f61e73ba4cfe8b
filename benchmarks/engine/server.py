"""Tokens per second of examples/serve.py with many streaming clients, and of its engine alone.

    python -m benchmarks.engine.server                   # Llama-3-8B's shape, random weights; on a GPU
    python -m benchmarks.engine.server --model toy       # on a CPU, to try the script out
    python -m benchmarks.engine.server --data-parallel 2 # on two GPUs

The requests are the same as in `benchmarks.engine.throughput`. The clients run in their own process. Each one streams
one completion after another, and every answer must have the requested number of tokens. Rows:

- engine: the same engine without a server; when a request has ended, the next is added;
- server: the whole server;
- server, N engines: with --data-parallel N, the server with an engine on each of N devices, for the same clients, and
  for N times the clients and requests. `speedup` is over the row `server`.

More `slices` than the engine alone mean that requests reached it later and left seats free. `cpu_us_per_token` is the
processor time per token of the whole process, the engine's thread included. `event_loop_us_per_token` is the time of
the thread that reads requests, decodes text and writes events.
"""

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import signal
import string
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from benchmarks.checks import require
from benchmarks.engine.model import CONFIGS
from benchmarks.engine.stream_clients import stream
from benchmarks.engine.workload import BLOCK_SIZE, SIZES, Request, create_engine, workload
from benchmarks.harness import add_output, open_store
from jaxpaged import SamplingParams
from lib.checkpoint import Checkpoint
from lib.engines import Engines
from lib.router import Router
from lib.tokenizer import Tokenizer


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level tokenizer of made-up words: the bytes, then words of up to four letters after a space."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = ("".join(word) for n in (2, 3, 4) for word in itertools.product(string.ascii_lowercase, repeat=n))
    pieces = itertools.chain(alphabet, (f"\u0120{word}" for word in words))  # \u0120 is the space
    vocabulary = dict(zip(pieces, range(vocab_size), strict=False))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(tokenizer, eos_ids=(), chat_template=None, special_tokens={})


@contextlib.contextmanager
def serving(made: Sequence[Any], tokenizer: Tokenizer, options: argparse.Namespace) -> Iterator[Any]:
    """The server of examples/serve.py around engines: its `port`, and `loop_seconds()` of its event loop."""
    from lib.http_server import Server, bind
    from lib.service import Service

    vocab_size = CONFIGS[options.model].vocab_size
    checkpoint = Checkpoint(SimpleNamespace(vocab_size=vocab_size), tokenizer, {})  # type: ignore[arg-type]
    engines = Engines(made, most_completions=2 * len(made) * options.clients, router=Router(BLOCK_SIZE))
    service = Service(engines, checkpoint, ("model",), max_model_len=2 * SIZES[options.model].longest)
    started = threading.Event()
    server = Server(service, drain_seconds=30, on_start=started.set)

    async def thread_time() -> float:
        return time.thread_time()

    def loop_seconds() -> float:
        assert server.loop is not None
        return asyncio.run_coroutine_threadsafe(thread_time(), server.loop).result()

    with bind("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        started.wait()
        try:
            yield SimpleNamespace(port=listener.getsockname()[1], loop_seconds=loop_seconds)
        finally:
            server.handle_exit(signal.SIGTERM, None)
            thread.join()
    require(engines.failure is None, f"an engine failed: {engines.failure}")


def run_alone(engine: Any, work: Sequence[Request], at_once: int) -> int:
    """Serves the requests without a server, at most `at_once` at a time. Returns the number of generated tokens."""
    waiting, num_open, num_tokens = deque(work), 0, 0
    while waiting or num_open:
        while waiting and num_open < at_once:
            prompt, new = waiting.popleft()
            engine.add_request(prompt, SamplingParams(max_tokens=new, temperature=0))
            num_open += 1
        for output in engine.step():
            if output.finished:
                num_open -= 1
                num_tokens += len(output.outputs[0].token_ids)
    return num_tokens


def measure_alone(engine: Any, work: Sequence[Request], at_once: int) -> dict[str, Any]:
    slices_begin, begin, cpu_begin = engine.stats().num_slices, time.perf_counter(), time.process_time()
    num_tokens = run_alone(engine, work, at_once)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu_begin
    require(num_tokens == (wanted := sum(new for _, new in work)), f"{num_tokens} tokens instead of {wanted}")
    return dict(
        seconds=seconds,
        tokens_per_s=wanted / seconds,
        slices=engine.stats().num_slices - slices_begin,
        cpu_us_per_token=cpu / wanted * 1e6,
    )


def measure_server(
    engines: Sequence[Any], work: Sequence[Request], tokenizer: Tokenizer, num_clients: int, options: argparse.Namespace
) -> dict[str, Any]:
    wanted = sum(new for _, new in work)
    context = multiprocessing.get_context("spawn")
    with serving(engines, tokenizer, options) as server, ProcessPoolExecutor(1, context) as clients:
        clients.submit(stream, server.port, [([1], 1)] * 2, 2).result()  # start the process and warm up its code
        slices_begin, cpu_begin, loop_begin = num_slices(engines), time.process_time(), server.loop_seconds()
        seconds, answers = clients.submit(stream, server.port, work, num_clients).result()
        cpu, loop = time.process_time() - cpu_begin, server.loop_seconds() - loop_begin
    counts = [answer.num_tokens for answer in answers]
    require(counts == [new for _, new in work], "an answer has not as many tokens as were asked for")
    firsts = [answer.seconds_to_first * 1e3 for answer in answers]
    return dict(
        seconds=seconds,
        tokens_per_s=wanted / seconds,
        slices=num_slices(engines) - slices_begin,
        cpu_us_per_token=cpu / wanted * 1e6,
        event_loop_us_per_token=loop / wanted * 1e6,
        event_loop_share=loop / seconds,
        events=sum(answer.num_events for answer in answers),
        to_first_ms=dict(zip(("p50", "p99"), np.quantile(firsts, (0.5, 0.99)).tolist(), strict=True)),
    )


def num_slices(engines: Sequence[Any]) -> int:
    return sum(engine.stats().num_slices for engine in engines)


def create_engines(options: argparse.Namespace) -> tuple[list[Any], list[float]]:
    """An engine for each device, and the seconds that each needed. Later ones find the program in JAX's cache."""
    engines, seconds = [], []
    for device in jax.devices()[: options.data_parallel] if options.data_parallel > 1 else [None]:
        begin = time.perf_counter()
        engines.append(create_engine(options.model, device=device, steps_per_slice=options.steps_per_slice))
        seconds.append(time.perf_counter() - begin)
    require(len(engines) == options.data_parallel, f"JAX sees {len(engines)} devices")
    return engines, seconds


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=tuple(CONFIGS))
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--data-parallel", type=int, default=1, help="engines, each on its own device")
    parser.add_argument("--steps-per-slice", type=int, help="instead of the engine's own")
    add_output(parser)
    options = parser.parse_args(arguments)
    options.toy = options.model == "toy"
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    vocab_size, longest = CONFIGS[options.model].vocab_size, SIZES[options.model].longest
    settings = dict(clients=options.clients, steps_per_slice=options.steps_per_slice)
    name, count = f"engine_server_{options.model}", options.data_parallel
    store = open_store(name if count == 1 else f"{name}_x{count}", options, **settings)
    engines, seconds = create_engines(options)
    work = workload(options.requests, longest)
    tokenizer = make_tokenizer(vocab_size)
    alone = measure_alone(engines[0], work, options.clients)
    store.add("engine", alone | dict(ready_seconds=seconds))
    served = measure_server(engines[:1], work, tokenizer, options.clients, options)
    served["of_engine"] = served["tokens_per_s"] / alone["tokens_per_s"]
    store.add("server", served)
    for clients in (options.clients, count * options.clients) if count > 1 else ():
        more = workload(options.requests * clients // options.clients, longest)
        several = measure_server(engines, more, tokenizer, clients, options)
        several["speedup"] = several["tokens_per_s"] / served["tokens_per_s"]
        store.add(f"server, {count} engines, {clients} clients", several)
    for row, point in store.points.items():
        print(f"{row:>8}  {point}", flush=True)


if __name__ == "__main__":
    main()
