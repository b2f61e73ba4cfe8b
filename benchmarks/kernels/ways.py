"""A point in several ways: each is compiled, checked against the reference, timed, and printed beside the others."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from benchmarks.harness import Store, compile_all
from benchmarks.kernels.decode import (
    Programs,
    chain,
    compile_judges,
    make_options,
    measure,
    measure_kernels,
    with_scales,
)
from benchmarks.kernels.points import Point, input_shapes, make_inputs
from jaxpaged._attention.call import Call, check_call

Attend = Callable[..., jax.Array]  # of q, k_cache, v_cache, block_tables, lengths, and options as `paged_attention`
OPTIONS = ("scale", "sliding_window", "logits_soft_cap", "alibi_slopes", "sinks", "k_scale", "v_scale")
DOES_NOT_FIT = (ValueError, NotImplementedError, jax.errors.JaxRuntimeError)  # the last: ptxas, or no memory


def make_call(arrays: Sequence[jax.Array], options: dict[str, Any]) -> Call:
    """What the kernels of jaxpaged are launched with, of a call of `paged_attention`."""
    return check_call(*arrays, **(dict.fromkeys(OPTIONS) | options))  # type: ignore[arg-type]


def compile_chain(point: Point, attend: Attend) -> Any:
    shapes = input_shapes(point)
    call = functools.partial(with_scales, attend, **make_options(point))
    args = shapes.q, shapes.caches[0], shapes.block_tables, shapes.lengths
    return jax.jit(functools.partial(chain, point, call)).lower(*args).compile()


def compile_way(point: Point, choose_attend: Callable[[str, Point], Attend], way: str) -> Any:
    """The chain of `point`; or, as a string, why this way does not fit it, which is a result too."""
    try:
        return compile_chain(point, choose_attend(way, point))
    except DOES_NOT_FIT as error:
        return f"{type(error).__name__}: {str(error).partition('\n')[0][:80]}"


def compare(
    points: Iterable[Point],
    ways: Sequence[str],
    choose_attend: Callable[[str, Point], Attend],
    store: Store,
    rounds: int = 1,
) -> None:
    """Each way is timed `rounds` times, in turn with the others; the quickest counts."""
    for point in points:
        jobs = compile_judges(point) | {way: functools.partial(compile_way, point, choose_attend, way) for way in ways}
        compiled = compile_all(jobs)
        inputs = make_inputs(point)
        judges = compiled[point, "floor"], compiled[point, "reference"]
        programs = {way: Programs(compiled[way], *judges, {}) for way in ways if not isinstance(compiled[way], str)}
        found = [{way: measure(point, its, inputs) for way, its in programs.items()} for _ in range(rounds)]
        for way in ways:
            if way not in programs:
                result: dict[str, Any] = {"failed": compiled[way]}
                text = compiled[way]
            else:
                times = [results[way]["us"] for results in found]
                result = found[times.index(min(times))][way] | {"spread": max(times) / min(times)}
                result |= measure_kernels(point, programs[way], inputs) if jax.default_backend() == "gpu" else {}
                text = line(result)
            print(f"{point.name:<48} {way:<16} {text}", flush=True)
            store.add(f"{point.name} {way}", result)


def line(result: dict[str, Any]) -> str:
    kernels = f"kernels {result['kernels']:8.2f}, " if "kernels" in result else ""
    return (
        f"{result['us']:8.2f} us, {kernels}floor {result['floor']:8.2f}, {result['over_floor']:.3f} of it, "
        f"spread {result['spread']:.3f}, "
        f"error {result['error']:.1e}"
    )
