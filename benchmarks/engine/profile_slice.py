"""Where the time of an engine's slices goes: kernels, gaps, the conditions of its loops, and the host between slices.

    python -m benchmarks.engine.profile_slice                           # Llama-3-8B's shape; about 3 minutes on an H100
    python -m benchmarks.engine.profile_slice --model toy --slices 2    # on a CPU: without the device's events

Random bfloat16 weights, greedy. An engine serves the requests of throughput.py for `--slices` slices, once without the
profiler and once with it. In milliseconds:

- wall: time of the slices without the profiler, from the call to the report;
- device: from the first event on the GPU to the last, with the profiler, which may slow it down;
- busy: time in which a kernel or a copy runs; small: the part with events shorter than 5 us; and their numbers;
- condition: from a copy to the host to the next event, the cost of a loop's condition; and their number;
- gaps: between other events; between: gaps of more than `LONG_US`, where the host is between two slices.

Then the kernels of the slices are listed, the longest first.
"""

import argparse
import collections
import contextlib
import itertools
import time
from collections.abc import Sequence

import jax

from benchmarks.engine.model import CONFIGS
from benchmarks.engine.workload import SIZES, Request, create_engine, workload
from benchmarks.harness import Event, add_output, add_xla, by_kernel, open_store, traced
from jaxpaged import Engine, SamplingParams

SMALL_US, LONG_US = 5, 500
SHOWN = 25  # kernels in the printed table


def split(events: list[Event]) -> dict[str, float]:
    """The time from the first event to the last, in ms, by activity of the GPU; and counts."""
    found: dict[str, float] = collections.defaultdict(float)
    if not events:
        return found
    end, name = events[0][0], ""
    for begin, its_end, its_name in events:
        gap = begin - end
        if gap > 0:
            is_condition = "D2H" in name or "DtoH" in name
            found["between" if gap > LONG_US else "condition" if is_condition else "gaps"] += gap / 1e3
            found["conditions"] += is_condition and gap <= LONG_US
        busy = max(0.0, its_end - max(begin, end))
        found["busy"] += busy / 1e3
        found["small"] += busy / 1e3 if its_end - begin < SMALL_US else 0
        found["events"] += 1
        if its_end > end:
            end, name = its_end, its_name
    found["device"] = (end - events[0][0]) / 1e3
    return found


def run_slices(
    engine: Engine, work: Sequence[Request], num_warm: int, num_slices: int, context: contextlib.AbstractContextManager
) -> tuple[float, dict[str, int]]:
    """Milliseconds that the slices last inside `context`, and their steps by kind."""
    for prompt, new in work:
        engine.add_request(prompt, SamplingParams(max_tokens=new, temperature=0))
    for _ in range(num_warm):
        engine.step()
    with context:
        begin = time.perf_counter()
        engine.step()  # also reads the report of the slice before
        before = engine.stats().steps_by_kind
        for _ in range(num_slices - 1):
            engine.step()
        engine.abort()
        while engine.has_unfinished_requests:  # finish the slices that `step` has sent
            engine.step()
        wall = (time.perf_counter() - begin) * 1e3
    return wall, {kind: count - before[kind] for kind, count in engine.stats().steps_by_kind.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=tuple(CONFIGS))
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--warm", type=int, default=8, help="slices before those that are read")
    parser.add_argument("--slices", type=int, default=6)
    add_xla(parser)
    add_output(parser)
    options = parser.parse_args(arguments)
    options.toy = options.model == "toy"
    store = open_store(f"engine_profile_{options.model}", options)
    begin = time.perf_counter()
    engine = create_engine(options.model, compiler_options=options.xla)
    print(f"{jax.devices()[0].device_kind}, made in {time.perf_counter() - begin:.0f} s: {engine.stats()}", flush=True)
    work, events = workload(options.requests, SIZES[options.model].longest), list[Event]()
    wall, _ = run_slices(engine, work, options.warm, options.slices, contextlib.nullcontext())
    _, steps = run_slices(engine, work, options.warm, options.slices, traced(events))
    run = {"wall": wall} | split(events)
    times = by_kernel([(name, end - begin) for begin, end, name in events], 1)
    kernels = dict(itertools.islice(times.items(), SHOWN))
    print(f"{options.slices} slices of {options.requests} requests, steps {steps}")
    print(", ".join(f"{name} {value:.3f}" for name, value in run.items()))
    print(f"\n{'ms':>10}{'launches':>10}  kernel")
    for name, (microseconds, launches) in kernels.items():
        print(f"{microseconds / 1e3:10.2f}{launches:10.0f}  {name}")
    store.add("run", run)
    store.add("steps", dict(steps))
    if kernels:
        store.add("kernels of the run", dict(kernels))


if __name__ == "__main__":
    main()
