"""Copies sequences from a paged cache to contiguous arrays, and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxpaged._cache.kv_cache import KVCache, check_cache, map_blocks
from jaxpaged._cache.pool_rows import put_rows, take_rows
from jaxpaged._cache.write import scatter_slots
from jaxpaged._integers import checked_array
from jaxpaged._on_shards import on_shards
from jaxpaged._one_program import one_program


@on_shards
def gather_kv(cache: KVCache, block_tables: ArrayLike, lengths: ArrayLike) -> KVCache:
    """Copies each sequence's keys and values to a contiguous array.

    Args:
        cache: one layer's cache, or a stack of layers.
        block_tables: int32 `[seqs, max_blocks]`, as in `BlockAllocator.block_tables`. Entries past a sequence's length
            may hold any number.
        lengths: int32 `[seqs]`, length of each sequence in tokens, clipped to the capacity of a table row.

    Returns:
        A `KVCache` in which block i holds all of sequence i, and the block size is `tokens = max_blocks * block_size`.
        k is `[seqs, tokens, kv_heads, head_dim]`, and v likewise, with a leading layer axis if `cache` has one. The
        numbers and scales are as stored, and zero past a sequence's length. `widen_kv` widens a quantised result.

    Raises:
        ValueError: the cache's arrays do not match, or `block_tables` or `lengths` has the wrong shape or dtype.

    Bytes moved: `2 * seqs * max_blocks * block_bytes`, read and written. The whole width of the tables is moved.

    Example:
        >>> import jax.numpy as jnp, jaxpaged
        >>> cache = jaxpaged.KVCache.create(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=8)
        >>> k = jnp.broadcast_to(jnp.array([1.0, 2.0, 3.0])[:, None, None], (3, 1, 8))
        >>> cache = jaxpaged.ops.write_kv(cache, k, k, jnp.array([6, 7, 2]))
        >>> contiguous = jaxpaged.ops.gather_kv(cache, jnp.array([[3, 1]]), jnp.array([3]))
        >>> contiguous.k[..., 0, 0].tolist()
        [[1.0, 2.0, 3.0, 0.0]]
        >>> empty = jaxpaged.KVCache.create(num_blocks=8, block_size=2, num_kv_heads=1, head_dim=8)
        >>> other = jaxpaged.ops.scatter_kv(empty, contiguous, jnp.array([[5, 4]]), jnp.array([3]))
        >>> [int(x) for x in other.k[:, :, 0, 0].ravel()]
        [0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 1, 2, 0, 0, 0, 0]
    """
    check_cache(cache)
    slots = _token_slots(cache, block_tables, lengths)  # [seqs, tokens], num_slots past the length
    num_slots = cache.k.shape[-4] * cache.k.shape[-3]
    # Whole blocks are fetched and then masked, because single rows are too short to be fetched at full speed.
    ids = jnp.where(slots < num_slots, slots // cache.k.shape[-3], 0)[:, :: cache.k.shape[-3]]

    def gather(pool: jax.Array) -> jax.Array:
        taken = take_blocks(pool, ids.ravel(), cache)
        axes = _layer_axes(cache)
        taken = taken.reshape(*taken.shape[:axes], *slots.shape, *taken.shape[axes + 2 :])
        return _only_where(slots < num_slots, taken, cache)

    return map_blocks(gather, cache)


@on_shards
def scatter_kv(cache: KVCache, contiguous: KVCache, block_tables: ArrayLike, lengths: ArrayLike) -> KVCache:
    """Writes contiguous sequences to their blocks: the inverse of `gather_kv`. In place if the cache is donated.

    The numbers are copied bit for bit.

    Args:
        cache: cache to write to, like the one given to `gather_kv`; the number of blocks may differ.
        contiguous: result of `gather_kv`: block i holds all of sequence i, `max_blocks * block_size` tokens.
        block_tables: int32 `[seqs, max_blocks]`, blocks of each sequence in `cache`. Sequences that share a block must
            have the same tokens in it.
        lengths: int32 `[seqs]`, length of each sequence in tokens. Slots past it are not written.

    Returns:
        The new cache. Scales per tensor or head keep the values of `cache`.

    Raises:
        ValueError: shapes, dtypes or scales do not match, or a stack has 2^31 slots or more.

    Bytes moved: `2 * tokens * 2 * layers * kv_heads * head_dim * itemsize`, read and written, plus scales per token and
    head.

    Example: see `gather_kv`.
    """
    check_cache(cache)
    check_cache(contiguous)
    slots = _token_slots(cache, block_tables, lengths)
    _check_contiguous(contiguous, cache, *slots.shape)
    num_layers, num_blocks = layers_and_blocks(cache.k, cache)
    num_slots = num_blocks * cache.k.shape[-3]
    if num_layers * num_slots >= 2**31:
        raise ValueError(f"slots are int32: a stack holds less than 2^31 of them; got {cache.k.shape=}.")
    slots = slots.ravel()
    in_layers = _in_every_layer(slots, num_layers, num_slots, slots < num_slots)

    def scatter(pool: jax.Array, tokens: jax.Array) -> jax.Array:
        return scatter_slots(pool, tokens.reshape(-1, *tokens.shape[_layer_axes(cache) + 2 :]), in_layers)

    return map_blocks(scatter, cache, contiguous)


def _layer_axes(cache: KVCache) -> int:
    return cache.k.ndim - 4


@one_program()
def take_blocks(pool: jax.Array, ids: jax.Array, cache: KVCache) -> jax.Array:
    """Gathers blocks of a pool `[(layers,) blocks, ...]`, in every layer. All ids must be inside the pool."""
    # A stack is flattened to one pool, with the layer in the index: a gather over a leading axis makes XLA transpose.
    num_layers, num_blocks = layers_and_blocks(pool, cache)
    block = pool.shape[_layer_axes(cache) + 1 :]
    every = _in_every_layer(ids, num_layers, num_blocks)
    return take_rows(pool.reshape(-1, *block), every).reshape(*pool.shape[: _layer_axes(cache)], ids.size, *block)


@one_program()
def put_blocks(pool: jax.Array, blocks: jax.Array, ids: jax.Array, cache: KVCache) -> jax.Array:
    """The inverse of `take_blocks`. Blocks with a negative id are dropped.

    The other ids must be inside the pool and distinct, because XLA may assume that no two writes overlap.
    """
    num_layers, num_blocks = layers_and_blocks(pool, cache)
    block = pool.shape[_layer_axes(cache) + 1 :]
    every = _in_every_layer(ids, num_layers, num_blocks, ids >= 0)
    return put_rows(pool, every, blocks.reshape(-1, *block))


def layers_and_blocks(pool: jax.Array, cache: KVCache) -> tuple[int, int]:
    return (pool.shape[0], pool.shape[1]) if _layer_axes(cache) else (1, pool.shape[0])


@one_program()
def _only_where(mask: jax.Array, values: jax.Array, cache: KVCache) -> jax.Array:
    """`values` [(layers,) *mask.shape, ...] where the mask is true, and zeros elsewhere, even for NaN."""
    axes = _layer_axes(cache)
    mask = lax.broadcast_in_dim(mask, values.shape, tuple(range(axes, axes + mask.ndim)))
    return jnp.where(mask, values, jnp.zeros_like(values))


@one_program("num_layers", "stride")
def _in_every_layer(ids: jax.Array, num_layers: int, stride: int, legal: jax.Array | None = None) -> jax.Array:
    """[ids] -> [layers * ids], shifted to each layer of a stack that is flattened to one pool. Ids that are not legal
    become distinct negative numbers."""
    shifted = (jnp.arange(num_layers, dtype=jnp.int32)[:, None] * stride + ids[None]).ravel()
    if legal is None:
        return shifted
    return jnp.where(jnp.tile(legal, num_layers), shifted, -1 - jnp.arange(shifted.size, dtype=jnp.int32))


def holds_tokens(ids: jax.Array, num_blocks: int) -> jax.Array:
    """Whether an id is inside the pool and not the null block, bool [ids]."""
    return (ids > 0) & (ids < num_blocks)


@one_program("num_blocks")
def distinct(ids: jax.Array, num_blocks: int) -> jax.Array:
    """The ids, with -1 for padding and for ids that occur again later."""
    legal = holds_tokens(ids, num_blocks)
    order = jnp.arange(ids.size, dtype=jnp.int32)
    inside = jnp.where(legal, ids, 0)
    last = jnp.zeros(num_blocks, jnp.int32).at[inside].max(order, mode="promise_in_bounds")
    return jnp.where(legal & (last[inside] == order), ids, -1)


def _token_slots(cache: KVCache, block_tables: ArrayLike, lengths: ArrayLike) -> jax.Array:
    """Slot of each token of each sequence, int32 [seqs, tokens]; past a sequence's length, the number of slots."""
    block_tables = checked_array("block_tables", block_tables, "seqs", "max_blocks")
    lengths = checked_array("lengths", lengths, len(block_tables), which="one for each row of block_tables")
    num_blocks, block_size = cache.k.shape[-4:-2]
    if block_tables.size == 0 or block_tables.shape[1] * block_size >= 2**31:
        raise ValueError(
            "block_tables must be [seqs, max_blocks], with at least one sequence and one block, and less than 2^31 "
            f"tokens per row; got {block_tables.shape=}, {block_size=}."
        )
    return _slots_of_tables(block_tables, lengths, num_blocks, block_size)


