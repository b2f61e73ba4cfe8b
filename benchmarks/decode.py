"""Paged decode attention against the floor of its bytes: `python -m benchmarks.decode --output decode.json`.

Every point is checked against the reference first. Times are device time a call, of calls chained in one jit; tables
are shuffled and rotated through pools far larger than the L2 cache. The floor is a kernel that only reads the K and V
bytes of the point, in the same run.
"""

import argparse
import dataclasses
import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import COLD_BYTES, chain_microseconds, floor_microseconds, random
from jaxpaged import paged_attention, paged_attention_reference

# batch, length; "ragged": lengths drawn uniformly from 1..length.
POINTS = (
    *("1x512", "1x8192", "1x32768", "1x131072", "8x2048", "8x8192", "32x2048", "64x2048"),
    *("128x1024", "256x1024", "64xragged8192", "64x8192"),
)
HEADS = ("32/8", "64/8", "32/32")


@dataclasses.dataclass(frozen=True)
class Point:
    heads: int
    kv_heads: int
    lengths: tuple[int, ...]
    head_dim: int = 128
    block_size: int = 16
    q_len: int = 1
    dtype: str = "bfloat16"

    @property
    def slots(self) -> int:
        """What a call reads, in slots: whole blocks only where a token stands."""
        return sum(self.lengths)

    @property
    def num_bytes(self) -> int:
        return 2 * self.slots * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize


def parse(heads: str, point: str, seed: int = 0, **shape: Any) -> Point:
    batch, length = point.split("x")
    if length.startswith("ragged"):
        drawn = np.random.default_rng(seed).integers(1, int(length[6:]) + 1, int(batch))
        lengths = tuple(int(n) for n in drawn)
    else:
        lengths = (int(length),) * int(batch)
    num_heads, kv_heads = map(int, heads.split("/"))
    return Point(num_heads, kv_heads, lengths, **shape)


@dataclasses.dataclass(frozen=True)
class Inputs:
    q: jax.Array
    k_cache: jax.Array
    v_cache: jax.Array
    tables: tuple[jax.Array, ...]  # one a chained call
    lengths: jax.Array


@functools.lru_cache(maxsize=1)  # pools of the same shape are used again, one pair at a time
def pools(num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    shape = num_blocks, block_size, kv_heads, head_dim
    return random(1, shape, dtype), random(2, shape, dtype)


def make_inputs(point: Point, num_calls: int, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    held = [-(-n // point.block_size) for n in point.lengths]
    block_bytes = 2 * point.block_size * point.kv_heads * point.head_dim * jnp.dtype(point.dtype).itemsize
    num_blocks = max(sum(held), COLD_BYTES // block_bytes) + 1
    num_blocks = 2 ** math.ceil(math.log2(num_blocks))
    k_cache, v_cache = pools(num_blocks, point.block_size, point.kv_heads, point.head_dim, point.dtype)
    free, tables = np.zeros(0, np.int32), []
    for _ in range(num_calls):
        if len(free) < sum(held):
            free = (rng.permutation(num_blocks - 1) + 1).astype(np.int32)
        table = np.zeros((len(held), max(held)), np.int32)
        for row, count in zip(table, held, strict=True):
            row[:count], free = free[:count], free[count:]
        tables.append(jnp.asarray(table))
    q_shape = (len(held), point.q_len, point.heads, point.head_dim)
    return Inputs(
        random(3, q_shape, point.dtype), k_cache, v_cache, tuple(tables), jnp.asarray(point.lengths, jnp.int32)
    )


def attend(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, table: jax.Array, lengths: jax.Array, **options: Any):  # type: ignore[no-untyped-def]
    return paged_attention(q, k_cache, v_cache, table, lengths, return_lse=True, implementation="mosaic_gpu", **options)


def check(point: Point, inputs: Inputs, **options: Any) -> float:
    """The worst error of a row over the largest number of that row, of up to four sequences; raises where it is bad."""
    out, lse = jax.jit(functools.partial(attend, **options))(
        inputs.q, inputs.k_cache, inputs.v_cache, inputs.tables[0], inputs.lengths
    )
    options.pop("num_partitions", None)
    order = np.argsort(point.lengths, kind="stable")
    worst = 0.0
    for i in sorted({int(order[0]), int(order[-1]), 0, len(order) - 1}):
        expected, expected_lse = jax.jit(functools.partial(paged_attention_reference, **options))(
            inputs.q[i : i + 1], inputs.k_cache, inputs.v_cache, inputs.tables[0][i : i + 1], inputs.lengths[i : i + 1]
        )
        error = jnp.abs(out[i].astype(jnp.float32) - expected[0]).max(axis=-1) / jnp.abs(expected[0]).max(axis=-1)
        worst = max(worst, float(error.max()))
        lse_error = float(jnp.abs(lse[i] - expected_lse[0]).max())
        # bfloat16: one rounding of p and one of the output, 2^-9 each of the largest number or less.
        if not worst < 2e-2 or not lse_error < 1e-2:
            raise AssertionError(f"wrong result at {point}: sequence {i}, error {worst}, lse error {lse_error}")
    return worst


def measure(point: Point, *, floor: bool = True, **options: Any) -> dict[str, Any]:
    # A chain long enough that what one dispatch costs is lost in it, and that its tables pass through the whole pool.
    num_calls = int(min(64, max(8, 4e9 // point.num_bytes)))
    inputs = make_inputs(point, num_calls)
    error = check(point, inputs, **options)

    def chain(q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, tables: tuple, lengths: jax.Array) -> jax.Array:
        for table in tables:
            q, _ = attend(q, k_cache, v_cache, table, lengths, **options)
        return q

    args = inputs.q, inputs.k_cache, inputs.v_cache, inputs.tables, inputs.lengths
    result: dict[str, Any] = {"microseconds": chain_microseconds(chain, args, num_calls), "error": error}
    if floor:
        result["floor"] = floor_microseconds(inputs.k_cache, inputs.v_cache, point.slots, num_calls)
        result["over_floor"] = result["microseconds"] / result["floor"]
    result["gigabytes_per_second"] = point.num_bytes / result["microseconds"] / 1e3
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=list(HEADS), help="query heads / KV heads")
    parser.add_argument("--points", nargs="+", default=list(POINTS), help="batch x length")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--q-len", type=int, default=1)
    parser.add_argument("--num-partitions", type=int, default=None)
    parser.add_argument("--output", help="a JSON file for the results")
    options = parser.parse_args()

    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, bfloat16, {options}", flush=True)
    print(f"{'heads':>6} {'point':>14} {'us':>8} {'floor':>8} {'ratio':>6} {'GB/s':>6}", flush=True)
    results = []
    for heads in options.heads:
        for name in options.points:
            point = parse(heads, name, head_dim=options.head_dim, block_size=options.block_size, q_len=options.q_len)
            result = measure(point, num_partitions=options.num_partitions)
            results.append({"heads": heads, "point": name, **result})
            print(
                f"{heads:>6} {name:>14} {result['microseconds']:8.1f} {result['floor']:8.1f} "
                f"{result['over_floor']:6.3f} {result['gigabytes_per_second']:6.0f}",
                flush=True,
            )
    mean = math.exp(sum(math.log(result["over_floor"]) for result in results) / len(results))
    print(f"geometric mean of time over floor, {len(results)} points: {mean:.3f}")
    if options.output:
        with open(options.output, "w") as file:
            json.dump({"device": device.device_kind, "jax": jax.__version__, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
