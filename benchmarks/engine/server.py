"""Tokens per second of examples/serve.py with many streaming clients, and of its engine alone.

    python -m benchmarks.engine.server                   # Llama-3-8B's shape, random weights; on a GPU
    python -m benchmarks.engine.server --model toy       # on a CPU, to try the script out
    python -m benchmarks.engine.server --data-parallel 2 # on two GPUs

The requests are the same as in `benchmarks.engine.throughput`. The clients run in their own process. Each one streams
one completion after another, and every answer must have the requested number of tokens. Rows:

- engine: the same engine without a server; when a request has ended, the next is added;
- server: the whole server;
- server, N engines: with --data-parallel N, the server with N engines, each in its own process and on its own GPU, for
  the same clients, and for N times the clients and requests. `speedup` is over the row `server`.

More `slices` than the engine alone mean that requests reached it later and left seats free. `cpu_us_per_token` is the
processor time per token of the server's process, which includes one engine's thread, and `engines_cpu_us_per_token`
the time of the processes of several engines. `event_loop_us_per_token` is the time of the thread that reads requests,
decodes text and writes events.
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
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from benchmarks.checks import require
from benchmarks.engine.model import CONFIGS
from benchmarks.engine.stream_clients import stream
from benchmarks.engine.workload import (
    BLOCK_SIZE,
    SIZES,
    RandomModel,
    Request,
    create_engine,
    processor_seconds,
    workload,
)
from benchmarks.harness import add_output, open_store
from jaxpaged import SamplingParams
from lib.checkpoint import Checkpoint
from lib.engine_process import EngineProcess, EngineProcesses
from lib.engine_runner import EngineRunner
from lib.engine_thread import EngineThread
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
def serving(
    runners: Sequence[EngineRunner], tokenizer: Tokenizer, most_clients: int, options: argparse.Namespace
) -> Iterator[Any]:
    """The server of examples/serve.py around engines: its `port`, and `run` for coroutines in its event loop."""
    from lib.http_server import Server, bind
    from lib.service import Service

    vocab_size = CONFIGS[options.model].vocab_size
    checkpoint = Checkpoint(SimpleNamespace(vocab_size=vocab_size), tokenizer, {})  # type: ignore[arg-type]
    engines = Engines(runners, most_completions=2 * most_clients, router=Router(BLOCK_SIZE))
    service = Service(engines, checkpoint, ("model",), max_model_len=2 * SIZES[options.model].longest)
    started = threading.Event()
    server = Server(service, drain_seconds=30, on_start=started.set)

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        assert server.loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, server.loop).result()

    with bind("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        started.wait()
        try:
            yield SimpleNamespace(port=listener.getsockname()[1], run=run, runners=runners)
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


def measure_server(server: Any, work: Sequence[Request], num_clients: int) -> dict[str, Any]:
    wanted = sum(new for _, new in work)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as clients:
        clients.submit(stream, server.port, [([1], 1)] * 2, 2).result()  # start the process and warm up its code
        before = server.run(counters(server.runners))
        seconds, answers = clients.submit(stream, server.port, work, num_clients).result()
        used = {name: value - before[name] for name, value in server.run(counters(server.runners)).items()}
    counts = [answer.num_tokens for answer in answers]
    require(counts == [new for _, new in work], "an answer has not as many tokens as were asked for")
    firsts = [answer.seconds_to_first * 1e3 for answer in answers]
    return dict(
        seconds=seconds,
        tokens_per_s=wanted / seconds,
        slices=used.pop("slices"),
        **{f"{name}_us_per_token": value / wanted * 1e6 for name, value in used.items()},
        event_loop_share=used["event_loop"] / seconds,
        events=sum(answer.num_events for answer in answers),
        to_first_ms=dict(zip(("p50", "p99"), np.quantile(firsts, (0.5, 0.99)).tolist(), strict=True)),
    )


async def counters(runners: Sequence[EngineRunner]) -> dict[str, float]:
    """Slices of all engines; processor seconds of this process, its event loop and the engines' processes."""
    slices = sum(runner.stats.num_slices for runner in runners)
    used = dict(slices=slices, cpu=time.process_time(), event_loop=time.thread_time())
    of_processes = [await runner.call(processor_seconds) for runner in runners if isinstance(runner, EngineProcess)]
    return used | ({"engines_cpu": sum(of_processes)} if of_processes else {})


def measure_one(work: Sequence[Request], options: argparse.Namespace) -> tuple[str | None, dict[str, dict[str, Any]]]:
    """The GPU's name, and the rows of one engine."""
    begin = time.perf_counter()
    engine = create_engine(options.model, steps_per_slice=options.steps_per_slice)
    ready_seconds = time.perf_counter() - begin
    alone = measure_alone(engine, work, options.clients)
    tokenizer = make_tokenizer(CONFIGS[options.model].vocab_size)
    with serving([EngineThread(engine)], tokenizer, options.clients, options) as server:
        served = measure_server(server, work, options.clients)
    served["of_engine"] = served["tokens_per_s"] / alone["tokens_per_s"]
    device = jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None
    return device, {"engine": alone | dict(ready_seconds=ready_seconds), "server": served}


def measure_several(options: argparse.Namespace, of_one: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of several engines, each in its own process. `of_one`: tokens per second of a server with one."""
    count, begin = options.data_parallel, time.perf_counter()
    model = RandomModel(options.model, options.steps_per_slice)
    with EngineProcesses(count) as processes:
        processes.backend()  # fails if there are too few GPUs
        runners = processes.create([model] * count)
    ready_seconds = time.perf_counter() - begin
    tokenizer = make_tokenizer(CONFIGS[options.model].vocab_size)
    with serving(runners, tokenizer, count * options.clients, options) as server:
        warm_up = workload(options.clients, SIZES[options.model].longest)
        measure_server(server, warm_up, options.clients)  # as the row `engine` does for one
        for factor in (1, count):
            clients = factor * options.clients
            work = workload(factor * options.requests, SIZES[options.model].longest)
            row = measure_server(server, work, clients)
            row |= dict(speedup=row["tokens_per_s"] / of_one, ready_seconds=ready_seconds)
            yield f"server, {count} engines, {clients} clients", row


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=tuple(CONFIGS))
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--data-parallel", type=int, default=1, help="engines, each in a process and on a GPU")
    parser.add_argument("--steps-per-slice", type=int, help="instead of the engine's own")
    add_output(parser)
    options = parser.parse_args(arguments)
    options.toy = options.model == "toy"
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    settings = dict(clients=options.clients, steps_per_slice=options.steps_per_slice)
    name, count = f"engine_server_{options.model}", options.data_parallel
    work = workload(options.requests, SIZES[options.model].longest)
    if count == 1:
        device, rows = measure_one(work, options)
    else:  # in a process of its own, which leaves its GPU to the next
        jax.config.update("jax_platforms", "cpu")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
            device, rows = other.submit(measure_one, work, options).result()
    store = open_store(name if count == 1 else f"{name}_x{count}", options, device=device, **settings)
    for row, point in rows.items():
        store.add(row, point)
    if count > 1:
        for row, point in measure_several(options, of_one=rows["server"]["tokens_per_s"]):
            store.add(row, point)
    for row, point in store.points.items():
        print(f"{row:>8}  {point}", flush=True)


if __name__ == "__main__":
    main()
