"""Sizes of the benchmark of the cache's operations, and how they are timed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import random, slope_microseconds
from jaxpaged import KVCache

KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16
COPY_FORMS = ("kernel", "memcpy")


@dataclasses.dataclass(frozen=True)
class Sizes:
    write_blocks: int = 8192  # 537 MB: more than 10 times the L2 cache of an H100
    prefill_tokens: int = 8192
    decode_tokens: int = 256
    layers: int = 32
    stack_blocks: int = 1040
    copied_blocks: int = 512
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


def create_stack(sizes: Sizes) -> KVCache:
    shape = sizes.layers, sizes.stack_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM
    return KVCache(k=random(1, shape=shape, dtype="bfloat16"), v=random(2, shape=shape, dtype="bfloat16"))


def block_bytes(cache: KVCache) -> int:
    """Of one block, its keys and values, in every layer."""
    return 2 * cache.k.nbytes // cache.k.shape[-4]


def show(row: dict[str, Any]) -> None:
    print(f"{row['operation']}, {row['size']}: {row['microseconds']:.1f} us", flush=True)
