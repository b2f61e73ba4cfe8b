"""Configurations of the decode kernel for Hopper against each other.

A config is written as partitions/stages/tile; `default` is what the library takes for this kernel. Each is checked
against the reference before it is timed; the columns are those of decode.py, `kernels` the time of the kernels alone.
What wins here becomes a rule in pallas_kernels/decode_config.py.

    python -m benchmarks.kernels.configs --points "32/8 8x2048 q_len=16" --configs default 4/2/128 1/2/64
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
from jaxpaged._attention.run import run
from pallas_kernels.decode_config import Config


def parse_config(text: str) -> Config:
    return Config(*map(int, text.split("/")))


def attend(
    text: str, point: Point, gpu: _device.Gpu, *arrays: jax.Array, interpret: Any = None, **options: Any
) -> jax.Array:
    """The output of the Hopper decode kernel with one configuration, called as `paged_attention`."""
    a = arguments_of(arrays, options)
    choice = by_decode("paged_decode", a, gpu, Known(window=point.window or None))
    if text != "default":
        choice = dataclasses.replace(choice, config=parse_config(text))
    return run(dataclasses.replace(choice, interpret=interpret), a)[0]


def attend_of(text: str, point: Point) -> Any:
    return functools.partial(attend, text, point, _device.gpu())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", required=True, help="names of points, see points.py")
    parser.add_argument("--configs", nargs="+", required=True, metavar="P/S/T", help="or default")
    add_output(parser)
    options = parser.parse_args()
    store = open_store("configs", options)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    compare(map(parse, options.points), options.configs, attend_of, store)


if __name__ == "__main__":
    main()
