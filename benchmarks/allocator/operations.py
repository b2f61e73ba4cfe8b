"""The cost of each operation of the allocator: `python -m benchmarks.allocator.operations`.

Each operation runs in a loop inside one jit (loops.py says why it is unrolled). Results are microseconds of device time
per step, from the slope between few and many dispatches, over batch size, pool size and number of blocks held.

Every loop is checked before it is timed: invariants hold, no sequence is refused, and lengths are right. `--toy` runs
everything at toy sizes. figures/allocator.py draws the results.
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

from benchmarks.allocator import loops
from benchmarks.allocator.loops import BLOCK_SIZE, BODIES, NUM_STEPS, UNROLL, LoopState, Point
from benchmarks.checks import poisoned
from benchmarks.harness import Store, add_output, compile_all, open_store, slope_microseconds

THE_POINT = Point(256, 65_536, 256, 2048)  # the point with the target of 15 us per step
# The sweeps, each along one size. In the first two a sequence holds 18 blocks at the start.
SWEEPS = {
    "batch": [Point(n, 65_536, 40, 288) for n in (1, 16, 64, 256, 1024)],
    "pool": [Point(16, n, 40, 288) for n in (1024, 16_384, 65_536, 262_144, 1_048_576)],
    "held": [Point(256, 65_536, 256, n) for n in (288, 2048, 3680)],
}
TOY_POINT = Point(8, 512, 40, 288)
SECONDS = 0.2  # spent on timing each loop


def key(operation: str, point: Point) -> str:
    sizes = f"{point.num_seqs} seqs, {point.num_blocks} blocks, {point.length} tokens in {point.max_blocks}"
    return f"{operation} | {sizes}"


def fits(name: str, point: Point) -> bool:
    prompts = (point.num_seqs + 1) // 2 * loops.PROMPT_LENGTH // BLOCK_SIZE
    return "match" not in name or prompts < point.num_blocks


def measure(name: str, point: Point, compiled: Any, state: LoopState, seconds: float) -> dict[str, Any]:
    loops.check(name, state, poisoned(compiled, state), NUM_STEPS)
    microseconds = slope_microseconds(lambda _: compiled(state), NUM_STEPS, seconds)
    held = float(state.allocator.num_held) / (point.num_blocks - 1)
    return {"operation": name, **dataclasses.asdict(point), "held": held, "us": microseconds}


def measure_loops(store: Store, operations: list[str], points: list[Point], seconds: float) -> None:
    jobs = {key(name, p): (name, p) for p in points for name in operations if fits(name, p)}
    todo = {k: job for k, job in jobs.items() if k not in store.points}
    starts = {("match" in name, p) for name, p in todo.values()}
    states = compile_all({(prompts, p): functools.partial(loops.start, p, prompts=prompts) for prompts, p in starts})
    of = {k: states["match" in name, p] for k, (name, p) in todo.items()}

    def compiling(body: loops.Body, state: LoopState) -> Callable[[], Any]:
        return lambda: loops.run.lower(state, body=body).compile()

    compiled = compile_all({k: compiling(BODIES[name], of[k]) for k, (name, _) in todo.items()})
    for k, (name, p) in todo.items():
        store.add(k, measure(name, p, compiled[k], of[k], seconds))
        print(f"{k}: {store.points[k]['us']:.2f} us", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="toy sizes, to see on any machine that it runs")
    parser.add_argument("--operations", nargs="+", default=list(BODIES), choices=list(BODIES))
    add_output(parser)
    options = parser.parse_args(arguments)
    store = open_store("allocator", options, num_steps=NUM_STEPS, unroll=UNROLL)
    print(f"{store.header['device']}, jax {store.header['jax']}", flush=True)
    points = [THE_POINT, *itertools.chain(*SWEEPS.values())]
    if options.toy:
        points = [TOY_POINT, dataclasses.replace(TOY_POINT, num_seqs=1)]
    seconds = 0.002 if options.toy else SECONDS
    measure_loops(store, options.operations, points, seconds)


if __name__ == "__main__":
    main()
