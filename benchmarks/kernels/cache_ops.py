"""The cache's operations against what the machine can copy: `python -m benchmarks.kernels.cache_ops`.

Every operation is checked before it is timed. `bytes` are those that it must move, each read once and written once
(over the host link: once); `% copy` is their rate beside that of a plain copy of 512 MB, `% link` beside that of a
plain copy of as many bytes over the host link, both measured in the same run. Times are device time a call, of calls in
one jit whose cache is donated; those over the host link are wall time a call.

`--operations copy gather` measures these alone, `--copy-configs` other configurations of the copy kernel as well.
`--toy` takes toy sizes, to see on any machine that it runs.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checks import poisoned
from benchmarks.harness import add_output, open_store, random, slope_microseconds
from jaxpaged import (
    KVCache,
    blocks_from_host,
    blocks_to_host,
    copy_blocks,
    gather_kv,
    rotary_frequencies,
    rotate_and_write_kv,
    widen_kv,
    write_kv,
)
from jaxpaged._cache.copy_blocks import copy_by_kernel, copy_by_xla
from pallas_kernels import copy_config

KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16
COPY_FORMS = ("kernel", "memcpy")
OPERATIONS = ("write", "copy", "swap", "gather")


@dataclasses.dataclass(frozen=True)
class Sizes:
    write_blocks: int = 8192  # 537 MB: more than 10 times the L2 cache of an H100
    prefill_tokens: int = 8192
    decode_tokens: int = 256
    layers: int = 32
    stack_blocks: int = 1040
    copied_blocks: int = 512
    swapped_blocks: int = 256
    gathered: tuple[int, int] = (64, 1024)  # sequences, tokens of each
    copied_bytes: int = 512_000_000
    seconds: float = 0.05  # of timing a measurement


TOY = Sizes(
    write_blocks=64,
    prefill_tokens=128,
    decode_tokens=8,
    layers=2,
    stack_blocks=20,
    copied_blocks=8,
    swapped_blocks=4,
    gathered=(2, 64),
    copied_bytes=1_000_000,
    seconds=0.002,
)


def carried_microseconds(chain: Callable[..., Any], state: Any, args: tuple, num_calls: int, seconds: float) -> float:
    """Device time of one of the `num_calls` calls that `chain` makes; its result is donated to the next repetition."""
    compiled = jax.jit(chain, donate_argnums=0).lower(state, *args).compile()
    state = compiled(jax.tree.map(jnp.copy, state), *args)

    def dispatch(_: int) -> Any:
        nonlocal state
        state = compiled(state, *args)
        return state

    return slope_microseconds(dispatch, num_calls, seconds)


def wall_microseconds(call: Callable[[], Any], repetitions: int = 7) -> float:
    """The median of the time until a call's result is there; the one before it is gone by then."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        result = jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
        del result
    return statistics.median(times) * 1e6


