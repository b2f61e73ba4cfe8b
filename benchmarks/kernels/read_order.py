"""What the memory itself takes for blocks that are not in order: `python -m benchmarks.kernels.read_order`.

A kernel that only reads, the floor of decode.py, over the blocks of a pool in their order and shuffled. What it takes
longer for the latter no paged attention can win back.
"""

import argparse
import functools

import jax
import jax.numpy as jnp

from benchmarks.harness import add_output, open_store, read_chain, slope_microseconds
from benchmarks.kernels.points import Point, make_inputs, parse

POINTS = tuple(
    f"32/8 {shape} block_size={block_size}" for shape in ("8x2048", "64x8192") for block_size in (16, 64, 256)
)


def measure(point: Point) -> dict[str, float]:
    """Microseconds a call, the lower of two measurements."""
    inputs = make_inputs(point)
    chain = jax.jit(functools.partial(read_chain, slots=point.slots, num_calls=point.num_calls))
    shuffled = inputs.block_tables.reshape(-1)
    token = jnp.ones(128)
    orders = {"in_order": jnp.sort(shuffled), "shuffled": shuffled}

    def microseconds(order: jax.Array) -> float:
        return slope_microseconds(lambda i: chain(token, inputs.caches[i % point.num_sets], order), point.num_calls)

    times = [{name: microseconds(order) for name, order in orders.items()} for _ in range(2)]
    return {name: min(time[name] for time in times) for name in orders}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", default=POINTS, help="names of points, see benchmarks/kernels/points.py")
    add_output(parser)
    options = parser.parse_args()
    store = open_store("read_order", options)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"{'':<32} {'in order':>9} {'shuffled':>9} {'ratio':>6}")
    for point in map(parse, options.points):
        result = measure(point)
        store.add(point.name, result)
        ratio = result["shuffled"] / result["in_order"]
        print(f"{point.name:<32} {result['in_order']:9.2f} {result['shuffled']:9.2f} {ratio:6.3f}", flush=True)


if __name__ == "__main__":
    main()
