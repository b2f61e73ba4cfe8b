"""The portable decode kernel against the Hopper one, "xla" and the floor: `python -m benchmarks.kernels.portable`.

A way is "mosaic_gpu", "xla", or a kernel, hopper, or a form of the portable one, tma or cp_async, with
/stages/partitions after it or not: tma, cp_async/2, tma/3/16, hopper//plan. In the place of the partitions, `plan` is
a plan for that kernel. Each is checked against the reference before it is timed. The columns are those of
benchmarks/kernels/decode.py; `kernels` is the time of the kernels alone, by CUPTI.

    python -m benchmarks.kernels.portable --points "32/8 64x8192" "32/8 8x8192" --ways mosaic_gpu tma tma/2 cp_async
    python -m benchmarks.kernels.portable --points "32/8 8xoutlier131072" --ways mosaic_gpu hopper hopper//plan
"""

import argparse
import dataclasses
import functools
from typing import Any

import jax

from benchmarks.harness import add_output, open_store
from benchmarks.kernels.points import Point, parse
from benchmarks.kernels.ways import arguments_of, compare
from jaxpaged import _device, paged_attention
from jaxpaged._attention import decode
from jaxpaged._attention.partitions import programs_at_once
from pallas_kernels import partition_plan

POINTS = (
    *("32/8 64x8192", "32/8 64x2048", "32/8 8x8192", "32/8 1x8192", "32/8 64x2048 head_dim=64"),
    *("32/8 64x8192 cache=float8_e4m3fn scale=head", "32/8 64x8192 cache=int8 scale=head"),
    *("32/8 64x8192 cache=float8_e4m3fn scale=token_head", "32/8 64x2048 q_len=16"),
)
WAYS = ("mosaic_gpu", "xla", "tma", "cp_async")


def attend(way: str, *arrays: jax.Array, **options: Any) -> jax.Array:
    """The output of one kernel, called as `paged_attention`."""
    a = arguments_of(arrays, options)
    gpu, window = _device.gpu(), options.get("sliding_window")
    kernel, stages, partitions, *_ = (*way.split("/"), "", "")
    plan = None
    if partitions == "plan":
        kv_heads, rows = a.k_cache.shape[2], a.q.shape[1] * a.group
        at_once = programs_at_once(gpu, num_kv_heads=kv_heads, rows=rows, by_portable=kernel != "hopper")
        plan = partition_plan.default(a.lengths, a.options.sliding_window, q_len=a.q.shape[1], at_once=at_once)
    num_partitions = int(partitions) if partitions and plan is None else None
    changes: dict[str, Any] = {"num_stages": int(stages)} if stages else {}
    if kernel != "hopper":
        changes["copies"] = kernel
    config_of: Any = decode.hopper_config_of if kernel == "hopper" else decode.portable_config_of
    config = config_of(a, gpu, num_partitions=num_partitions, planned=plan is not None, window=window)
    return decode.launch(dataclasses.replace(config, **changes), None, a, plan)[0]


def attend_of(way: str, _: Point) -> Any:
    if way in ("mosaic_gpu", "xla"):
        return functools.partial(paged_attention, implementation=way)
    return functools.partial(attend, way)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", default=POINTS, help="names of points, see points.py")
    parser.add_argument("--ways", nargs="+", default=WAYS, metavar="WAY")
    add_output(parser)
    options = parser.parse_args()
    store = open_store("portable", options)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    compare(map(parse, options.points), options.ways, attend_of, store)


if __name__ == "__main__":
    main()
