"""The cache's operations against what the machine can copy: `python -m benchmarks.kernels.cache_ops`.

Every operation is checked before it is timed. `bytes` are the bytes that it must move: each is read once and written
once. `% copy` divides their rate by that of a plain copy of 512 MB in the same run. Times are device time a call, of
calls in one jit whose cache is donated.

`--operations copy gather` measures only these, `--copy-configs` adds other configurations of the copy kernel, `--toy`
takes toy sizes, to see on any machine that it runs.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checks import poisoned
from benchmarks.harness import add_output, open_store, random
from benchmarks.kernels.cache_copies import measure_copies
from benchmarks.kernels.cache_sizes import (
    BLOCK_SIZE,
    COPY_FORMS,
    HEAD_DIM,
    KV_HEADS,
    TOY,
    Sizes,
    block_bytes,
    carried_microseconds,
    copy_rate,
    create_stack,
    show,
)
from benchmarks.kernels.cache_writes import measure_writes
from jaxpaged import KVCache, gather_kv

OPERATIONS = ("write", "copy", "gather")


def measure_gather(sizes: Sizes) -> list[dict[str, Any]]:
    seqs, length = sizes.gathered
    max_blocks = length // BLOCK_SIZE
    shape = 1 + seqs * max_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM
    cache = KVCache(k=random(1, shape=shape, dtype="bfloat16"), v=random(2, shape=shape, dtype="bfloat16"))
    ids = 1 + np.random.default_rng(3).permutation(seqs * max_blocks)
    tables = jnp.asarray(ids.reshape(seqs, max_blocks), jnp.int32)
    lengths = jnp.full(seqs, length, jnp.int32)
    gather = jax.jit(gather_kv)
    found = poisoned(gather, cache, tables, lengths)
    assert bool((found.k.reshape(seqs, max_blocks, *shape[1:]) == cache.k[tables]).all()), (
        "gather_kv got others' tokens"
    )
    assert bool((found.v.reshape(seqs, max_blocks, *shape[1:]) == cache.v[tables]).all()), (
        "gather_kv got others' values"
    )

    def chain(lengths: jax.Array, cache: KVCache, tables: jax.Array) -> jax.Array:
        # The next call waits for this one: its lengths are made from one of this one's numbers, of both arrays, or XLA
        # would gather only one.
        found = jax.lax.optimization_barrier(gather_kv(cache, tables, lengths))
        return lengths + jnp.isnan(found.k[0, 0, 0, 0] + found.v[0, 0, 0, 0]).astype(jnp.int32)

    microseconds = carried_microseconds(chain, lengths, (cache, tables), 1, sizes.seconds)
    row = {"operation": "gather_kv", "size": f"{seqs} x {length} tokens", "microseconds": microseconds}
    row |= {"bytes": 2 * seqs * max_blocks * block_bytes(cache)}
    show(row)
    return [row]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="toy sizes")
    parser.add_argument(
        "--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS, help="what to measure; all by default"
    )
    parser.add_argument(
        "--copy-configs",
        nargs="+",
        default=[],
        metavar="KIB/STAGES/PROGRAMS",
        help="configurations of the kernel of copy_blocks to measure too: KiB of a tile, tiles in SMEM, programs a SM",
    )
    add_output(parser)
    args = parser.parse_args(arguments)
    sizes, begin = TOY if args.toy else Sizes(), time.perf_counter()
    device, store = jax.devices()[0], open_store("cache_ops", args)
    copy = {form: copy_rate(form, sizes) for form in COPY_FORMS}
    rate = max(copy.values())
    rows = measure_writes(sizes) if "write" in args.operations else []
    if "copy" in args.operations:
        rows += measure_copies(sizes, create_stack(sizes), args.copy_configs)
    if "gather" in args.operations:
        rows += measure_gather(sizes)
    print(
        f"\n{device.device_kind}, jax {jax.__version__}, {KV_HEADS} KV heads, head_dim {HEAD_DIM}, block {BLOCK_SIZE}"
    )
    print("copy, read and written: " + ", ".join(f"{form} {value / 1e3:.0f} GB/s" for form, value in copy.items()))
    print(f"{'operation':>38} {'size':>16} {'us':>9} {'MB':>8} {'GB/s':>7} {'% copy':>7}")
    for row in rows:
        row["of_copy"] = row["bytes"] / row["microseconds"] / rate
        print(
            f"{row['operation']:>38} {row['size']:>16} {row['microseconds']:9.1f} {row['bytes'] / 1e6:8.1f} "
            f"{row['bytes'] / row['microseconds'] / 1e3:7.1f} {100 * row['of_copy']:6.1f}%"
        )
    print(f"{time.perf_counter() - begin:.0f} s in all")
    store.add("plain copy", {"bytes_per_microsecond": copy})
    for row in rows:
        store.add(f"{row['operation']} | {row['size']}", row)


if __name__ == "__main__":
    main()