def copy_rate(form: str, sizes: Sizes) -> float:
    """Bytes read and written a microsecond by a plain copy: XLA's elementwise kernel, or its memcpy."""
    x = jnp.zeros(sizes.copied_bytes // 4, jnp.int32)
    if form == "kernel":

        def chain(x: jax.Array) -> jax.Array:
            for _ in range(4):
                x = jax.lax.optimization_barrier(x + 1)
            return x

        return 2 * x.nbytes / carried_microseconds(chain, x, (), 4, sizes.seconds)

    def twice(pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return jax.lax.optimization_barrier(jnp.copy(pair[1])), pair[1]

    return 2 * x.nbytes / carried_microseconds(twice, (x, x + 1), (), 1, sizes.seconds)


# Variants of the scatter in write_kv: how the pool is indexed, and what XLA is promised.


def scatter(pool: jax.Array, tokens: jax.Array, slots: jax.Array, *, form: str, **promises: Any) -> jax.Array:
    num_slots = pool.shape[0] * pool.shape[1]
    if form == "block, offset":
        at = pool.at[slots // pool.shape[1], slots % pool.shape[1]]
        return at.set(tokens, mode="drop", **promises)
    token_shape = {"window": pool.shape[2:], "row": (pool.shape[2] * pool.shape[3],)}[form]
    flat = pool.reshape(num_slots, *token_shape).at[slots]
    return flat.set(tokens.reshape(-1, *token_shape), mode="drop", **promises).reshape(pool.shape)


def variant(form: str, **promises: Any) -> Callable[..., KVCache]:
    def write(cache: KVCache, k: jax.Array, v: jax.Array, slots: jax.Array) -> KVCache:
        return KVCache(
            k=scatter(cache.k, k, slots, form=form, **promises), v=scatter(cache.v, v, slots, form=form, **promises)
        )

    return write


def write_rotated(cache: KVCache, k: jax.Array, v: jax.Array, slots: jax.Array) -> KVCache:
    new, _ = rotate_and_write_kv(cache, k, k, v, slots, slots, rotary_frequencies(HEAD_DIM))  # nobody asks for q
    return new


HEAD_SCALES = {"dtype": "float8_e4m3fn", "scale": "head", "k_scale": 0.02, "v_scale": 0.02}
WRITES: dict[str, tuple[Callable[..., KVCache], dict[str, Any]]] = {
    "write_kv": (write_kv, {"dtype": "bfloat16"}),
    "scatter window, nothing promised": (variant("window"), {"dtype": "bfloat16"}),
    "scatter window, unique, sorted": (
        variant("window", unique_indices=True, indices_are_sorted=True),
        {"dtype": "bfloat16"},
    ),
    "scatter row, unique": (variant("row", unique_indices=True), {"dtype": "bfloat16"}),
    "scatter block, offset, unique": (variant("block, offset", unique_indices=True), {"dtype": "bfloat16"}),
    "write_kv float8_e4m3fn, token_head": (write_kv, {"dtype": "float8_e4m3fn", "scale": "token_head"}),
    "write_kv float8_e4m3fn, head": (write_kv, HEAD_SCALES),
    "write_kv int8, token_head": (write_kv, {"dtype": "int8", "scale": "token_head"}),
    "rotary, write_kv float8_e4m3fn, head": (write_rotated, HEAD_SCALES),
}


def new_slots(num_tokens: int, num_blocks: int, num_calls: int, *, ascending: bool) -> list[jax.Array]:
    """Slots for each call: for many tokens whole blocks in shuffled order, for few one slot each in other blocks."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(num_calls):
        if num_tokens % BLOCK_SIZE == 0 and num_tokens // BLOCK_SIZE < num_blocks and num_tokens > num_blocks // 8:
            ids = 1 + rng.permutation(num_blocks - 1)[: num_tokens // BLOCK_SIZE]
            slots = (ids[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()
        else:
            slots = (1 + rng.permutation(num_blocks - 1)[:num_tokens]) * BLOCK_SIZE + rng.integers(BLOCK_SIZE)
        found.append(jnp.asarray(np.sort(slots) if ascending else slots, jnp.int32))
    return found


def write_bytes(num_tokens: int, cache: KVCache) -> int:
    """New tokens are read in bfloat16 and written in the cache's dtype; slots are read, a token's scales written."""
    numbers = 2 * num_tokens * KV_HEADS * HEAD_DIM
    scales = 2 * num_tokens * KV_HEADS * 4 if cache.k_scale is not None and cache.k_scale.ndim == 3 else 0
    return numbers * (2 + cache.k.dtype.itemsize) + scales + 4 * num_tokens


def check_write(write: Callable[..., KVCache], cache: KVCache, k: jax.Array, v: jax.Array, slots: jax.Array) -> None:
    """Every token is in its slot, and the sum over the pool says that nothing else was written."""
    written = widen_kv(poisoned(jax.jit(write), cache, k, v, slots))
    for pool, tokens in ((written.k, k), (written.v, v)):
        wide = tokens.astype(jnp.float32)
        if write is write_rotated and pool is written.k:
            frequencies = rotary_frequencies(HEAD_DIM)
            _, turned = rotate_and_write_kv(cache, tokens, tokens, tokens, slots, slots, frequencies)
            wide = turned.astype(jnp.float32)
        stored = pool.reshape(-1, KV_HEADS, HEAD_DIM)[slots]
        # Half a step of the dtype, and never more than the largest number's: 2^-4 of it, float8_e4m3fn.
        bound = 0.0 if cache.k_scale is None else 2**-4
        error = jnp.abs(stored - wide) - bound * jnp.abs(wide).max(axis=-1, keepdims=True)
        if not bool((error <= 0).all()):
            raise AssertionError(f"write_kv stored something else: {float(error.max())} over the bound")
        elsewhere = jnp.abs(pool).sum(axis=-1).astype(bool).sum()
        if int(elsewhere) > stored.shape[0] * KV_HEADS:
            raise AssertionError(f"{int(elsewhere)} rows written for {stored.shape[0]} tokens")


def measure_writes(sizes: Sizes) -> list[dict[str, Any]]:
    rows = []
    for num_tokens, num_calls in ((sizes.prefill_tokens, 8), (sizes.decode_tokens, 32)):
        # As many new tokens as do not stay in the L2 cache for prefill; those of a decode step were just computed.
        distinct = 4 if num_tokens == sizes.prefill_tokens else 1
        tokens = tuple(
            (random(2 * i, shape=shape, dtype="bfloat16"), random(2 * i + 1, shape=shape, dtype="bfloat16"))
            for i, shape in enumerate([(num_tokens, KV_HEADS, HEAD_DIM)] * distinct)
        )
        for name, (write, created) in WRITES.items():
            cache = KVCache.create(
                num_blocks=sizes.write_blocks,
                block_size=BLOCK_SIZE,
                num_kv_heads=KV_HEADS,
                head_dim=HEAD_DIM,
                **created,
            )
            slots = new_slots(num_tokens, sizes.write_blocks, num_calls, ascending="sorted" in name)
            check_write(write, cache, *tokens[0], slots[0])

            def chain(cache: KVCache, tokens: tuple, slots: list, write: Any = write) -> KVCache:
                for i, one in enumerate(slots):
                    cache = write(cache, *tokens[i % len(tokens)], one)
                return cache

            microseconds = carried_microseconds(chain, cache, (tokens, slots), num_calls, sizes.seconds)
            rows.append({"operation": name, "size": f"{num_tokens} tokens", "microseconds": microseconds})
            rows[-1] |= {"bytes": write_bytes(num_tokens, cache)}
            show(rows[-1])
    return rows


def stack_of(sizes: Sizes) -> KVCache:
    shape = sizes.layers, sizes.stack_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM
    return KVCache(k=random(1, shape=shape, dtype="bfloat16"), v=random(2, shape=shape, dtype="bfloat16"))


def block_bytes(cache: KVCache) -> int:
    """Of one block, its keys and values, in every layer."""
    return 2 * cache.k.nbytes // cache.k.shape[-4]


def with_config(text: str, sizes: Sizes) -> Callable[..., KVCache]:
    """`copy_blocks` with another configuration of its kernel, for a stack or one of its layers; by XLA on a CPU."""
    tile_kib, num_stages, programs_of_sm = map(int, text.split("/"))
    num_sms = int(jax.devices()[0].core_count) if jax.default_backend() == "gpu" else 1

    def copy(cache: KVCache, sources: jax.Array, destinations: jax.Array) -> KVCache:
        default = copy_config.default_config(
            block_numbers=BLOCK_SIZE * KV_HEADS * HEAD_DIM,
            itemsize=2,
            num_pools=2,
            num_layers=sizes.layers if cache.k.ndim == 5 else 1,
            num_pairs=sources.size,
            num_sms=num_sms,
        )
        tile_rows = tile_kib * 1024 // (2 * default.width)
        config = dataclasses.replace(
            default,
            tile_rows=tile_rows,
            slice_rows=min(default.slice_rows, tile_rows),
            num_stages=num_stages,
            stage_slices=1,
            num_programs=programs_of_sm * num_sms,
            num_slice_programs=min(default.num_slice_programs, programs_of_sm * num_sms),
        )
        return copy_by_kernel(config, None, cache, sources, destinations)

    return copy


def measure_copies(sizes: Sizes, stack: KVCache, configs: list[str]) -> list[dict[str, Any]]:
    ids = 1 + np.random.default_rng(1).permutation(sizes.stack_blocks - 1)[: 2 * sizes.copied_blocks]
    halves = tuple(jnp.asarray(half, jnp.int32) for half in np.split(ids, 2))
    cycle = tuple(jnp.asarray(order, jnp.int32) for order in (ids[::2], np.roll(ids[::2], 1)))
    few = tuple(jnp.where(jnp.arange(sizes.copied_blocks) % 64 == 0, half, 0) for half in halves)
    by_stack, by_cache = f"a stack of {sizes.layers}", f"{sizes.layers} caches"
    cases: list[tuple[str, Callable[..., KVCache], tuple[jax.Array, ...]]] = [
        (f"copy_blocks, {by_stack}", copy_blocks, halves),
        (f"copy_blocks, {by_stack}, in a cycle", copy_blocks, cycle),
        (f"copy_blocks, {by_stack}, much padding", copy_blocks, few),
        (f"by XLA, {by_stack}", copy_by_xla, halves),
        (f"copy_blocks, {by_cache}", copy_blocks, halves),
        (f"copy_blocks, {by_cache}, much padding", copy_blocks, few),
        (f"by XLA, {by_cache}", copy_by_xla, halves),
    ]
    for text in configs:
        cases += [(f"{text}, {form}", with_config(text, sizes), halves) for form in (by_stack, by_cache)]
    rows = []
    for name, copy, pairs in cases:
        check_copy(copy, stack, *pairs)

        def every_layer(
            caches: tuple[KVCache, ...], *pairs: jax.Array, copy: Callable[..., KVCache] = copy
        ) -> tuple[KVCache, ...]:
            return tuple(copy(cache, *pairs) for cache in caches)

        # The state is a stack, or its layers one by one.
        split = by_cache in name
        state = tuple(KVCache(k=stack.k[i], v=stack.v[i]) for i in range(sizes.layers)) if split else (stack,)
        microseconds = carried_microseconds(every_layer, state, pairs, 1, sizes.seconds)
        del state
        copied = int(jnp.count_nonzero(pairs[0]))
        rows.append({"operation": name, "size": f"{copied} blocks", "microseconds": microseconds})
        rows[-1] |= {"bytes": 2 * copied * block_bytes(stack)}
        show(rows[-1])
    return rows


def check_copy(copy: Callable[..., KVCache], stack: KVCache, sources: jax.Array, destinations: jax.Array) -> None:
    """Every block of the result is the one that it should be, those that are nobody's destination included."""
    comes_from = jnp.arange(stack.k.shape[1]).at[destinations].set(sources)
    copied = poisoned(jax.jit(copy), stack, sources, destinations)
    for new, old in ((copied.k, stack.k), (copied.v, stack.v)):
        same = jax.jit(lambda new, old: (new == old[:, comes_from]).all())(new, old)
        assert bool(same), "copy_blocks copied something else"


def measure_swaps(sizes: Sizes, stack: KVCache) -> list[dict[str, Any]]:
    ids = 1 + np.random.default_rng(2).permutation(sizes.stack_blocks - 1)[: 2 * sizes.swapped_blocks]
    sources, destinations = (jnp.asarray(half, jnp.int32) for half in np.split(ids, 2))
    out, back = jax.jit(blocks_to_host), jax.jit(blocks_from_host, donate_argnums=0)
    blocks = jax.block_until_ready(poisoned(out, stack, sources))
    cache = back(jax.tree.map(jnp.copy, stack), blocks, destinations)
    assert bool((cache.k[:, destinations] == stack.k[:, sources]).all()), "a swap lost bits of k"
    assert bool((cache.v[:, destinations] == stack.v[:, sources]).all()), "a swap lost bits of v"
    moved = sizes.swapped_blocks * block_bytes(stack)
    device, host = jax.memory.Space.Device, jax.memory.Space.Host
    plain = jnp.zeros(moved // 4, jnp.int32)
    plain_host = jax.block_until_ready(jax.device_put(plain, host))

    def bring() -> KVCache:
        nonlocal cache
        cache = back(cache, blocks, destinations)
        return cache

    times = {
        "host link out, a plain copy": wall_microseconds(lambda: jax.device_put(plain, host)),
        "swap_out": wall_microseconds(lambda: out(stack, sources)),
        "host link in, a plain copy": wall_microseconds(lambda: jax.device_put(plain_host, device)),
        "swap_in": wall_microseconds(bring),
    }
    size, rows = f"{sizes.swapped_blocks} blocks", []
    for name, microseconds in times.items():
        link = times["host link out, a plain copy" if "out" in name else "host link in, a plain copy"]
        rows.append({"operation": name, "size": size, "microseconds": microseconds, "bytes": moved})
        rows[-1] |= {"of_link": link / microseconds, "memory_kind": str(blocks.k.sharding.memory_kind)}
        show(rows[-1])
    return rows


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
        # would gather one alone.
        found = jax.lax.optimization_barrier(gather_kv(cache, tables, lengths))
        return lengths + jnp.isnan(found.k[0, 0, 0, 0] + found.v[0, 0, 0, 0]).astype(jnp.int32)

    microseconds = carried_microseconds(chain, lengths, (cache, tables), 1, sizes.seconds)
    row = {"operation": "gather_kv", "size": f"{seqs} x {length} tokens", "microseconds": microseconds}
    row |= {"bytes": 2 * seqs * max_blocks * block_bytes(cache)}
    show(row)
    return [row]


def show(row: dict[str, Any]) -> None:
    print(f"{row['operation']}, {row['size']}: {row['microseconds']:.1f} us", flush=True)


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
        rows += measure_copies(sizes, stack_of(sizes), args.copy_configs)
    if "swap" in args.operations:
        rows += measure_swaps(sizes, stack_of(sizes))
    if "gather" in args.operations:
        rows += measure_gather(sizes)
    print(
        f"\n{device.device_kind}, jax {jax.__version__}, {KV_HEADS} KV heads, head_dim {HEAD_DIM}, block {BLOCK_SIZE}"
    )
    print("copy, read and written: " + ", ".join(f"{form} {value / 1e3:.0f} GB/s" for form, value in copy.items()))
    print(f"{'operation':>38} {'size':>16} {'us':>9} {'MB':>8} {'GB/s':>7} {'% copy':>7} {'% link':>7}")
    for row in rows:
        row["of_copy"] = None if "of_link" in row else row["bytes"] / row["microseconds"] / rate
        percents = [f"{100 * row[key]:6.1f}%" if row.get(key) else "" for key in ("of_copy", "of_link")]
        print(
            f"{row['operation']:>38} {row['size']:>16} {row['microseconds']:9.1f} {row['bytes'] / 1e6:8.1f} "
            f"{row['bytes'] / row['microseconds'] / 1e3:7.1f} {percents[0]:>7} {percents[1]:>7}"
        )
    print(f"{time.perf_counter() - begin:.0f} s in all")
    store.add("plain copy", {"bytes_per_microsecond": copy})
    for row in rows:
        store.add(f"{row['operation']} | {row['size']}", row)


if __name__ == "__main__":
    main()
