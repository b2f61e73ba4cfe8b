"""Paged decode attention against the floor of its bytes, and against other libraries.

Every point is checked against the reference before it is timed. Times are microseconds a call on the device:

  us       of calls chained in one jit, as the layers of a model are, everything between the kernels included
  kernels  the kernels alone, by CUPTI, the sum over one call
  floor    a kernel that only reads the K and V bytes of the point, in the same kind of chain, in the same run

The caches take turns, so that L2 is cold. A point that is in the output file already is left out, so that a run may be
cut into pieces. `--points` takes names such as those that are printed, see benchmarks/kernels/points.py.

    python -m benchmarks.kernels.decode               # the grid
    python -m benchmarks.kernels.decode --peers fa3   # beside FlashAttention 3
    python -m benchmarks.kernels.decode --set variants
    python -m benchmarks.kernels.decode --set quantised --no-kernels   # 8-bit caches beside bfloat16
    python -m benchmarks.kernels.decode --set shared   # blocks that sequences share, read once and by each
"""

import argparse
import dataclasses
import functools
import itertools
import time
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checks import poisoned, worst_error
from benchmarks.harness import (
    add_output,
    compile_all,
    geometric_mean,
    kernel_times,
    open_store,
    read_chain,
    slope_microseconds,
)
from benchmarks.kernels import peers
from benchmarks.kernels.partitioned import Partitions, partitioned
from benchmarks.kernels.points import (
    GRID,
    HEADS,
    QUANTISED,
    SHARED,
    VARIANTS,
    Inputs,
    Point,
    input_shapes,
    make_inputs,
    parse,
    point_tables,
)
from jaxpaged import BlockAllocator, paged_attention_reference, tree_mask

MAX_CHECKED = 4  # sequences of a point that are compared with the reference


def make_options(point: Point) -> dict[str, Any]:
    return ({"sliding_window": point.window} if point.window else {}) | ({"tree": True} if point.tree else {})


