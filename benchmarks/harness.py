"""How the benchmarks time: device time a call, and the floor that no kernel can go below."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

COLD_BYTES = 600_000_000  # what the rotated inputs take together: 12 times the L2 cache of an H100


def chain_microseconds(chain: Callable[..., Any], args: tuple, num_calls: int, seconds: float = 0.05) -> float:
    """Device time of one of the `num_calls` calls that `chain` makes one after the other.

    The slope between two numbers of repetitions, so that what is paid once (dispatch of the first, the final wait)
    drops out; the median of five such slopes.
    """
    compiled = jax.jit(chain).lower(*args).compile()
    jax.block_until_ready(compiled(*args))

    def run(repetitions: int) -> float:
        start = time.perf_counter()
        for _ in range(repetitions):
            result = compiled(*args)
        jax.block_until_ready(result)
        return time.perf_counter() - start

    once = (run(5) - run(1)) / 4
    few = max(2, min(200, int(seconds / 4 / max(once, 1e-6))))
    slopes = [(run(4 * few) - run(few)) / (3 * few) for _ in range(5)]
    return statistics.median(slopes) / num_calls * 1e6


READ_STAGES, READ_ROWS = 6, 64  # a ring of 6 x 64 rows of a head: 96 KiB at 128 numbers of 2 bytes, two programs a SM


def read_only(k_cache: jax.Array, v_cache: jax.Array, token: jax.Array, *, start: int, slots: int) -> jax.Array:
    """Reads `slots` consecutive slots of both caches into shared memory and does nothing with them: the floor.

    `token` f32 [128] is handed through, so that calls can be chained.
    """
    k_rows, v_rows = (cache.reshape(-1, cache.shape[-1]) for cache in (k_cache, v_cache))
    kv_heads, head_dim = k_cache.shape[2:]
    first, num_tiles = start * kv_heads, slots * kv_heads // READ_ROWS  # a tile of K and one of V
    programs = min(2 * int(jax.devices()[0].core_count), num_tiles)

    def kernel(k_gmem, v_gmem, token_gmem, out_gmem, ring_smem, token_smem, full, token_full):  # type: ignore[no-untyped-def]
        program = lax.axis_index("program")
        mine = lax.div(num_tiles - program + programs - 1, jnp.int32(programs)) * 2

        def fetch(i: jax.Array) -> None:
            row = first + (program + lax.div(i, jnp.int32(2)) * programs) * READ_ROWS
            for which, source in enumerate((k_gmem, v_gmem)):

                @pl.when(lax.rem(i, jnp.int32(2)) == which)
                def _copy(source: Any = source) -> None:
                    stage = lax.rem(i, jnp.int32(READ_STAGES))
                    plgpu.copy_gmem_to_smem(source.at[pl.ds(row, READ_ROWS)], ring_smem.at[stage], full.at[stage])

        for i in range(READ_STAGES):

            @pl.when(i < mine)
            def _start(i: int = i) -> None:
                fetch(jnp.int32(i))

        def step(i: jax.Array, _: None) -> None:
            plgpu.barrier_wait(full.at[lax.rem(i, jnp.int32(READ_STAGES))])

            @pl.when(i + READ_STAGES < mine)
            def _next() -> None:
                fetch(i + READ_STAGES)

        lax.fori_loop(0, mine, step, None)

        @pl.when(program == 0)
        def _hand_through() -> None:
            plgpu.copy_gmem_to_smem(token_gmem, token_smem, token_full)
            plgpu.barrier_wait(token_full)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(token_smem, out_gmem)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(token.shape, token.dtype),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=(
            plgpu.SMEM((READ_STAGES, READ_ROWS, head_dim), k_cache.dtype),
            plgpu.SMEM(token.shape, token.dtype),
            plgpu.Barrier(num_barriers=READ_STAGES),
            plgpu.Barrier(),
        ),
    )(k_rows, v_rows, token)


def floor_microseconds(k_cache: jax.Array, v_cache: jax.Array, slots: int, num_calls: int) -> float:
    """Device time to read `slots` slots of both caches, a different run of them in each of `num_calls` calls."""
    available = k_cache.shape[0] * k_cache.shape[1]
    starts = [(i * slots) % (available - slots + 1) for i in range(num_calls)]

    def chain(k_cache: jax.Array, v_cache: jax.Array, token: jax.Array) -> jax.Array:
        for start in starts:
            token = read_only(k_cache, v_cache, token, start=start, slots=slots)
        return token

    return chain_microseconds(chain, (k_cache, v_cache, jnp.ones(128, jnp.float32)), num_calls)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def random(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)
