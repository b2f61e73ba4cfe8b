"""Paged decode attention against the floor of its bytes, and against other libraries.

Every point is checked against the reference before it is timed. Times are microseconds per call on the device:

  us       calls chained in one jit, like the layers of a model, including everything between the kernels
  kernels  the kernels alone, by CUPTI, the sum over one call
  floor    a kernel that only reads the K and V bytes of the point, in the same kind of chain and the same run; for
           latents, their bytes at the rate of such a kernel

Calls rotate through several caches, so that L2 is cold. Points that the output file already has are skipped, so a run
can be cut into pieces. `--points` names points as they are printed, see benchmarks/kernels/points.py.

    python -m benchmarks.kernels.decode               # the grid
    python -m benchmarks.kernels.decode --peers fa3   # against FlashAttention 3
    python -m benchmarks.kernels.decode --set variants
    python -m benchmarks.kernels.decode --set quantised --no-kernels   # 8-bit caches against bfloat16
    python -m benchmarks.kernels.decode --set shared   # shared blocks, read once or by each sequence
    python -m benchmarks.kernels.decode --set latents --peers mla   # against FlashInfer's kernel for latents
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checks import poisoned, worst_error
from benchmarks.harness import (
    add_output,
    compile_all,
    kernel_times,
    open_store,
    read_bandwidth,
    read_chain,
    slope_microseconds,
)
from benchmarks.kernels import peers
from benchmarks.kernels.points import LATENT_SCALE, SETS, Inputs, Point, input_shapes, make_inputs, parse, point_tables
from jaxpaged import BlockAllocator, paged_attention, paged_attention_reference, tree_mask

MAX_CHECKED = 4  # sequences per point that are compared with the reference
AT_ONCE = 12  # points that are compiled together


def make_options(point: Point) -> dict[str, Any]:
    options: dict[str, Any] = {"sliding_window": point.window} if point.window else {}
    options |= {"scale": LATENT_SCALE, "value_dim": point.latent} if point.latent else {}
    return options | ({"tree": True} if point.tree else {})


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
    """`point.num_calls` calls, each on the output of the previous one. Returns the last output and the first."""
    first = None
    for i in range(point.num_calls):
        out = attend(q, *caches[i % len(caches)], block_tables, lengths)
        q = jnp.concatenate([out, q[..., point.latent :]], axis=-1) if point.latent else out
        first = out if first is None else first
    return q, first


def compile_chain(point: Point, attend: Any) -> Any:
    """`attend(q, k_cache, v_cache, block_tables, lengths, **options)`, with the options of `paged_attention`."""
    shapes = input_shapes(point)
    call = functools.partial(with_scales, attend, **make_options(point))
    args = shapes.q, shapes.caches[0], shapes.block_tables, shapes.lengths
    return jax.jit(functools.partial(chain, point, call)).lower(*args).compile()


def checked_rows(point: Point) -> list[int]:
    """The shortest sequence, the longest, and the ends of the batch."""
    order = np.argsort(point.lengths, kind="stable")
    rows = dict.fromkeys((0, len(order) - 1, int(order[0]), int(order[-1])))
    return list(rows)[:MAX_CHECKED]


@dataclasses.dataclass(frozen=True)
class Programs:
    ours: Any
    floor: Any  # None: computed from the bytes
    reference: Any
    peers: dict[str, Any] = dataclasses.field(default_factory=dict)


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
    floor = jax.jit(functools.partial(read_chain, slots=point.slots, num_calls=point.num_calls))
    token = jax.ShapeDtypeStruct((128,), jnp.float32)
    return {
        (point, "reference"): lambda: (
            jax.jit(reference).lower(few(shapes.q), *pair, few(shapes.block_tables), few(shapes.lengths)).compile()
        ),
        (point, "floor"): lambda: None if point.latent else floor.lower(token, shapes.caches[0]).compile(),
    }


def compile_point(point: Point, peer_names: list[str], **options: Any) -> dict[Any, Any]:
    """Jobs for `compile_all`, by (point, what)."""
    if point.shared and not point.alone:
        options["prefix_groups"] = prefix_groups(point)
    jobs = compile_judges(point)
    jobs[point, "ours"] = lambda: compile_chain(point, functools.partial(paged_attention, **options))
    for name in peer_names:
        if peers.PEERS[name].takes(point):
            jobs[point, name] = functools.partial(peers.compile_peer, name, point, chain)
    return jobs


def measure(point: Point, programs: Programs, inputs: Inputs) -> dict[str, Any]:
    def dispatch(i: int) -> Any:
        return programs.ours(inputs.q, inputs.caches[i % point.num_sets], inputs.block_tables, inputs.lengths)

    def read(i: int) -> Any:
        return programs.floor(token, inputs.caches[i % point.num_sets])

    token = jnp.ones(128)
    rows = np.asarray(checked_rows(point))
    _, out = poisoned(dispatch, 0)
    expected = programs.reference(inputs.q[rows], *inputs.caches[0][0], inputs.block_tables[rows], inputs.lengths[rows])
    result: dict[str, Any] = {"bytes": point.num_bytes, "calls": point.num_calls}
    result["error"] = worst_error(point.name, out[rows], expected)
    by_bytes = programs.floor is None
    floor = point.num_bytes / read_bandwidth() * 1e6 if by_bytes else slope_microseconds(read, point.num_calls)
    result["floor"] = floor
    result["us"] = slope_microseconds(dispatch, point.num_calls)
    result["over_floor"] = result["us"] / result["floor"]
    result["gigabytes_per_second"] = point.num_bytes / result["us"] / 1e3
    for name, compiled in programs.peers.items():
        result.setdefault("peers", {})[name] = peers.measure_peer(name, point, inputs, out, compiled)
    return result


def measure_kernels(point: Point, program: Any, inputs: Inputs) -> dict[str, Any]:
    """Kernels that run in one call, and the time of each."""
    args = inputs.q, inputs.caches[0], inputs.block_tables, inputs.lengths
    jax.block_until_ready(program(*args))
    times = kernel_times(lambda: program(*args))
    total: Counter[str] = Counter()
    for name, microseconds in times:
        total[name[:60]] += microseconds / point.num_calls  # type: ignore[assignment]
    return {
        "kernels": sum(total.values()),
        "launches": len(times) / point.num_calls,
        "by_kernel": dict(total.most_common(6)),
    }


def format_peer(found: dict[str, Any]) -> str:
    if "failed" in found:
        return found["failed"][:80]
    return f"{found['us']:.1f}" + (f" ({found['best']})" if "best" in found else "")


def print_row(point: Point, result: dict[str, Any]) -> None:
    peers_text = "  ".join(f"{name} {format_peer(found)}" for name, found in result.get("peers", {}).items())
    print(
        f"{point.name:<32} {result['us']:8.1f} {result['floor']:8.1f} {result['over_floor']:6.3f} "
        f"{result['gigabytes_per_second']:6.0f} {result['error']:8.1e}  {peers_text}",
        flush=True,
    )


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=tuple(SETS), default="grid", help="which points")
    parser.add_argument("--points", nargs="+", help="names of points, instead of a set")
    parser.add_argument("--num-partitions", type=int, help="instead of the library's default")
    parser.add_argument("--implementation", choices=("mosaic_gpu", "xla"), default="mosaic_gpu")
    parser.add_argument("--peers", nargs="*", default=[], choices=tuple(peers.PEERS), help="if they are installed")
    parser.add_argument("--no-kernels", action="store_true", help="leave the times by kernel out")
    add_output(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    peer_names = [name for name in options.peers if peers.installed(name)]
    names = options.points or SETS[options.set]
    store = open_store("decode" if options.set == "grid" else options.set, options)
    todo = [parse(name) for name in names if name not in store.points]
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, bfloat16, peers: {', '.join(peer_names) or 'none'}")
    print(f"{'':32} {'us':>8} {'floor':>8} {'ratio':>6} {'GB/s':>6} {'error':>8}", flush=True)
    chosen = dict(implementation=options.implementation, num_partitions=options.num_partitions)
    for batch in itertools.batched(todo, AT_ONCE):
        jobs: dict[Any, Any] = {}
        for point in batch:
            jobs |= compile_point(point, peer_names, **chosen)
        compiled = compile_all(jobs)
        for point in batch:
            point_peers = {name: compiled[point, name] for name in peer_names if (point, name) in compiled}
            ours, floor, reference = (compiled[point, what] for what in ("ours", "floor", "reference"))
            programs = Programs(ours, floor, reference, point_peers)
            store.add(point.name, measure(point, programs, make_inputs(point)))
            print_row(point, store.points[point.name])
        if not options.no_kernels and jax.default_backend() == "gpu":
            # Last: CUPTI may change what the process does afterwards.
            for point in batch:
                found = measure_kernels(point, compiled[point, "ours"], make_inputs(point))
                store.add(point.name, store.points[point.name] | found)
                print(f"{point.name:<32} kernels {found['kernels']:.1f} us, {found['launches']:.1f} a call", flush=True)
    ratios = [store.points[name]["over_floor"] for name in names]
    print(f"geometric mean of time over floor: {statistics.geometric_mean(ratios):.3f} ({len(ratios)} points)")


if __name__ == "__main__":
    main()
