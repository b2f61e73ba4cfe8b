"""Waiting times of requests under a steady arrival rate.

    python -m benchmarks.engine.online                  # Llama-3-8B's shape; about three minutes on a GPU
    python -m benchmarks.engine.online --model toy --rates 20 --seconds 1    # on a CPU, to try the script out

Arrivals follow a Poisson process. Lengths are the same as in `benchmarks.engine.throughput`, weights are random, and
the engine chooses its own sizes. As in a server, one thread adds new requests and calls `step` when the engine has no
`seconds_to_spare` left, so a request that arrives during a step waits for its end. The run fails if a request gets a
wrong number of tokens. `benchmarks.engine.vllm_peer` does the same with vLLM. For each rate, in milliseconds, p50, p95
and p99:

- to_first: from a request's arrival to its first token;
- between_tokens: from a request's first token to its last, divided by the number of tokens between them;
- between_pieces: between two steps that return tokens of a request; all tokens of a slice are returned together;
- to_last: from a request's arrival to its last token.
"""

import argparse
import gc
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.checks import require
from benchmarks.engine.model import CONFIGS
from benchmarks.engine.workload import SIZES, Request, create_engine, workload
from benchmarks.harness import Store, add_output, add_xla, open_store
from jaxpaged import SamplingParams

PERCENTILES = (50, 95, 99)
WARM_REQUESTS, WARM_TOKENS = 32, 32
Piece = tuple[float, int]  # time, and tokens of the request so far


def arrival_seconds(rate: float, seconds: float) -> list[float]:
    """Arrival times: on average `rate` per second, the same at each call."""
    rng = np.random.default_rng(0)
    return np.cumsum(rng.exponential(1 / rate, max(1, round(rate * seconds)))).tolist()


def serve(engine: Any, work: Sequence[Request], arrivals: Sequence[float]) -> list[list[Piece]]:
    """The pieces in which each request got its tokens; times are seconds since the start."""
    begin = time.perf_counter()
    waiting, pieces = deque(zip(work, arrivals, strict=True)), []
    pieces_of: dict[int, list[Piece]] = {}

    def wait(until: float) -> None:
        if (left := begin + until - time.perf_counter()) > 0:
            time.sleep(left)

    while waiting or engine.has_unfinished_requests:
        if not engine.has_unfinished_requests:
            wait(waiting[0][1])
        send_at = time.perf_counter() - begin + engine.seconds_to_spare
        while waiting and waiting[0][1] <= send_at:
            (prompt, new), arrival = waiting.popleft()
            wait(arrival)
            request_id = engine.add_request(prompt, SamplingParams(max_tokens=new, temperature=0))
            pieces.append(pieces_of.setdefault(request_id, []))
        wait(send_at)
        outputs = engine.step()
        now = time.perf_counter() - begin
        for output in outputs:
            known, num_tokens = pieces_of[output.request_id], len(output.outputs[0].token_ids)
            if num_tokens > (known[-1][1] if known else 0):
                known.append((now, num_tokens))
    return pieces


def summary(work: Sequence[Request], arrivals: Sequence[float], pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
    wanted = [new for _, new in work]
    require([of[-1][1] if of else 0 for of in pieces] == wanted, "a request has not as many tokens as it asked for")
    requests = list(zip(wanted, arrivals, pieces, strict=True))
    seconds: dict[str, Any] = {
        "to_first": [of[0][0] - arrival for _, arrival, of in requests],
        "between_tokens": [(of[-1][0] - of[0][0]) / (new - 1) for new, _, of in requests if new > 1],
        "between_pieces": np.concatenate([np.diff([when for when, _ in of]) for of in pieces]),
        "to_last": [of[-1][0] - arrival for _, arrival, of in requests],
    }
    end = max(of[-1][0] for of in pieces)
    point: dict[str, Any] = dict(requests=len(work), tokens=sum(wanted), seconds=end, tokens_per_s=sum(wanted) / end)
    for name, values in seconds.items():
        milliseconds = np.percentile(values, PERCENTILES) * 1e3 if len(values) else [0.0] * len(PERCENTILES)
        point[f"{name}_ms"] = {f"p{p}": float(value) for p, value in zip(PERCENTILES, milliseconds, strict=True)}
    return point


def line(name: str, point: dict[str, Any]) -> str:
    texts = [f"{name:>12}  {point['requests']:4} requests, {point['tokens_per_s']:6.0f} tokens/s"]
    for column, values in point.items():
        if isinstance(values, dict):
            texts.append(f"{column} " + " / ".join(f"{value:.1f}" for value in values.values()))
    return ", ".join(texts)


def measure(engine: Any, store: Store, rates: Sequence[float], *, seconds: float, longest: int) -> None:
    """Adds a point for each rate, with requests that arrive for `seconds`. A short warm-up run comes first."""
    gc.collect()
    gc.freeze()  # as examples/serve.py does
    warm = [(prompt, min(new, WARM_TOKENS)) for prompt, new in workload(WARM_REQUESTS, longest)]
    serve(engine, warm, [0.0] * len(warm))
    for rate in rates:
        arrivals = arrival_seconds(rate, seconds)
        work = workload(len(arrivals), longest)
        point = summary(work, arrivals, serve(engine, work, arrivals))
        name = f"{rate:g} a second"
        store.add(name, point)
        print(line(name, point), flush=True)
    gc.unfreeze()


def add_arrivals(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", nargs="*", type=float, default=[5, 10, 20], help="requests a second")
    parser.add_argument("--seconds", type=float, default=20, help="for which requests arrive")


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=tuple(CONFIGS))
    add_arrivals(parser)
    parser.add_argument("--steps-per-slice", type=int, help="instead of the default of `jaxpaged.Engine`")
    add_xla(parser)
    add_output(parser)
    options = parser.parse_args(arguments)
    options.toy = options.model == "toy"
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    begin = time.perf_counter()
    engine = create_engine(options.model, steps_per_slice=options.steps_per_slice, compiler_options=options.xla)
    stats = engine.stats()
    settings: dict[str, Any] = dict(seconds=options.seconds, steps_per_slice=options.steps_per_slice)
    settings |= dict(num_seats=stats.max_num_seqs, chunk_tokens=stats.chunk_tokens, widths=list(stats.widths))
    print(f"{settings}, made in {time.perf_counter() - begin:.0f} s", flush=True)
    store = open_store(f"engine_online_{options.model}", options, **settings)
    measure(engine, store, options.rates, seconds=options.seconds, longest=SIZES[options.model].longest)


if __name__ == "__main__":
    main()
