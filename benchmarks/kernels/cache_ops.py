"""The cache's operations against the copy rate of the machine: `python -m benchmarks.kernels.cache_ops`.

Every operation is checked before it is timed. `bytes` are the bytes that it must move: each is read once and written
once. `% copy` divides their rate by the rate of a plain copy of 512 MB in the same run. Times are device time per call,
for calls in one jit that donates its cache.

`--operations copy gather` measures only these two. `--toy` uses toy sizes, to try the program out on any machine.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checks import poisoned, require
from benchmarks.harness import add_output, open_store, random, slope_microseconds
from jaxpaged import KVCache
from jaxpaged.ops import copy_blocks, gather_kv, widen_kv, write_kv

KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16
Write = Callable[..., KVCache]


@dataclasses.dataclass(frozen=True)
class Sizes:
    write_blocks: int = 8192  # 537 MB: more than 10 times the L2 cache of an H100
    prefill_tokens: int = 8192
    prefill_writes: int = 8  # chained in one jit
    decode_tokens: int = 256
    decode_writes: int = 32
    layers: int = 32
    stack_blocks: int = 1040
    copied_blocks: int = 512
    gathered: tuple[int, int] = (64, 1024)  # sequences, tokens of each
    copied_bytes: int = 512_000_000
    seconds: float = 0.05  # spent on timing each measurement


TOY = Sizes(
    write_blocks=64,
    prefill_tokens=128,
    prefill_writes=2,
    decode_tokens=8,
    decode_writes=2,
    layers=2,
    stack_blocks=20,
    copied_blocks=8,
    gathered=(2, 64),
    copied_bytes=1_000_000,
    seconds=0.002,
)


def donated_microseconds(chain: Callable[..., Any], state: Any, args: tuple, num_calls: int, seconds: float) -> float:
    """Device time of one of the `num_calls` calls in `chain`, whose result is donated to the next repetition."""
    compiled = jax.jit(chain, donate_argnums=0).lower(state, *args).compile()
    state = compiled(jax.tree.map(jnp.copy, state), *args)

    def dispatch(_: int) -> Any:
        nonlocal state
        state = compiled(state, *args)
        return state

    return slope_microseconds(dispatch, num_calls, seconds)


def copy_rate(sizes: Sizes) -> float:
    """Bytes read and written per microsecond by a plain elementwise kernel."""

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jax.lax.optimization_barrier(x + 1)
        return x

    x = jnp.zeros(sizes.copied_bytes // 4, jnp.int32)
    return 2 * x.nbytes / donated_microseconds(chain, x, (), 4, sizes.seconds)


def random_cache(*shape: int) -> KVCache:
    shape = *shape, BLOCK_SIZE, KV_HEADS, HEAD_DIM
    return KVCache(k=random(1, shape=shape, dtype="bfloat16"), v=random(2, shape=shape, dtype="bfloat16"))


def create_stack(sizes: Sizes) -> KVCache:
    return random_cache(sizes.layers, sizes.stack_blocks)


def block_bytes(cache: KVCache) -> int:
    """Keys and values of one block, in every layer."""
    return 2 * cache.k.nbytes // cache.k.shape[-4]


# Writes


HEAD_SCALES = {"dtype": "float8_e4m3fn", "scale_per": "head", "k_scale": 0.02, "v_scale": 0.02}
WRITES: dict[str, tuple[Write, dict[str, Any]]] = {
    "write_kv": (write_kv, {"dtype": "bfloat16"}),
    "write_kv float8_e4m3fn, token_head": (write_kv, {"dtype": "float8_e4m3fn", "scale_per": "token_head"}),
    "write_kv float8_e4m3fn, head": (write_kv, HEAD_SCALES),
    "write_kv int8, token_head": (write_kv, {"dtype": "int8", "scale_per": "token_head"}),
}


def new_slots(num_tokens: int, num_blocks: int, num_calls: int) -> list[jax.Array]:
    """Slots for each call: whole shuffled blocks for many tokens, one slot in each of several blocks for few."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(num_calls):
        if num_tokens % BLOCK_SIZE == 0 and num_blocks // 8 < num_tokens < num_blocks * BLOCK_SIZE:
            ids = 1 + rng.permutation(num_blocks - 1)[: num_tokens // BLOCK_SIZE]
            slots = (ids[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()
        else:
            slots = (1 + rng.permutation(num_blocks - 1)[:num_tokens]) * BLOCK_SIZE + rng.integers(BLOCK_SIZE)
        found.append(jnp.asarray(slots, jnp.int32))
    return found


def write_bytes(num_tokens: int, cache: KVCache) -> int:
    """Bytes of tokens read in bfloat16 and written in the cache's dtype, of slots, and of scales written per token."""
    numbers = 2 * num_tokens * KV_HEADS * HEAD_DIM
    scales = 2 * num_tokens * KV_HEADS * 4 if cache.k_scale is not None and cache.k_scale.ndim == 3 else 0
    return numbers * (2 + cache.k.dtype.itemsize) + scales + 4 * num_tokens


def check_write(write: Write, cache: KVCache, k: jax.Array, v: jax.Array, slots: jax.Array) -> None:
    """Checks that every token is in its slot, and by the sum over the pool that nothing else was written."""
    written = widen_kv(poisoned(jax.jit(write), cache, k, v, slots))
    for pool, tokens in ((written.k, k), (written.v, v)):
        wide = tokens.astype(jnp.float32)
        stored = pool.reshape(-1, KV_HEADS, HEAD_DIM)[slots]
        # Half a step of the dtype, and never more than the largest number's: 2^-4 of it, float8_e4m3fn.
        bound = 0.0 if cache.k_scale is None else 2**-4
        error = jnp.abs(stored - wide) - bound * jnp.abs(wide).max(axis=-1, keepdims=True)
        require((error <= 0).all(), f"write_kv stored something else: {float(error.max())} over the bound")
        elsewhere = jnp.abs(pool).sum(axis=-1).astype(bool).sum()
        require(elsewhere <= len(stored) * KV_HEADS, f"{elsewhere} rows written for {len(stored)} tokens")


def measure_writes(sizes: Sizes) -> Iterator[dict[str, Any]]:
    writes = (sizes.prefill_tokens, sizes.prefill_writes), (sizes.decode_tokens, sizes.decode_writes)
    for num_tokens, num_calls in writes:
        # New tokens of prompts rotate, so that L2 is cold for them; a decode step reads tokens that were just computed.
        shape = num_tokens, KV_HEADS, HEAD_DIM
        tokens = [
            (random(2 * i, shape=shape, dtype="bfloat16"), random(2 * i + 1, shape=shape, dtype="bfloat16"))
            for i in range(4 if num_tokens == sizes.prefill_tokens else 1)
        ]
        slots = new_slots(num_tokens, sizes.write_blocks, num_calls)
        for name, (write, created) in WRITES.items():
            shapes: dict[str, Any] = dict(num_blocks=sizes.write_blocks, block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS)
            cache = KVCache.create(**shapes, head_dim=HEAD_DIM, **created)
            check_write(write, cache, *tokens[0], slots[0])

            def chain(cache: KVCache, tokens: list, slots: list, write: Write = write) -> KVCache:
                for i, one in enumerate(slots):
                    cache = write(cache, *tokens[i % len(tokens)], one)
                return cache

            microseconds = donated_microseconds(chain, cache, (tokens, slots), num_calls, sizes.seconds)
            row = {"operation": name, "size": f"{num_tokens} tokens", "microseconds": microseconds}
            yield row | {"bytes": write_bytes(num_tokens, cache)}


# Copies


def measure_copies(sizes: Sizes) -> Iterator[dict[str, Any]]:
    stack = create_stack(sizes)
    ids = 1 + np.random.default_rng(1).permutation(sizes.stack_blocks - 1)[: 2 * sizes.copied_blocks]
    halves = tuple(jnp.asarray(half, jnp.int32) for half in np.split(ids, 2))
    few = tuple(jnp.where(jnp.arange(sizes.copied_blocks) % 64 == 0, half, 0) for half in halves)
    by_stack, by_cache = f"copy_blocks, a stack of {sizes.layers}", f"copy_blocks, {sizes.layers} caches"
    layers = tuple(KVCache(k=stack.k[i], v=stack.v[i]) for i in range(sizes.layers))

    def copy_each(caches: tuple[KVCache, ...], *pairs: jax.Array) -> tuple[KVCache, ...]:
        return tuple(copy_blocks(cache, *pairs) for cache in caches)

    def by_xla(stack: KVCache, sources: jax.Array, destinations: jax.Array) -> KVCache:
        return jax.tree.map(lambda pool: pool.at[:, destinations].set(pool[:, sources]), stack)

    cases: tuple[tuple[str, Callable[..., Any], Any, tuple[jax.Array, ...]], ...] = (
        (by_stack, copy_blocks, stack, halves),
        (f"{by_stack}, much padding", copy_blocks, stack, few),
        (by_cache, copy_each, layers, halves),
        (f"{by_cache}, much padding", copy_each, layers, few),
        (f"by XLA, a stack of {sizes.layers}", by_xla, stack, halves),
    )
    for name, copy, state, pairs in cases:
        if state is stack:
            check_copy(copy, stack, *pairs)
        microseconds, copied = donated_microseconds(copy, state, pairs, 1, sizes.seconds), jnp.count_nonzero(pairs[0])
        row = {"operation": name, "size": f"{copied} blocks", "microseconds": microseconds}
        yield row | {"bytes": 2 * int(copied) * block_bytes(stack)}


def check_copy(copy: Callable[..., KVCache], stack: KVCache, sources: jax.Array, destinations: jax.Array) -> None:
    """Checks every block of the result, also blocks that are no destination."""
    comes_from = jnp.arange(stack.k.shape[1]).at[destinations].set(sources)
    copied = poisoned(jax.jit(copy), stack, sources, destinations)
    for new, old in ((copied.k, stack.k), (copied.v, stack.v)):
        same = jax.jit(lambda new, old: (new == old[:, comes_from]).all())(new, old)
        require(same, "copy_blocks copied something else")


# Gathers


def measure_gather(sizes: Sizes) -> Iterator[dict[str, Any]]:
    seqs, length = sizes.gathered
    max_blocks = length // BLOCK_SIZE
    cache = random_cache(1 + seqs * max_blocks)
    ids = 1 + np.random.default_rng(3).permutation(seqs * max_blocks)
    tables = jnp.asarray(ids.reshape(seqs, max_blocks), jnp.int32)
    lengths = jnp.full(seqs, length, jnp.int32)
    found = poisoned(jax.jit(gather_kv), cache, tables, lengths)
    for got, pool in ((found.k, cache.k), (found.v, cache.v)):
        require((got.reshape(pool[tables].shape) == pool[tables]).all(), "gather_kv got others' tokens")

    def chain(lengths: jax.Array, cache: KVCache, tables: jax.Array) -> jax.Array:
        # The next call must wait for this one, so its lengths depend on a number of both results. With only one XLA
        # would gather only that one.
        found = jax.lax.optimization_barrier(gather_kv(cache, tables, lengths))
        return lengths + jnp.isnan(found.k[0, 0, 0, 0] + found.v[0, 0, 0, 0]).astype(jnp.int32)

    microseconds = donated_microseconds(chain, lengths, (cache, tables), 1, sizes.seconds)
    row = {"operation": "gather_kv", "size": f"{seqs} x {length} tokens", "microseconds": microseconds}
    yield row | {"bytes": 2 * seqs * max_blocks * block_bytes(cache)}


OPERATIONS = {"write": measure_writes, "copy": measure_copies, "gather": measure_gather}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="toy sizes")
    parser.add_argument("--operations", nargs="+", choices=tuple(OPERATIONS), default=tuple(OPERATIONS))
    add_output(parser)
    args = parser.parse_args(arguments)
    sizes, begin, store = TOY if args.toy else Sizes(), time.perf_counter(), open_store("cache_ops", args)
    rate = copy_rate(sizes)
    shapes = f"{KV_HEADS} KV heads, head_dim {HEAD_DIM}, block {BLOCK_SIZE}"
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {shapes}; a plain copy: {rate / 1e3:.0f} GB/s")
    print(f"{'operation':>38} {'size':>16} {'us':>9} {'MB':>8} {'GB/s':>7} {'% copy':>7}")
    store.add("plain copy", {"bytes_per_microsecond": {"kernel": rate}})
    for operation in args.operations:
        for row in OPERATIONS[operation](sizes):
            row["of_copy"] = row["bytes"] / row["microseconds"] / rate
            print(
                f"{row['operation']:>38} {row['size']:>16} {row['microseconds']:9.1f} {row['bytes'] / 1e6:8.1f} "
                f"{row['bytes'] / row['microseconds'] / 1e3:7.1f} {100 * row['of_copy']:6.1f}%",
                flush=True,
            )
            store.add(f"{row['operation']} | {row['size']}", row)
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
