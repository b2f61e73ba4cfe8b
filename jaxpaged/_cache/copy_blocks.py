"""Copies blocks within a cache: with a kernel on GPUs that support it, otherwise with XLA."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxpaged import _device
from jaxpaged._by_kernel import NO_HINTS, Choice, Refusal, choose, computed_by_kernel
from jaxpaged._cache.kv_cache import KVCache, check_cache, map_blocks
from jaxpaged._cache.transfer import (
    distinct,
    holds_tokens,
    layers_and_blocks,
    put_blocks,
    take_blocks,
)
from jaxpaged._integers import checked_array
from jaxpaged._on_shards import on_shards
from pallas_kernels import copy_blocks as kernel
from pallas_kernels.copy_blocks.config import Copies

KERNELS = (kernel.KERNEL,)


@on_shards
def copy_blocks(cache: KVCache, source_ids: ArrayLike, destination_ids: ArrayLike) -> KVCache:
    """Copies blocks over other blocks of the same cache; in place if the cache is donated.

        new[destination_ids[i]] = old[source_ids[i]],    keys, values and their scales, in every layer of a stack

    All sources are read before any destination is written, so a block may be both: the pairs (1, 2), (2, 3) copy the
    old block 2 to block 3. If several pairs have the same destination, the last pair wins. With one cache per layer,
    copy each cache: `caches = tuple(copy_blocks(cache, source_ids, destination_ids) for cache in caches)`.

    Args:
        cache: one layer's cache, or a stack of layers.
        source_ids: int32 `[pairs]`, block ids to read.
        destination_ids: int32 `[pairs]`, block ids to write. A pair is padding, and copies nothing, if either id is 0
            (the null block) or outside the pool.

    Returns:
        The new cache.

    Raises:
        ValueError: the cache's arrays do not match, or the ids are not int32 `[pairs]` of one length.

    Bytes moved, with `block_bytes = 2 * layers * block_size * kv_heads * head_dim * itemsize`:

    - On GPUs of compute capability 9.0 a kernel reads and writes each block once, `2 * pairs * block_bytes`, and
      moves nothing for padding. Blocks that are both read and overwritten go through a temporary buffer, which doubles
      their bytes and reserves at most 512 KiB per pair.
    - Otherwise XLA copies: on other devices, for keys and values of different width, for scales per token and head, on
      several devices of an auto mesh outside `jax.shard_map`, and under `vmap` and differentiation. All blocks go
      through a temporary buffer: `4 * pairs * block_bytes`, padding included.

    No temporary buffer is as large as the cache.

    Example:
        >>> import jax.numpy as jnp, jaxpaged
        >>> cache = jaxpaged.KVCache.create(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=8)
        >>> cache = jaxpaged.ops.write_kv(cache, jnp.ones((1, 1, 8)), jnp.ones((1, 1, 8)), jnp.array([3]))
        >>> cache = jaxpaged.ops.copy_blocks(cache, jnp.array([1, 0]), jnp.array([3, 0]))
        >>> [int(x) for x in cache.k[:, :, 0, 0].ravel()]
        [0, 0, 0, 1, 0, 0, 0, 1]
    """
    check_cache(cache)
    source_ids = checked_array("source_ids", source_ids, "pairs")
    destination_ids = checked_array("destination_ids", destination_ids, "pairs")
    if source_ids.shape != destination_ids.shape:
        raise ValueError(
            "source_ids and destination_ids must be of one length; "
            f"got {source_ids.shape=}, {destination_ids.shape=}. Pad with the null block, 0."
        )
    choice = _choose(cache, source_ids.size)
    if isinstance(choice, Refusal):
        return copy_by_xla(cache, source_ids, destination_ids)
    return copy_by_kernel(choice, cache, source_ids, destination_ids)


def copy_by_xla(cache: KVCache, source_ids: jax.Array, destination_ids: jax.Array) -> KVCache:
    num_blocks = cache.k.shape[-4]
    legal = _legal(source_ids, destination_ids, num_blocks)
    sources = jnp.where(legal, source_ids, 0)
    destinations = distinct(jnp.where(legal, destination_ids, 0), num_blocks)

    def copy(pool: jax.Array) -> jax.Array:
        # If the gather is fused into the scatter, it reads blocks that the scatter overwrites, and XLA on a GPU copies
        # the whole pool twice.
        taken = lax.optimization_barrier(take_blocks(pool, sources, cache))
        return put_blocks(pool, taken, destinations, cache)

    return map_blocks(copy, cache)


def _choose(cache: KVCache, num_pairs: int) -> Choice | Refusal:
    """The kernel and its config, or a refusal if XLA has to copy."""
    try:
        gpu = _device.gpu()
    except NotImplementedError as no_gpu:
        return Refusal(str(no_gpu))
    pairs, counts = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((num_pairs, 2), (2,)))
    return choose(Copies(jax.eval_shape(_flat_pools, cache), pairs, counts), gpu, NO_HINTS, KERNELS)


def _flat_pools(cache: KVCache) -> tuple[jax.Array, ...]:
    """The pools in the kernel's layout, [layers, blocks, numbers]."""
    return tuple(pool.reshape(*layers_and_blocks(pool, cache), -1) for pool in _pools(cache).values())


