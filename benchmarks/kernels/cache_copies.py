"""Blocks over other blocks: `copy_blocks`, by its kernel and by XLA."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checks import poisoned
from benchmarks.kernels.cache_sizes import (
    BLOCK_SIZE,
    HEAD_DIM,
    KV_HEADS,
    Sizes,
    block_bytes,
    carried_microseconds,
    show,
)
from jaxpaged import KVCache, copy_blocks
from jaxpaged._cache.copy_blocks import copy_by_kernel, copy_by_xla
from pallas_kernels.copy_blocks import config as copy_config


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
    """Every block of the result is the right one, blocks that are no destination included."""
    comes_from = jnp.arange(stack.k.shape[1]).at[destinations].set(sources)
    copied = poisoned(jax.jit(copy), stack, sources, destinations)
    for new, old in ((copied.k, stack.k), (copied.v, stack.v)):
        same = jax.jit(lambda new, old: (new == old[:, comes_from]).all())(new, old)
        assert bool(same), "copy_blocks copied something else"