def with_scales(
    attention: Any, q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array, tree: bool = False, **options: Any
) -> Any:
    """`attention(q, k, v, block_tables, lengths)`, with the scales of a quantised cache between v and the tables."""
    *scales, block_tables, lengths = rest
    named: dict[str, Any] = dict(zip(("k_scale", "v_scale"), scales, strict=False))
    if tree:  # each token has two children
        mask = tree_mask((jnp.arange(q.shape[1]) - 1) // 2)
        named["tree_mask"] = jnp.broadcast_to(mask, (q.shape[0], *mask.shape))
    return attention(q, k, v, block_tables, lengths, **named, **options)


def chain(point: Point, attend: Any, q: jax.Array, caches: tuple, block_tables: jax.Array, lengths: jax.Array) -> Any:
    """As many calls as `point` says, each on the output of the one before. Returns the last output and the first."""
    first = None
    for i in range(point.num_calls):
        q = attend(q, *caches[i % len(caches)], block_tables, lengths)
        first = q if first is None else first
    return q, first


def checked_rows(point: Point) -> list[int]:
    """The shortest sequence, the longest, and the ends of the batch."""
    order = np.argsort(point.lengths, kind="stable")
    rows = dict.fromkeys((0, len(order) - 1, int(order[0]), int(order[-1])))
    return list(rows)[:MAX_CHECKED]


@dataclasses.dataclass(frozen=True)
class Programs:
    ours: Any
    floor: Any
    reference: Any
    peers: dict[str, Any]


def prefix_groups(point: Point) -> Any:
    allocator = BlockAllocator.create(
        num_blocks=point.cache_shape[0],
        block_size=point.block_size,
        num_seqs=len(point.lengths),
        max_blocks_per_seq=point.max_blocks,
    )
    tables, lengths = jnp.asarray(point_tables(point)), jnp.asarray(point.lengths, jnp.int32)
    return dataclasses.replace(allocator, block_tables=tables, lengths=lengths).prefix_groups(point.q_len)


def compile_judges(point: Point) -> dict[Any, Any]:
    """Jobs for `compile_all`, by (point, what): the reference of a few sequences, and the floor."""
    shapes = input_shapes(point)
    pair, rows = shapes.caches[0][0], len(checked_rows(point))

    def few(array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype)

    reference = functools.partial(with_scales, paged_attention_reference, **make_options(point))
    floor = functools.partial(read_chain, slots=point.slots, num_calls=point.num_calls)
    return {
        (point, "reference"): lambda: (
            jax.jit(reference).lower(few(shapes.q), *pair, few(shapes.block_tables), few(shapes.lengths)).compile()
        ),
        (point, "floor"): lambda: (
            jax.jit(floor).lower(jax.ShapeDtypeStruct((128,), jnp.float32), shapes.caches[0]).compile()
        ),
    }


def compile_point(
    point: Point, implementation: str, num_partitions: Partitions, peer_names: list[str]
) -> dict[Any, Any]:
    """Jobs for `compile_all`, by (point, what)."""
    shapes = input_shapes(point)
    args = shapes.q, shapes.caches[0], shapes.block_tables, shapes.lengths
    ours = functools.partial(partitioned, num_partitions)
    attend = functools.partial(with_scales, ours, implementation=implementation, **make_options(point))
    if point.shared and not point.alone:
        attend = functools.partial(attend, prefix_groups=prefix_groups(point))
    jobs = compile_judges(point)
    jobs[point, "ours"] = lambda: jax.jit(functools.partial(chain, point, attend)).lower(*args).compile()
    for name in peer_names:
        if not point.cache and peers.PEERS[name].takes(point):
            jobs[point, name] = functools.partial(peers.compile_peer, name, point, chain)
    return jobs


def measure(point: Point, programs: Programs, inputs: Inputs) -> dict[str, Any]:
    def dispatch(i: int) -> Any:
        return programs.ours(inputs.q, inputs.caches[i % point.num_sets], inputs.block_tables, inputs.lengths)

    token = jnp.ones(128)
    rows = np.asarray(checked_rows(point))
    _, out = poisoned(dispatch, 0)
    expected = programs.reference(inputs.q[rows], *inputs.caches[0][0], inputs.block_tables[rows], inputs.lengths[rows])
    result: dict[str, Any] = {"bytes": point.num_bytes, "calls": point.num_calls}
    result["error"] = worst_error(point.name, out[rows], expected)
    result["floor"] = slope_microseconds(
        lambda i: programs.floor(token, inputs.caches[i % point.num_sets]), point.num_calls
    )
    result["us"] = slope_microseconds(dispatch, point.num_calls)
    result["over_floor"] = result["us"] / result["floor"]
    result["gigabytes_per_second"] = point.num_bytes / result["us"] / 1e3
    for name, compiled in programs.peers.items():
        result.setdefault("peers", {})[name] = peers.measure_peer(name, point, inputs, out, compiled)
    return result


def measure_kernels(point: Point, programs: Programs, inputs: Inputs) -> dict[str, Any]:
    """What runs within one call: kernels, and the time of each."""
    args = inputs.q, inputs.caches[0], inputs.block_tables, inputs.lengths
    jax.block_until_ready(programs.ours(*args))
    times = kernel_times(lambda: programs.ours(*args))
    total: Counter[str] = Counter()
    for name, microseconds in times:
        total[name[:60]] += microseconds / point.num_calls  # type: ignore[assignment]
    return {
        "kernels": sum(total.values()),
        "launches": len(times) / point.num_calls,
        "by_kernel": dict(total.most_common(6)),
    }


def of_peer(found: dict[str, Any]) -> str:
    if "failed" in found:
        return found["failed"][:80]
    return f"{found['us']:.1f}" + (f" ({found['best']})" if "best" in found else "")


def print_row(point: Point, result: dict[str, Any]) -> None:
    them = "  ".join(f"{name} {of_peer(found)}" for name, found in result.get("peers", {}).items())
    print(
        f"{point.name:<32} {result['us']:8.1f} {result['floor']:8.1f} {result['over_floor']:6.3f} "
        f"{result['gigabytes_per_second']:6.0f} {result['error']:8.1e}  {them}",
        flush=True,
    )


def summarise(results: dict[str, Any]) -> None:
    def mean(names: list[str]) -> str:
        return f"{geometric_mean([results[name]['over_floor'] for name in names]):.3f} ({len(names)} points)"

    for heads in HEADS:
        names = [name for name in GRID if name in results and name.startswith(heads + " ")]
        if names:
            print(f"geometric mean of time over floor, {heads}: {mean(names)}")
    names = [name for name in GRID if name in results and not name.startswith("8/1 ")]
    if names:
        print(f"geometric mean of time over floor, 32/8, 64/8 and 32/32: {mean(names)}")
    for name, result in results.items():
        wide = results.get(" ".join(word for word in name.split() if not word.startswith(("cache=", "scale="))))
        if wide is not None and wide is not result:
            print(f"{name}: {wide['us'] / result['us']:.2f} times as fast as bfloat16")
        alone = results.get(f"{name} alone=1")
        if alone is not None:
            print(f"{name}: {result['us'] / alone['us']:.2f} of the time of each by itself")
    beaten = []
    for name, result in results.items():
        times = {peer: found["us"] for peer, found in result.get("peers", {}).items() if "us" in found}
        if times:
            beaten.append((result["us"] / min(times.values()), name, min(times, key=lambda peer: times[peer])))
    if beaten:
        ratios = [ratio for ratio, _, _ in beaten]
        print(f"time over the best peer's: geometric mean {geometric_mean(ratios):.3f}, worst {max(beaten)}")


def choose_points(options: argparse.Namespace) -> list[str]:
    """The points that were asked for."""
    if options.points:
        return [
            name if "/" in name else f"{heads} {name}"
            for name in options.points
            for heads in ((options.heads or HEADS) if "/" not in name else ("",))
        ]
    sets = {"grid": GRID, "variants": VARIANTS, "quantised": QUANTISED, "shared": SHARED}
    sets["all"] = GRID + VARIANTS + QUANTISED
    chosen = sets[options.set]
    return [name for name in chosen if not options.heads or name.split()[0] in options.heads]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--set", choices=("grid", "variants", "quantised", "shared", "all"), default="grid", help="which points"
    )
    parser.add_argument("--points", nargs="+", help="names of points, instead of a set; the heads may be left out")
    parser.add_argument("--heads", nargs="+", help="only points with these, for example 32/8 64/8")
    parser.add_argument(
        "--num-partitions",
        type=lambda text: text if text == "plan" else int(text),
        metavar="N",
        help="or plan; what the library takes by default",
    )
    parser.add_argument("--implementation", choices=("mosaic_gpu", "xla"), default="mosaic_gpu")
    parser.add_argument(
        "--peers", nargs="*", default=[], choices=tuple(peers.PEERS), help="what is not installed is left out"
    )
    parser.add_argument("--no-kernels", action="store_true", help="leave the times by kernel out")
    parser.add_argument("--again", action="store_true", help="measure also what the output file has")
    parser.add_argument("--at-once", type=int, default=12, help="points that are compiled together")
    parser.add_argument("--seconds", type=float, default=9e9, help="start no more points after this")
    add_output(parser)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    start = time.monotonic()
    peer_names = [name for name in options.peers if peers.installed(name)]
    names = choose_points(options)
    store = open_store("decode" if options.set in ("grid", "all") else options.set, options)
    todo = [parse(name) for name in names if options.again or name not in store.points]
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, bfloat16, peers: {', '.join(peer_names) or 'none'}")
    print(f"{'':32} {'us':>8} {'floor':>8} {'ratio':>6} {'GB/s':>6} {'error':>8}", flush=True)
    for batch in itertools.batched(todo, options.at_once):
        if time.monotonic() - start > options.seconds:
            print("out of time; the rest is for another run with the same output file")
            break
        jobs: dict[Any, Any] = {}
        for point in batch:
            jobs |= compile_point(point, options.implementation, options.num_partitions, peer_names)
        compiled = compile_all(jobs)
        programs = {
            point: Programs(
                ours=compiled[point, "ours"],
                floor=compiled[point, "floor"],
                reference=compiled[point, "reference"],
                peers={name: compiled[point, name] for name in peer_names if (point, name) in compiled},
            )
            for point in batch
        }
        for point in batch:
            store.add(point.name, measure(point, programs[point], make_inputs(point)))
            print_row(point, store.points[point.name])
        if not options.no_kernels and jax.default_backend() == "gpu":
            # Last: CUPTI may change what the process does afterwards.
            for point in batch:
                found = measure_kernels(point, programs[point], make_inputs(point))
                store.add(point.name, store.points[point.name] | found)
                print(f"{point.name:<32} kernels {found['kernels']:.1f} us, {found['launches']:.1f} a call", flush=True)
        print(f"{time.monotonic() - start:.0f} s", flush=True)
    summarise({name: store.points[name] for name in names if name in store.points})


if __name__ == "__main__":
    main()
