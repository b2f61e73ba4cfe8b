"""Is one decode kernel enough, and which rules does it need? `python -m benchmarks.kernels.one_kernel`.

Ways are named as in `benchmarks.kernels.portable`. Each is checked against the reference, on memory full of NaN, before
any is timed. Then all ways of a point are timed one after the other, and once more: `us` is the better time, `spread`
the worse one over it.

    python -m benchmarks.kernels.one_kernel                    # every question
    python -m benchmarks.kernels.one_kernel partitions rows    # these
"""

import argparse
import contextlib
import fcntl
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checks import poisoned, worst_error
from benchmarks.harness import add_output, compile_all, open_store, slope_microseconds
from benchmarks.kernels.decode import checked_rows, compile_judges
from benchmarks.kernels.points import GRID, Inputs, Point, make_inputs, parse
from benchmarks.kernels.portable import choose_attend
from benchmarks.kernels.ways import compile_way

QUESTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    # How short may a partition be? By default none has fewer than 512 tokens.
    "partitions": {
        "32/8 1x512": ("tma", "tma//2", "tma//4", "tma//8", "cp_async//4"),
        "32/8 1x8192": ("tma", "tma//32", "tma//64", "cp_async//32", "tma/4/32"),
        "32/8 8x2048": ("tma", "tma//2", "tma//8", "tma//16", "cp_async//8"),
    },
    # Equal partitions, a plan that a chain makes once, or one that each layer makes?
    "plans": {
        "32/8 64xragged8192": (
            *("tma", "tma//2", "tma//4", "tma//plan", "tma//fresh", "cp_async//4"),
            *("tma/1/1", "tma/1/2", "tma/1/4"),
        ),
        "32/8 64x2048": ("tma", "tma//plan", "tma//fresh", "tma/1/1"),
    },
    # What does it lose at the points by which decode is judged?
    "grid": {name: ("mosaic_gpu", "tma", *(("tma//fresh",) if "1x" not in name else ())) for name in GRID[:36]},
    # How near do 8-bit caches come to the floor, and how many programs should share a SM?
    "narrow": {
        f"32/8 {shape} cache={dtype} scale={scale}": ("tma", "tma//plan", *more)
        for shape, more in (("64x8192", ("tma/6", "tma/2/2")), ("8x4096", ("tma//4", "tma/6/4")))
        for dtype in ("float8_e4m3fn", "int8")
        for scale in ("head", "token_head")
    },
    # What does the default lose at other points?
    "default": {
        "32/8 1x32768": ("mosaic_gpu", "tma/6/16"),
        "32/8 1x8192": ("mosaic_gpu", "tma/6/16"),
        "32/8 8x2048": ("mosaic_gpu", "tma/6/2"),
    },
    # Who computes 33 to 64 rows of a KV head?
    "rows": {
        "32/8 64x2048 q_len=16": ("tma", "prefill"),
        "32/8 64x2048 q_len=10": ("tma", "prefill"),
        "32/8 8x2048 q_len=16": ("tma", "prefill", "prefill/1", "prefill/2"),
        "32/8 1x8192 q_len=16": ("tma", "prefill", "prefill/4", "prefill/8", "prefill/16"),
        "32/8 1x512 q_len=16": ("tma", "prefill", "prefill/1", "prefill/4"),
    },
}


def asked(question: str, points: list[str] | None) -> dict[str, tuple[str, ...]]:
    return {name: ways for name, ways in QUESTIONS[question].items() if points is None or name in points}


@contextlib.contextmanager
def alone(lock: str | None) -> Iterator[None]:
    if lock is None:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measure(point: Point, compiled: dict[str, Any], inputs: Inputs, seconds: float) -> dict[str, dict[str, Any]]:
    rows = np.asarray(checked_rows(point))
    expected = compiled["reference"](
        inputs.q[rows], *inputs.caches[0][0], inputs.block_tables[rows], inputs.lengths[rows]
    )
    ways = [way for way in compiled if way not in ("floor", "reference")]
    results = {way: {} if callable(compiled[way]) else {"failed": compiled[way]} for way in ways}
    for way in ways:
        if callable(compiled[way]):
            try:
                out = poisoned(compiled[way], inputs.q, inputs.caches[0], inputs.block_tables, inputs.lengths)[1]
                results[way]["error"] = worst_error(point.name, out[rows], expected)
            except AssertionError as error:
                results[way] = {"failed": str(error)}

    def microseconds(program: Any, *args: Any) -> float:
        def dispatch(i: int) -> Any:
            return program(*args[:1], inputs.caches[i % point.num_sets], *args[1:])

        return slope_microseconds(dispatch, point.num_calls, seconds)

    floor = microseconds(compiled["floor"], jnp.ones(128))
    times: dict[str, list[float]] = {}
    for _ in range(2):
        for way in (way for way in ways if "failed" not in results[way]):
            took = microseconds(compiled[way], inputs.q, inputs.block_tables, inputs.lengths)
            times.setdefault(way, []).append(took)
    for way, its in times.items():
        results[way] |= {"us": min(its), "spread": max(its) / min(its), "floor": floor, "over_floor": min(its) / floor}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=list(QUESTIONS), help=", ".join(QUESTIONS))
    parser.add_argument("--seconds", type=float, default=0.1, help="of one time, of which a way has two")
    parser.add_argument("--points", nargs="+", help="only these of a question")
    parser.add_argument("--lock", help="a file: runs that share it compile at the same time and measure in turn")
    add_output(parser)
    options = parser.parse_args()
    store = open_store("one_kernel", options)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    for question in options.questions:
        jobs: dict[Any, Any] = {}
        for point, ways in ((parse(name), ways) for name, ways in asked(question, options.points).items()):
            jobs |= compile_judges(point)
            jobs |= {(point, way): functools.partial(compile_way, point, choose_attend, way) for way in ways}
        compiled = compile_all(jobs)
        for point in dict.fromkeys(point for point, _ in jobs):
            programs = {what: program for (its, what), program in compiled.items() if its == point}
            with alone(options.lock):
                results = measure(point, programs, make_inputs(point), options.seconds)
            for way, result in results.items():
                store.add(f"{point.name} {way}", result)
                figures = (
                    "{us:8.2f} us, spread {spread:.3f}, {over_floor:6.3f} of the floor {floor:7.2f}, error {error:.1e}"
                )
                text = result["failed"] if "failed" in result else figures.format(**result)
                print(f"{point.name:<48} {way:<12} {text}", flush=True)


if __name__ == "__main__":
    main()
