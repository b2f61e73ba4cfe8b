"""What the allocator costs: `python -m benchmarks.allocator.operations`.

1. Each operation in a loop inside one jit (loops.py says why it is unrolled), in microseconds of device time a step, by
   the slope between few and many dispatches. It is swept over the batch, the size of the pool, and the blocks held. An
   empty loop, and the kernels of `append` alone, are measured too.
2. A decode step of a model of Llama-3-8B's shape with random weights, in three forms that take turns three times: with
   the allocator; with tables filled beforehand; and with an allocator on the host (a deque and lists), which must wait
   for each step's tokens before it knows which sequences end.
3. The host allocator alone: its own time, and a step of it with the wait and the transfers.

Every loop is checked before it is timed: invariants hold, no sequence is refused, lengths are right, tables and slots
equal the host allocator's, and the three decode loops agree in tables, lengths and tokens. `--toy` runs everything at
toy sizes, `--no-model` leaves the second part out, `--no-kernels` leaves CUPTI out. figures/allocator.py draws the
first part.
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.allocator import loops, model_step
from benchmarks.allocator.host_allocator import HostAllocator
from benchmarks.allocator.loops import BLOCK_SIZE, BODIES, NUM_STEPS, UNROLL, LoopState, Point
from benchmarks.checks import poisoned
from benchmarks.harness import (
    Store,
    add_output,
    by_kernel,
    compile_all,
    kernel_times,
    open_store,
    slope_microseconds,
)

THE_POINT = Point(256, 65_536, 256, 2048)  # what the bar of 15 us a step is about
# The sweeps, each along one size. In the first two a sequence holds 18 blocks at the start.
SWEEPS = {
    "batch": [Point(n, 65_536, 40, 288) for n in (1, 16, 64, 256, 1024)],
    "pool": [Point(16, n, 40, 288) for n in (1024, 16_384, 65_536, 262_144, 1_048_576)],
    "held": [Point(256, 65_536, 256, n) for n in (288, 2048, 3680)],
}
TOY_POINT = Point(8, 512, 40, 288)
TOY_SWEEPS = {
    "batch": [dataclasses.replace(TOY_POINT, num_seqs=1), TOY_POINT],
    "pool": [TOY_POINT],
    "held": [TOY_POINT],
}
SECONDS = 0.2  # of timing a loop


def key(operation: str, point: Point) -> str:
    sizes = f"{point.num_seqs} seqs, {point.num_blocks} blocks, {point.length} tokens in {point.max_blocks}"
    return f"{operation} | {sizes}"


def jobs(operations: list[str], points: list[Point]) -> dict[str, tuple[str, Point]]:
    """What is measured, by its key: every operation at every point at which it fits."""
    return {key(name, p): (name, p) for p in points for name in operations if fits(name, p)}


def fits(name: str, point: Point) -> bool:
    prompts = (point.num_seqs + 1) // 2 * loops.PROMPT_LENGTH // BLOCK_SIZE
    return "match" not in name or prompts < point.num_blocks


def measure(name: str, point: Point, compiled: Any, state: LoopState, seconds: float) -> dict[str, Any]:
    loops.check(name, state, poisoned(compiled, state), NUM_STEPS)
    microseconds = slope_microseconds(lambda _: compiled(state), NUM_STEPS, seconds)
    held = float(state.allocator.num_held) / (point.num_blocks - 1)
    return {"operation": name, **dataclasses.asdict(point), "held": held, "us": microseconds}


def measure_loop_alone(point: Point, seconds: float) -> dict[str, float]:
    """Microseconds of an iteration in which next to nothing happens: of a known number of them, and of an unknown."""
    state, num_steps = loops.start(point), jnp.int32(NUM_STEPS)
    return {
        "known_us": slope_microseconds(lambda _: loops.run(state, body=loops.nothing, unroll=1), NUM_STEPS, seconds),
        "unknown_us": slope_microseconds(lambda _: loops.run_nothing(state, num_steps), NUM_STEPS, seconds),
    }


def measure_kernels(point: Point) -> dict[str, Any]:
    """The kernels of `append`, microseconds and launches a step, without what is between them."""
    state = loops.start(point)

    def dispatch() -> LoopState:
        return loops.run(state, body=loops.append)

    jax.block_until_ready(dispatch())
    found = by_kernel(kernel_times(dispatch), NUM_STEPS)
    return {"us": sum(us for us, _ in found.values()), "by_kernel": found}


def measure_loops(store: Store, operations: list[str], points: list[Point], seconds: float) -> None:
    todo = {k: job for k, job in jobs(operations, points).items() if k not in store.points}
    starts = {("match" in name, p) for name, p in todo.values()}
    states = compile_all({(prompts, p): functools.partial(loops.start, p, prompts=prompts) for prompts, p in starts})
    of = {k: states["match" in name, p] for k, (name, p) in todo.items()}

    def compiling(body: loops.Body, state: LoopState) -> Callable[[], Any]:
        return lambda: loops.run.lower(state, body=body).compile()

    compiled = compile_all({k: compiling(BODIES[name], of[k]) for k, (name, _) in todo.items()})
    for k, (name, p) in todo.items():
        store.add(k, measure(name, p, compiled[k], of[k], seconds))
        print(f"{k}: {store.points[k]['us']:.2f} us", flush=True)


def host_copy(state: LoopState, point: Point) -> HostAllocator:
    """The host allocator in the same state."""
    host = HostAllocator(point.num_blocks, BLOCK_SIZE, point.num_seqs, point.max_blocks)
    allocator = state.allocator
    host.free_blocks.clear()
    host.free_blocks.extend(allocator.pool.free_list[: int(allocator.num_free)].tolist())
    host.lengths = allocator.lengths.tolist()
    host.block_tables[:] = allocator.block_tables
    held = -(-np.asarray(host.lengths) // BLOCK_SIZE)
    host.blocks = [row[:count].tolist() for row, count in zip(host.block_tables, held, strict=True)]
    return host


def ended(rows: np.ndarray, i: int) -> np.ndarray:
    return (rows + i) % 64 == 0  # as in loops.append_and_free


def check_by_host(point: Point, num_steps: int = 6 * UNROLL) -> None:
    """Raises unless the device's tables, lengths and slots equal the host allocator's, to the last block id."""
    state = loops.start(point)
    host, rows = host_copy(state, point), np.arange(point.num_seqs)
    total = np.zeros(point.num_seqs, np.int32)
    for i in range(num_steps):
        total += host.append()
        host.free(ended(rows, i))
    after = loops.run(state, body=BODIES["append, free"], num_steps=num_steps)
    for got, wanted in (
        (after.allocator.block_tables, host.block_tables),
        (after.allocator.lengths, host.lengths),
        (after.total, total),
    ):
        np.testing.assert_array_equal(got, wanted)


def measure_host(point: Point, num_steps: int) -> dict[str, float]:
    """Microseconds a step: of the host allocator by itself, and with what it forces."""
    state, rows = loops.start(point), np.arange(point.num_seqs)
    host, times = host_copy(state, point), []
    for i in range(num_steps):
        begun = time.perf_counter()
        host.append()
        host.free(ended(rows, i))
        times.append(time.perf_counter() - begun)

    @jax.jit
    def step(tokens: jax.Array, slots: jax.Array, block_tables: jax.Array, lengths: jax.Array) -> jax.Array:
        return (tokens * 5 + slots + block_tables[:, 0] + lengths) % 1021

    host, waits = host_copy(state, point), []
    tokens = jnp.zeros(point.num_seqs, jnp.int32)
    for _ in range(num_steps):
        begun = time.perf_counter()
        slots = host.append()
        tokens = step(tokens, *jax.device_put((slots, host.block_tables, np.asarray(host.lengths, np.int32))))
        host.free(np.asarray(tokens) % 64 == 0)  # the wait
        waits.append(time.perf_counter() - begun)
    return {"host_us": statistics.median(times) * 1e6, "host_with_sync_us": statistics.median(waits) * 1e6}


def table(store: Store, operations: list[str], sweeps: dict[str, list[Point]], point: Point) -> str:
    lines = []
    for title, points in sweeps.items():
        rows = {name: [store.points.get(key(name, p)) for p in points] for name in operations}
        heads = [heading(title, point, result) for point, result in zip(points, rows[operations[0]], strict=True)]
        lines.append(f"{title + ', us a step':<26}" + "".join(f"{head:>10}" for head in heads))
        for name, results in rows.items():
            cells = [f"{result['us']:10.2f}" if result else f"{'-':>10}" for result in results]
            lines.append(f"  {name:<24}" + "".join(cells))
    at = store.points[key("append", point)]
    lines.append(f"append + slots, {point.num_seqs} sequences, {point.num_blocks} blocks: {at['us']:.2f} us a step")
    if "kernels" in store.points:
        kernels = store.points["kernels"]
        lines.append(f"  of which kernels {kernels['us']:.2f} us")
        found = kernels["by_kernel"].items()
        lines += [f"  {us:8.2f} us, {launches:5.2f} launches a step  {kernel}" for kernel, (us, launches) in found]
    alone = store.points["loop"]
    lines.append(f"an iteration of a loop alone: {alone['known_us']:.2f} us, of which {UNROLL} steps above share one;")
    lines.append(f"  {alone['unknown_us']:.2f} us if the number of iterations is unknown, as in decoding")
    host = store.points["host"]
    waiting = f"with the wait and the transfers {host['host_with_sync_us']:.0f} us"
    lines.append(f"the same on the host: {host['host_us']:.0f} us, {waiting}")
    models = {name: result for name, result in store.points.items() if name.startswith("model ")}
    return "\n".join([*lines, *(model_step.line(name, result) for name, result in models.items())])


def heading(title: str, point: Point, result: dict[str, Any] | None) -> str:
    if title == "held":
        return f"{result['held']:.0%}" if result else "-"
    return str(point.num_seqs if title == "batch" else point.num_blocks)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="toy sizes, to see on any machine that it runs")
    parser.add_argument("--operations", nargs="+", default=list(BODIES), choices=list(BODIES), help="append is added")
    parser.add_argument("--no-model", action="store_true", help="leave the decode steps out")
    parser.add_argument("--no-kernels", action="store_true", help="leave the times by kernel out")
    parser.add_argument("--shapes", nargs="+", default=["64x2048", "256x512"], help="of the model: sequences x length")
    add_output(parser)
    options = parser.parse_args(arguments)
    sweeps, point = (TOY_SWEEPS, TOY_POINT) if options.toy else (SWEEPS, THE_POINT)
    operations = list(dict.fromkeys([*options.operations, "append"]))
    begun = time.perf_counter()
    store = open_store("allocator", options, num_steps=NUM_STEPS, unroll=UNROLL)
    check_by_host(point)
    points = [point, *itertools.chain(*sweeps.values())]
    seconds = 0.002 if options.toy else SECONDS
    measure_loops(store, operations, points, seconds)
    if "loop" not in store.points:
        store.add("loop", dataclasses.asdict(point) | measure_loop_alone(point, seconds))
    if "host" not in store.points:
        store.add("host", dataclasses.asdict(point) | measure_host(point, 20 if options.toy else 300))
    shapes = [] if options.no_model else ["2x40"] if options.toy else options.shapes
    shapes = [shape for shape in shapes if f"model {shape}" not in store.points]
    if shapes:
        append_us = store.points[key("append", point)]["us"]
        for name, result in model_step.measure(shapes, options.toy, append_us):
            store.add(name, result)
            print(model_step.line(name, result), flush=True)
    if "kernels" not in store.points and not options.no_kernels and jax.default_backend() == "gpu":
        # Last: CUPTI may change what the process does afterwards.
        store.add("kernels", dataclasses.asdict(point) | measure_kernels(point))
    print(f"\n{store.header['device']}, jax {store.header['jax']}, {time.perf_counter() - begun:.0f} s")
    print(table(store, operations, sweeps, point))


if __name__ == "__main__":
    main()
