"""An overloaded engine for a long time: each request ends once, with its own tokens, and every block comes back.

    python -m benchmarks.soak.engine --requests 100000

It runs the toy model of the tests with a quarter of the blocks that the seats may need. Requests arrive in bursts. A
few are aborted at random moments, or are too large to be served. They are drawn from a few hundred different ones,
whose tokens are known from one-by-one generation. After each slice the invariants of scheduler and allocator are
checked. Nothing may be compiled during the run.
"""

import argparse
import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from benchmarks.checks import require
from benchmarks.harness import add_output, open_store
from jaxpaged import Engine, SamplingParams
from tests.toy_model import BLOCK_SIZE, MAX_TOKENS, VOCAB, create_engine

SEATS = 64
KINDS, NEVER_FITS, BURST = 300, 0.01, 200
ABORTED = 0.004  # share of the running requests, per slice
MOST_RECOMPUTED = 0.02
HOST_BYTES = 1_000_000
Check = Callable[[Engine], None]


def kinds(count: int, rng: np.random.Generator) -> list[tuple[list[int], SamplingParams]]:
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 30)).tolist() for _ in range(count)]
    return [
        (
            prompt,
            SamplingParams(
                max_tokens=int(rng.integers(1, MAX_TOKENS - len(prompt) + 1)),
                temperature=float(i % 2),
                top_k=i % 3 * 4,
                seed=i,
                stop_token_ids=(3,) if i % 4 == 0 else (),
                head_start=int(rng.integers(-20, 20)),
            ),
        )
        for i, prompt in enumerate(prompts)
    ]


def soak(
    engine: Engine, num_requests: int, *, num_kinds: int = KINDS, seed: int = 0, check: Check | None = None
) -> dict[str, int]:
    """Counts of request endings. Raises `AssertionError` on any error; `check` runs after each slice."""
    rng = np.random.default_rng(seed)
    chosen = kinds(num_kinds, rng)
    expected = []
    for prompt, params in chosen:  # one by one
        (output,) = engine.generate([prompt], params)
        expected.append(output.outputs[0].token_ids)

    ends: collections.Counter[str] = collections.Counter()
    before = engine.stats()
    with compilations() as compiled:
        num_tokens = serve(engine, num_requests, chosen, expected, rng, ends, check or check_invariants)
    require(not compiled, f"{len(compiled)} compilations")
    require(sum(ends.values()) == num_requests, "a request ended twice or never")
    after = engine.stats()
    require(after.num_generated - before.num_generated == num_tokens, "tokens of no request")
    require(after.num_running == 0, "a request still has a seat")
    require(after.num_free_blocks == before.num_free_blocks, "blocks did not come back")
    engine.sleep()
    require(engine.stats().host_bytes == 0, "host memory did not come back")
    engine.wake_up()
    names = "computed", "found", "brought", "recomputed", "preempted"
    counts = {name: getattr(after, f"num_{name}") - getattr(before, f"num_{name}") for name in names}
    return dict(ends) | dict(tokens=num_tokens) | counts


def serve(
    engine: Engine,
    num_requests: int,
    chosen: list[tuple[list[int], SamplingParams]],
    expected: list[list[int]],
    rng: np.random.Generator,
    ends: collections.Counter[str],
    check: Check,
) -> int:
    """The number of generated tokens; adds the endings of requests to `ends`."""
    under_way: dict[int, int] = {}
    num_left, num_tokens = num_requests, 0
    while num_left or engine.has_unfinished_requests:
        # Bursts, with pauses in which the queue may become empty
        for _ in range(min(num_left, int(rng.integers(0, BURST)) if len(under_way) < 4 * BURST else 0)):
            num_left -= 1
            if rng.random() < NEVER_FITS:
                require(refuses(engine), "a request that can never be served was taken")
                ends["refused"] += 1
                continue
            kind = int(rng.integers(0, len(chosen)))
            under_way[engine.add_request(*chosen[kind])] = kind
        for request_id in [i for i in under_way if rng.random() < ABORTED]:
            engine.abort(request_id)
        for output in engine.step():
            (completion,) = output.outputs
            wanted = expected[under_way[output.request_id]]
            require(
                completion.token_ids == wanted[: len(completion.token_ids)], "a token was lost, doubled or another's"
            )
            if output.finished:
                del under_way[output.request_id]  # a second end would be a KeyError
                ends[str(completion.finish_reason)] += 1
                num_tokens += len(completion.token_ids)
                require(completion.finish_reason == "abort" or completion.token_ids == wanted, "ended before its end")
        check(engine)
    require(not under_way, "a request never ended")
    return num_tokens


def check_invariants(engine: Engine) -> None:
    scheduler, allocator = jax.tree.map(np.asarray, (engine._runner.state.scheduler, engine._runner.state.allocator))
    broken = scheduler.broken_invariants(allocator) + allocator.broken_invariants()
    require(not broken, f"{broken}")
    require(engine.stats().host_bytes <= HOST_BYTES, "more host memory than it may have")


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """Seconds of each compilation inside the context, on any thread."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seconds
    jax.monitoring.unregister_event_duration_listener(listen)


def refuses(engine: Engine) -> bool:
    try:
        engine.add_request([1] * MAX_TOKENS, SamplingParams())
    except ValueError:
        return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prefix-cache", action="store_true", help="requests share the blocks of equal beginnings")
    parser.add_argument("--host-tier", action="store_true", help="with a prefix cache, behind which is host memory")
    add_output(parser)
    options = parser.parse_args()
    store = open_store("engine_soak", options)
    num_blocks = SEATS * MAX_TOKENS // BLOCK_SIZE // 4 + 1
    sizes = dict(max_num_seqs=SEATS, num_blocks=num_blocks, max_requests=4 * SEATS, widths=(8, 24))
    options.prefix_cache |= options.host_tier
    tier = dict(host_cache_bytes=HOST_BYTES) if options.host_tier else {}
    engine = create_engine(**sizes, **tier, prefix_cache=options.prefix_cache, compiler_options=None)
    begin = time.perf_counter()
    totals: collections.Counter[str] = collections.Counter()
    while totals["requests"] < options.requests:  # in parts, so that an interrupted run has printed results
        count = min(10_000, options.requests - totals["requests"])
        totals.update(soak(engine, count, seed=options.seed + totals["requests"]), requests=count)
        share = totals["recomputed"] / totals["computed"]
        require(share <= MOST_RECOMPUTED, f"{share:.2%} recomputed")
        seconds = time.perf_counter() - begin
        print(f"[{seconds:5.0f} s] {dict(totals)}, recomputed {share:.2%}", flush=True)
        name = "with a prefix cache" if options.prefix_cache else "without a prefix cache"
        name = "with host memory" if options.host_tier else name
        store.add(name, dict(totals) | {"recomputed_share": share, "seconds": seconds})


if __name__ == "__main__":
    main()
