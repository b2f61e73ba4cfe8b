"""Configs of the decode kernel against each other: `python -m benchmarks.configs --points "32/8 1x8192" --configs ...`.

A config is written as partitions/cluster/tile/resident, where `resident` programs share a SM's shared memory; `default`
is what the library takes. Each is checked against the reference before it is timed; the columns are those of
benchmarks/decode.py, `kernels` the time of the kernels alone. What wins here becomes a rule in
pallas_kernels/decode_config.py.

    python -m benchmarks.configs --points "32/8 1x8192" "32/8 1x32768" --configs default 16/8/64/2 16/16/64/2
"""

import argparse
import functools
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from benchmarks.decode import Programs, chain, compile_point, measure, measure_kernels, options_of, with_scales
from benchmarks.harness import Store, compile_all, header
from benchmarks.points import Point, make_inputs, parse, shapes_of
from jaxpaged import _mosaic_gpu, paged_attention
from pallas_kernels._rows import round_up
from pallas_kernels.decode_config import Config, fitting_stages, padded_width


def parse_config(text: str, point: Point) -> Config:
    num_partitions, cluster, tile, resident = map(int, text.split("/"))
    width, rows = padded_width(point.head_dim), round_up(point.q_len * point.heads // point.kv_heads, 8)
    chunk = width if width * rows <= 128 * 32 else 64
    shape = dict(width=width, rows=rows, chunk=chunk, num_partitions=num_partitions, cluster=cluster, tile=tile)
    itemsize = jax.numpy.dtype(point.cache_dtype).itemsize
    return Config(
        num_partitions=num_partitions,
        cluster=cluster,
        num_stages=fitting_stages(**shape, resident=resident, itemsize=itemsize),
        tile=tile,
        chunk=chunk,
    )


def compile_config(point: Point, text: str, lowering: threading.Lock) -> Any:
    """The chain of `point` with one config; or, as a string, why not."""
    shapes = shapes_of(point)
    args = shapes.q, shapes.caches[0], shapes.block_tables, shapes.lengths
    attention: Any = functools.partial(paged_attention, implementation="mosaic_gpu", **options_of(point))
    jitted = jax.jit(functools.partial(chain, point, functools.partial(with_scales, attention)))
    try:
        if text == "default":
            with lowering:
                lowered = jitted.lower(*args)
        else:
            config = parse_config(text, point)
            with lowering, mock.patch.object(_mosaic_gpu, "config_of", return_value=config):
                lowered = jitted.lower(*args)
        return lowered.compile()
    except Exception as error:  # a config that does not fit is a result too
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", required=True, help="names of points, see benchmarks/points.py")
    parser.add_argument("--configs", nargs="+", required=True, metavar="P/C/T/R", help="or default")
    parser.add_argument("--output", type=Path, help="a JSON file for the results, written one by one")
    options = parser.parse_args()
    store = Store(options.output, **header())
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    lowering = threading.Lock()
    for point in map(parse, options.points):
        jobs = compile_point(point, "xla", None, [])  # for the floor and the reference
        del jobs[point, "ours"]
        jobs |= {text: functools.partial(compile_config, point, text, lowering) for text in options.configs}
        compiled = compile_all(jobs)
        inputs = make_inputs(point)
        for text in options.configs:
            if isinstance(compiled[text], str):
                result: dict[str, Any] = {"failed": compiled[text]}
                print(f"{point.name:<24} {text:<12} {compiled[text]}", flush=True)
            else:
                programs = Programs(compiled[text], compiled[point, "floor"], compiled[point, "reference"], {})
                result = measure(point, programs, inputs) | measure_kernels(point, programs, inputs)
                print(
                    f"{point.name:<24} {text:<12} {result['us']:8.2f} us, kernels {result['kernels']:8.2f}, "
                    f"floor {result['floor']:8.2f}, {result['over_floor']:.3f}, error {result['error']:.1e}",
                    flush=True,
                )
            store.add(f"{point.name} {text}", result)


if __name__ == "__main__":
    main()