@one_program("num_blocks", "block_size")
def _slots_of_tables(block_tables: jax.Array, lengths: jax.Array, num_blocks: int, block_size: int) -> jax.Array:
    seqs, max_blocks = block_tables.shape
    offsets = jnp.arange(block_size, dtype=jnp.int32)
    slots = (jnp.clip(block_tables, 0, num_blocks - 1)[..., None] * block_size + offsets[None, None]).reshape(seqs, -1)
    positions = jnp.arange(max_blocks * block_size, dtype=jnp.int32)
    return jnp.where(positions[None] < lengths[:, None], slots, num_blocks * block_size)


def _check_contiguous(contiguous: KVCache, cache: KVCache, num_blocks: int, block_size: int) -> None:
    layers, token_shape = cache.k.shape[: _layer_axes(cache)], cache.k.shape[-2:]
    wanted, dtype = (*layers, num_blocks, block_size, *token_shape), contiguous.k.dtype
    if contiguous.k.shape != wanted or dtype != cache.k.dtype or _value_dim(contiguous) != _value_dim(cache):
        raise ValueError(
            f"contiguous must be {list(wanted)} in {cache.k.dtype} with values of {_value_dim(cache)} numbers, like "
            f"block_tables and cache; got {contiguous.k.shape=} in {dtype}, values of {_value_dim(contiguous)}."
        )
    if _scale_kinds(contiguous) != _scale_kinds(cache):
        raise ValueError("contiguous must have scales of the same granularity as the cache.")


def _value_dim(cache: KVCache) -> str:
    return f"{cache.value_dim} of the key's" if cache.v is None else str(cache.v.shape[-1])


def _scale_kinds(cache: KVCache) -> list[int | None]:
    return [None if scale is None else scale.ndim for scale in (cache.k_scale, cache.v_scale)]
