"""Moving whole blocks: from block to block within a cache."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._cache import KVCache


def copy_blocks(cache: KVCache, source_ids: ArrayLike, destination_ids: ArrayLike) -> KVCache:
    """Copies blocks over other blocks of the same cache; in place where the cache is donated.

        new[destination_ids[i]] = old[source_ids[i]],    keys and values, in every layer of a stack

    All sources are read before anything is written, so a block may be both: pairs (1, 2), (2, 3) move the old block 2.
    Where several pairs have one destination, the last one counts. Caches held one a layer are copied one by one:
    `caches = tuple(copy_blocks(cache, source_ids, destination_ids) for cache in caches)`.

    Args:
        cache: one layer's cache, a stack of layers, or a folded stack (which has one layer's blocks after the other's:
            shift the ids with `layer_block_tables`).
        source_ids: int32 `[pairs]`, block ids.
        destination_ids: int32 `[pairs]`. A pair in which either id is 0, the null block, or outside the pool is
            padding: nothing is copied.

    Returns:
        The new cache.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Bytes moved: the pairs' blocks are read, set aside, and written, `2 * pairs * block_bytes` at the least, where
    `block_bytes = 2 * layers * block_size * kv_heads * head_dim * itemsize`. What is set aside is as large as what is
    copied, padding included; nothing is as large as the cache.

    Example:
        >>> import jax.numpy as jnp, jaxpaged
        >>> cache = jaxpaged.KVCache.create(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=8)
        >>> cache = jaxpaged.write_kv(cache, jnp.ones((1, 1, 8)), jnp.ones((1, 1, 8)), jnp.array([3]))
        >>> cache = jaxpaged.copy_blocks(cache, jnp.array([1, 0]), jnp.array([3, 0]))
        >>> [int(x) for x in cache.k[:, :, 0, 0].ravel()]
        [0, 0, 0, 1, 0, 0, 0, 1]
    """
    source_ids, destination_ids = jnp.asarray(source_ids), jnp.asarray(destination_ids)
    num_layers, num_blocks = _layers_and_blocks(cache)
    _check_ids("source_ids", source_ids)
    _check_ids("destination_ids", destination_ids)
    if source_ids.shape != destination_ids.shape:
        raise ValueError(
            "source_ids and destination_ids must be of one length; "
            f"got {source_ids.shape=}, {destination_ids.shape=}. Pad with the null block, 0."
        )
    legal = (source_ids > 0) & (source_ids < num_blocks) & (destination_ids > 0) & (destination_ids < num_blocks)
    legal &= _is_last(jnp.where(legal, destination_ids, 0), num_blocks)
    sources = _in_every_layer(jnp.where(legal, source_ids, 0), num_layers, num_blocks)
    # Padding goes to distinct places past the end: XLA may be told that no two writes meet (see `write_kv`).
    dropped = num_layers * num_blocks + jnp.arange(sources.size, dtype=jnp.int32)
    destinations = _in_every_layer(destination_ids, num_layers, num_blocks)
    destinations = jnp.where(jnp.tile(legal, num_layers), destinations, dropped)

    def copy(pool: jax.Array) -> jax.Array:
        # A stack is seen as one pool, its layer axis in the index: a window over a leading axis makes XLA transpose.
        flat = pool.reshape(num_layers * num_blocks, *pool.shape[-3:])
        moved = flat.at[sources].get(mode="promise_in_bounds")
        return flat.at[destinations].set(moved, mode="drop", unique_indices=True).reshape(pool.shape)

    return KVCache(k=copy(cache.k), v=copy(cache.v))


def _layers_and_blocks(cache: KVCache) -> tuple[int, int]:
    """The layers of a cache, 1 where it is not stacked, and the blocks of each."""
    if cache.k.ndim not in (4, 5) or cache.k.shape != cache.v.shape:
        raise ValueError(
            "k and v of a cache must be [blocks, block_size, kv_heads, head_dim], or that with a leading layer axis, "
            f"both alike; got {cache.k.shape=}, {cache.v.shape=}."
        )
    return (1 if cache.k.ndim == 4 else cache.k.shape[0]), cache.k.shape[-4]


def _check_ids(name: str, ids: jax.Array) -> None:
    if ids.ndim != 1 or ids.dtype != jnp.int32:
        raise ValueError(f"{name} must be int32 [pairs]; got {ids.dtype} {list(ids.shape)}.")


def _is_last(ids: jax.Array, num_blocks: int) -> jax.Array:
    """Whether no later entry holds the same id, bool [ids]."""
    order = jnp.arange(ids.size, dtype=jnp.int32)
    last = jnp.zeros(num_blocks, jnp.int32).at[ids].max(order, mode="promise_in_bounds")
    return last[ids] == order


def _in_every_layer(ids: jax.Array, num_layers: int, num_blocks: int) -> jax.Array:
    """[ids] -> [layers * ids], shifted to each layer of a stack that is seen as one pool."""
    starts = jnp.arange(num_layers, dtype=jnp.int32) * num_blocks
    return (starts[:, None] + ids[None]).ravel()
