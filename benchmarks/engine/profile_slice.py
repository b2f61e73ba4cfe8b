"""Where the time of an engine's slices goes: kernels, gaps, the conditions of its loops, and the host between slices.

    python -m benchmarks.engine.profile_slice                           # Llama-3-8B's shape; about 5 minutes on an H100
    python -m benchmarks.engine.profile_slice --model toy --slices 2    # on a CPU: without the device's events

Random bfloat16 weights, greedy. Each kind of step runs by itself, in a slice of nothing else; then an engine serves the
requests of throughput.py for `--slices` slices. Both run twice, without the profiler and with it. Columns, in
milliseconds a step (of the kinds) or in all (of the run):

- wall: the time of the slices without the profiler, from the call to the report;
- device: from the first event on the GPU to the last, with the profiler, which may slow it down;
- busy: in which a kernel or a copy runs, small: in which one of less than 5 us does, and how many events there are;
- condition: from a copy to the host to the next event, which is what a loop's condition costs, and how many there are;
- gaps: between other events; between: of more than `LONG_US`, where the host is between two slices;
- kv, only in the file: tokens in the cache while a kind of step runs by itself.

`by its steps` is the sum over the run's steps of what they take by themselves; the last table has the same for each
kernel. Sequences are longer or shorter in the run, so its attention may differ.
"""

import argparse
import collections
import contextlib
import itertools
import time
from typing import Any

import jax
import numpy as np

from benchmarks.engine.model import CONFIGS
from benchmarks.engine.steps import Steps, name_kind
from benchmarks.engine.workload import SIZES, create_engine, workload
from benchmarks.harness import Event, add_output, add_xla, by_kernel, open_store, traced
from jaxpaged import Engine, SamplingParams

SMALL_US, LONG_US = 5, 500
LENGTH = 256  # tokens of the sequences that decode in the steps by themselves
SHOWN = 25  # kernels


def split(events: list[Event]) -> dict[str, float]:
    """The time from the first event to the last, in ms, by what the GPU does; and counts."""
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


def per_step(figures: dict[str, float], num_steps: int) -> dict[str, float]:
    return {name: value / num_steps for name, value in figures.items()}


def kernels(events: list[Event], num_steps: int) -> dict[str, list[float]]:
    return by_kernel([(name, end - begin) for begin, end, name in events], num_steps)


def profile_kinds(steps: Steps) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, list[float]]]]:
    """Of each kind: its figures, and its kernels; a step."""
    figures, by_name = {}, {}
    length = min(LENGTH, steps.sizes.longest // 2)
    for kind in steps.engine._runner.kinds:
        num_steps = 2 if kind.is_mixed else 8
        events: list[Event] = []
        for context in (contextlib.nullcontext(), traced(events)):
            steps.prepare(kind, length)
            before, kv = steps.count_steps(kind), steps.count_kv()
            with context:
                begin = time.perf_counter()
                steps.run(num_steps=num_steps)
                wall = (time.perf_counter() - begin) * 1e3
            if (found := steps.count_steps(kind) - before) != num_steps:
                raise AssertionError(f"{found} steps of {name_kind(kind)} instead of {num_steps}")
            if isinstance(context, contextlib.nullcontext):
                plain = wall
        of_step = per_step({"wall": plain} | split(events), num_steps)
        figures[name_kind(kind)] = of_step | {"kv": (kv + steps.count_kv()) / 2}
        by_name[name_kind(kind)] = kernels(events, num_steps)
    steps.clear()
    return figures, by_name


def profile_run(
    engine: Engine, count: int, longest: int, num_warm: int, num_slices: int
) -> tuple[dict[str, float], dict[str, int], dict[str, list[float]]]:
    """Its figures, its steps by kind, and its kernels; in all."""
    events: list[Event] = []
    figures: dict[str, float] = {}
    for context in (contextlib.nullcontext(), traced(events)):
        for prompt, new in workload(count, longest):
            engine.add_request(prompt, SamplingParams(max_tokens=new, temperature=0))
        for _ in range(num_warm):
            engine.step()
        jax.block_until_ready(engine._runner.state)
        before = np.asarray(engine._runner.state.num_of_kind)
        with context:
            begin = time.perf_counter()
            for _ in range(num_slices):
                engine.step()
            jax.block_until_ready(engine._runner.state)  # the slices that `step` has sent are over
            wall = (time.perf_counter() - begin) * 1e3
        num_of_kind = (np.asarray(engine._runner.state.num_of_kind) - before).tolist()
        names = dict(zip(map(name_kind, engine._runner.kinds), num_of_kind, strict=True))
        if isinstance(context, contextlib.nullcontext):
            figures["wall"] = wall
            print(f"without the profiler {names}")
        engine.abort()
        while engine.has_unfinished_requests:
            engine.step()
    return figures | split(events), names, kernels(events, 1)


COLUMNS = ("wall", "device", "busy", "small", "events", "condition", "conditions", "gaps", "between")


def show(rows: dict[str, dict[str, float]]) -> None:
    print(f"{'':14}" + "".join(f"{column:>11}" for column in COLUMNS))
    for name, figures in rows.items():
        print(f"{name:14}" + "".join(f"{figures.get(column, 0):11.3f}" for column in COLUMNS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=tuple(CONFIGS))
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--warm", type=int, default=8, help="slices before those that are read")
    parser.add_argument("--slices", type=int, default=6)
    add_xla(parser)
    add_output(parser)
    options = parser.parse_args()
    options.toy = options.model == "toy"
    sizes = SIZES[options.model]
    store = open_store(f"engine_profile_{options.model}", options)
    begin = time.perf_counter()
    engine = create_engine(options.model, compiler_options=options.xla)
    print(f"{jax.devices()[0].device_kind}, made in {time.perf_counter() - begin:.0f} s: {engine.stats()}", flush=True)
    of_kinds, kernels_of = profile_kinds(Steps(engine, sizes))
    show(of_kinds)
    run, counts, kernels_of_run = profile_run(engine, options.requests, sizes.longest, options.warm, options.slices)
    its_steps: dict[str, float] = collections.defaultdict(float)
    expected: dict[str, float] = collections.defaultdict(float)
    for kind, count in counts.items():
        for column, value in of_kinds[kind].items():
            its_steps[column] += count * value
        for name, (microseconds, _) in kernels_of[kind].items():
            expected[name] += count * microseconds / 1e3
    print(f"\n{options.slices} slices of {options.requests} requests, steps {counts}")
    show({"run": run, "by its steps": dict(its_steps)})
    print(f"\n{'ms in the run':>14}{'by its steps':>14}{'launches':>10}  kernel")
    for name, (microseconds, launches) in itertools.islice(kernels_of_run.items(), SHOWN):
        print(f"{microseconds / 1e3:14.2f}{expected[name]:14.2f}{launches:10.0f}  {name}")
    points: dict[str, Any] = of_kinds | {"run": run, "by its steps": dict(its_steps), "steps": counts}
    for name, point in points.items():
        store.add(name, dict(point))
    store.add("kernels of the run", dict(itertools.islice(kernels_of_run.items(), SHOWN)))
    for kind, found in kernels_of.items():
        store.add(f"kernels of {kind}", dict(itertools.islice(found.items(), SHOWN)))


if __name__ == "__main__":
    main()