def _launch(choice: Choice, cache: KVCache, source_ids: jax.Array, destination_ids: jax.Array) -> KVCache:
    copies = Copies(_flat_pools(cache), *plan(source_ids, destination_ids, cache.k.shape[-4]))
    copied = choice.kernel.launch(copies, choice.config)
    cache = copy_by_xla(cache, source_ids, destination_ids)  # for scales per token; XLA drops the unused pools
    pools = _pools(cache)
    new = (x.reshape(pool.shape) for pool, x in zip(pools.values(), copied, strict=True))
    changes: Any = dict(zip(pools, new, strict=True))
    return dataclasses.replace(cache, **changes)


def _elsewhere(_: Choice, *arrays: Any) -> KVCache:
    return copy_by_xla(*arrays)


def _tangents(_: Choice, primals: tuple, tangents: tuple) -> Any:
    return jax.jvp(copy_by_xla, primals, tangents)  # the kernel has no backward pass


copy_by_kernel = computed_by_kernel(_launch, _elsewhere, _tangents, can_be_mapped=False)


def plan(source_ids: jax.Array, destination_ids: jax.Array, num_blocks: int) -> tuple[jax.Array, jax.Array]:
    """Plans the kernel's work: (source, destination) pairs, int32 [pairs, 2], and the counts of both kinds, int32 [2].

    Direct pairs fill the array from the front. Staged pairs, which must all be read before any of them is written, fill
    it from the back, in any order. Padding, and pairs whose destination a later pair overwrites, are left out.
    """
    legal = _legal(source_ids, destination_ids, num_blocks)
    sources, destinations = jnp.where(legal, source_ids, 0), jnp.where(legal, destination_ids, 0)
    order = jnp.arange(source_ids.size, dtype=jnp.int32)
    # In one table, the last pair that writes each block and the last pair that reads it.
    targets, marks = jnp.concatenate([destinations, sources + num_blocks]), jnp.concatenate([order, order])
    last = jnp.full(2 * num_blocks, -1, jnp.int32).at[targets].max(marks, mode="promise_in_bounds")
    live = legal & (last[destinations] == order) & (sources != destinations)
    direct = (last[sources] < 0) & (last[destinations + num_blocks] < 0)
    ranks = jnp.cumsum(jnp.stack([live & direct, live & ~direct]), axis=1, dtype=jnp.int32)
    target = jnp.where(direct, ranks[0] - 1, order.size - ranks[1])
    target = jnp.where(live, target, order.size + order)  # past the end, and distinct
    pairs = jnp.zeros((order.size, 2), jnp.int32)
    pairs = pairs.at[target].set(jnp.stack([sources, destinations], axis=1), mode="drop", unique_indices=True)
    return pairs, ranks[:, -1]


def _legal(source_ids: jax.Array, destination_ids: jax.Array, num_blocks: int) -> jax.Array:
    return holds_tokens(source_ids, num_blocks) & holds_tokens(destination_ids, num_blocks)


def _pools(cache: KVCache) -> dict[str, jax.Array]:
    return {"k": cache.k} if cache.v is None else {"k": cache.k, "v": cache.v}
