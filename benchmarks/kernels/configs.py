"""Configurations of the decode kernel against each other.

A config is written as partitions/cluster/tile/resident, where `resident` programs share a SM's shared memory, with
/unsplit_tiles after it or not; `default` is what the library takes for this kernel. Each is checked against the
reference before it is timed; the columns are those of decode.py, `kernels` the time of the kernels alone.
What wins here becomes a rule in pallas_kernels/decode_config.py.

    python -m benchmarks.kernels.configs --points "32/8 1x8192" "32/8 1x32768" --configs default 16/8/64/2 16/16/64/2
"""

import argparse
from typing import Any
from unittest import mock

import jax

from benchmarks.harness import add_output, compile_all, open_store
from benchmarks.kernels.decode import Programs, compile_point, measure, measure_kernels
from benchmarks.kernels.points import Point, make_inputs, parse
from jaxpaged._attention import mosaic_gpu
from jaxpaged._attention.query_runs import runs_of
from pallas_kernels.decode_config import Config, completed


def parse_config(text: str, point: Point) -> Config:
    num_partitions, cluster, tile, resident, unsplit_tiles = (*map(int, text.split("/")), 0)[:5]
    group = point.heads // point.kv_heads
    _, run = runs_of(point.q_len, group)
    config = completed(
        num_partitions=num_partitions,
        cluster=cluster,
        unsplit_tiles=unsplit_tiles,
        tile=tile,
        resident=resident,
        head_dim=point.head_dim,
        q_len=run,
        group=group,
        capacity=point.max_blocks * point.block_size,
        window=point.window or None,
        itemsize=jax.numpy.dtype(point.cache_dtype).itemsize,
        token_scales=2 if point.scale == "token_head" else 0,
    )
    if resident == 2 and not config.last_first:
        raise ValueError("two programs, of two stages each, do not fit")
    return config


def compile_config(point: Point, text: str) -> Any:
    """The chain of `point` with one config; or, as a string, why not."""
    job = compile_point(point, "mosaic_gpu", None, [])[point, "ours"]
    try:
        with mock.patch.object(mosaic_gpu, "are_uneven", return_value=False):  # otherwise another kernel may take it
            if text == "default":
                return job()
            with mock.patch.object(mosaic_gpu, "config_of", return_value=parse_config(text, point)):
                return job()
    except Exception as error:  # a config that does not fit is a result too
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", required=True, help="names of points, see benchmarks/kernels/points.py")
    parser.add_argument("--configs", nargs="+", required=True, metavar="P/C/T/R[/U]", help="or default")
    add_output(parser)
    options = parser.parse_args()
    store = open_store("configs", options)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    for point in map(parse, options.points):
        jobs = compile_point(point, "mosaic_gpu", None, [])
        del jobs[point, "ours"]
        compiled = compile_all(jobs) | {text: compile_config(point, text) for text in options.configs}
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
