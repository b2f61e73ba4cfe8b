"""New tokens into the cache: `write_kv`, and other forms of its scatter."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checks import poisoned
from benchmarks.harness import random
from benchmarks.kernels.cache_sizes import BLOCK_SIZE, HEAD_DIM, KV_HEADS, Sizes, carried_microseconds, show
from jaxpaged import KVCache, rotary_frequencies, rotate_and_write_kv, widen_kv, write_kv


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
    new, _ = rotate_and_write_kv(cache, k, k, v, slots, slots, rotary_frequencies(HEAD_DIM))  # q is not needed
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
        # A prompt's new tokens take turns, so that they are not in the L2 cache; a decode step's were just computed.
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
