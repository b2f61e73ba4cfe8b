"""The forms of the decode kernel against each other, "xla" and the floor: `python -m benchmarks.kernels.forms`.

A way is "mosaic_gpu", "xla", or a form of the decode kernel, tma or cp_async, with /stages/partitions after it or not:
tma, cp_async/2, tma/3/16. Instead of the partitions, `plan` is a plan, which a chain makes once, and `fresh` one
that each call makes. `prefill` is the kernel for prompts, with /parts after it or not. Each is checked against the
reference before it is timed. The columns are as in kernels/decode.py; `kernels` is the time of the kernels alone, by
CUPTI. Results that name `hopper` are of a second decode kernel, which is gone.

    python -m benchmarks.kernels.forms --points "32/8 64x8192" "32/8 8x8192" --ways mosaic_gpu tma tma/2 cp_async
    python -m benchmarks.kernels.forms --points "32/8 8xoutlier131072" --ways tma tma//plan tma//fresh

With `--rounds` all ways of a point are timed one after the other, so many times: `us` is the least of a way's times,
`spread` the greatest over it.
"""

import argparse
import dataclasses
import functools
from typing import Any

import jax
from jax import lax

from benchmarks.harness import add_output, open_store
from benchmarks.kernels.points import Point, parse
from benchmarks.kernels.ways import compare, make_call
from jaxpaged import _device, paged_attention
from jaxpaged._attention.choose import Known, by_decode, by_prefill
from jaxpaged._attention.run import run

POINTS = (
    *("32/8 64x8192", "32/8 64x2048", "32/8 8x8192", "32/8 1x8192", "32/8 64x2048 head_dim=64"),
    *("32/8 64x8192 cache=float8_e4m3fn scale=head", "32/8 64x8192 cache=int8 scale=head"),
    *("32/8 64x8192 cache=float8_e4m3fn scale=token_head", "32/8 64x2048 q_len=16"),
)
WAYS = ("mosaic_gpu", "xla", "tma", "cp_async")


def attend(way: str, *arrays: jax.Array, interpret: Any = None, **options: Any) -> jax.Array:
    """The output of one kernel, called as `paged_attention`."""
    a = make_call(arrays, options)
    name, stages, partitions, *_ = (*way.split("/"), "", "")
    changes: dict[str, Any]
    if name == "prefill":
        choice = by_prefill(a, _device.gpu(), Known())
        changes = {"num_parts": int(stages)} if stages else {}
        return run(dataclasses.replace(choice, config=dataclasses.replace(choice.config, **changes)), a)[0]
    if partitions == "fresh":
        a = dataclasses.replace(a, lengths=lax.optimization_barrier((a.lengths, a.q))[0])
    planned = partitions in ("plan", "fresh")
    known = Known(int(partitions) if partitions and not planned else None, options.get("sliding_window"))
    choice = by_decode(a, _device.gpu(), known, planned=planned)
    changes = {"copies": name} | ({"num_stages": int(stages)} if stages else {})
    config = dataclasses.replace(choice.config, **changes)
    return run(dataclasses.replace(choice, config=config, interpret=interpret), a)[0]


def choose_attend(way: str, _: Point) -> Any:
    if way in ("mosaic_gpu", "xla"):
        return functools.partial(paged_attention, implementation=way)
    return functools.partial(attend, way)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", default=POINTS, help="names of points, see points.py")
    parser.add_argument("--ways", nargs="+", default=WAYS, metavar="WAY")
    parser.add_argument("--rounds", type=int, default=1, help="times of each way, in turn with the others")
    add_output(parser)
    options = parser.parse_args()
    store = open_store("forms", options)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    compare(map(parse, options.points), options.ways, choose_attend, store, rounds=options.rounds)


if __name__ == "__main__":
    main()
