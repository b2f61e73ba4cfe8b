"""Configurations of the decode kernel against each other.

A config is written as partitions/cluster/tile/resident, where `resident` programs share a SM's shared memory, with
/unsplit_tiles after it or not; `default` is what the library takes for this kernel. Each is checked against the
reference before it is timed; the columns are those of decode.py, `kernels` the time of the kernels alone.
What wins here becomes a rule in pallas_kernels/decode_config.py.

    python -m benchmarks.kernels.configs --points "32/8 1x8192" "32/8 1x32768" --configs default 16/8/64/2 16/16/64/2
"""

import argparse
import dataclasses
import functools
from typing import Any

import jax

from benchmarks.harness import add_output, open_store
from benchmarks.kernels.points import Point, parse
from benchmarks.kernels.ways import arguments_of, compare
from jaxpaged import _device
from jaxpaged._attention.choose import Known, by_decode
from jaxpaged._attention.query_runs import runs_of
from jaxpaged._attention.run import run
from pallas_kernels.decode_config import Config, completed


def parse_config(text: str, point: Point) -> Config:
    num_partitions, cluster, tile, resident, unsplit_tiles = (*map(int, text.split("/")), 0)[:5]
    if num_partitions % cluster:
        raise ValueError(f"{num_partitions} partitions cannot be clusters of {cluster}: name a divisor")
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


def attend(
    text: str, point: Point, gpu: _device.Gpu, *arrays: jax.Array, interpret: Any = None, **options: Any
) -> jax.Array:
    """The output of the Hopper decode kernel with one configuration, called as `paged_attention`."""
    a = arguments_of(arrays, options)
    choice = by_decode("paged_decode", a, gpu, Known(window=point.window or None))
    if text != "default":
        choice = dataclasses.replace(choice, config=parse_config(text, point))
    return run(dataclasses.replace(choice, interpret=interpret), a)[0]


def attend_of(text: str, point: Point) -> Any:
    return functools.partial(attend, text, point, _device.gpu())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", required=True, help="names of points, see points.py")
    parser.add_argument("--configs", nargs="+", required=True, metavar="P/C/T/R[/U]", help="or default")
    add_output(parser)
    options = parser.parse_args()
    store = open_store("configs", options)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    compare(map(parse, options.points), options.configs, attend_of, store)


if __name__ == "__main__":
    main()
