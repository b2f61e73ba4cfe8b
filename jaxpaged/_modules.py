"""What the NNX and the Linen module share: everything between the projections."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._attention import packed
from jaxpaged._attention.attend import attend
from jaxpaged._attention.public import Implementation
from jaxpaged._cache.kv_cache import KVCache
from jaxpaged._cache.layers import CacheLayer
from jaxpaged._cache.rotary import rotate_and_write_kv
from jaxpaged._cache.write import write_kv
from jaxpaged._integers import as_int32
from pallas_kernels.partition_plan import PartitionPlan


def rotate_write_attend[C: (KVCache, CacheLayer)](
    qkv: jax.Array,  # [seqs, q_len, (heads + 2 * kv_heads) * head_dim], the heads of q, then of k, then of v
    cache: C,
    allocator: BlockAllocator,
    slots: jax.Array,  # int32 [seqs, q_len]
    query_starts: ArrayLike | None,  # int32 [seqs + 1]: [tokens] takes the place of [seqs, q_len]
    positions: ArrayLike | None,  # int32, as slots
    *,
    frequencies: tuple[float, ...] | None,
    scale: float | None,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    num_partitions: int | None,
    plan: PartitionPlan | None,
    tree_mask: ArrayLike | None,
    implementation: Implementation | None,
) -> tuple[C, jax.Array]:  # and [seqs, q_len, heads * head_dim]
    num_kv_heads, head_dim = _pools(cache).k.shape[-2:]
    projected = qkv.reshape(*slots.shape, -1, head_dim)
    num_heads = projected.shape[-2] - 2 * num_kv_heads
    q, k, v = jnp.split(projected, [num_heads, num_heads + num_kv_heads], axis=-2)
    if frequencies is None:
        cache = write_kv(cache, k, v, slots)
    else:
        if positions is None:
            positions = (
                allocator.positions(slots.shape[1])
                if query_starts is None
                else packed.positions(as_int32(query_starts), allocator.lengths, tokens=slots.shape[0])
            )
        cache, q = rotate_and_write_kv(cache, q, k, v, slots, positions, frequencies)
    out = attend(
        q,
        cache,
        allocator,
        query_starts=query_starts,
        scale=scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        num_partitions=num_partitions,
        plan=plan,
        tree_mask=tree_mask,
        implementation=implementation,
    )
    return cache, out.reshape(*slots.shape, -1)


def _pools(cache: KVCache | CacheLayer) -> KVCache:
    return cache.stack if isinstance(cache, CacheLayer) else cache


def check_call(
    x: jax.Array,
    cache: KVCache | CacheLayer,
    slots: jax.Array,
    query_starts: ArrayLike | None,
    *,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """Raises `ValueError` where a module's inputs do not fit together."""
    if query_starts is None and (x.ndim != 3 or slots.shape != x.shape[:2]):
        raise ValueError(
            f"x must be [seqs, q_len, features] and slots [seqs, q_len]; got {x.shape=}, {slots.shape=}. "
            "Pass query_starts with packed tokens."
        )
    if query_starts is not None and (x.ndim != 2 or slots.shape != x.shape[:1]):
        raise ValueError(
            f"with query_starts x must be [tokens, features] and slots [tokens]; got {x.shape=}, {slots.shape=}."
        )
    k = _pools(cache).k
    if k.shape[-2:] != (num_kv_heads, head_dim):
        raise ValueError(
            f"the cache must be [blocks, block_size, {num_kv_heads}, {head_dim}] for this module; "
            f"got {k.shape=}. Create it with the module's num_kv_heads and head_dim."
        )


def check_sizes(num_heads: int, num_kv_heads: int, head_dim: int, frequencies: tuple[float, ...] | None) -> None:
    """Raises `ValueError` where a module's sizes do not fit together."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads; got {num_heads=}, {num_kv_heads=}.")
    if frequencies is not None and not 0 < 2 * len(frequencies) <= head_dim:
        raise ValueError(
            f"rotary_frequencies must hold up to head_dim // 2 numbers; got {len(frequencies)} for {head_dim=}. "
            "Make them with jaxpaged.rotary_frequencies(head_dim)."
        )
