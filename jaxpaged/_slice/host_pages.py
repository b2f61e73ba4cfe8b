"""Pages of the host tier: copies prompt blocks out of the caches and back into them, in separate programs.

A page is the keys and values of a few blocks in all caches.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged._allocator.prefix_cache import PrefixCache
from jaxpaged._allocator.prefix_match import begin_with
from jaxpaged._cache.kv_cache import KVCache, map_blocks
from jaxpaged._cache.transfer import put_blocks, take_blocks
from jaxpaged._slice.state import State

Page = tuple[jax.Array, ...]  # one array [blocks, numbers] for each dtype in the caches


def map_pools(function: Callable[[KVCache, jax.Array], jax.Array], caches: Any) -> Any:
    """Applies `function(cache, pool)` to each array with a block axis."""
    return jax.tree.map(
        lambda cache: map_blocks(functools.partial(function, cache), cache),
        caches,
        is_leaf=lambda x: isinstance(x, KVCache),
    )


def block_arrays(caches: Any) -> list[tuple[KVCache, jax.Array]]:
    """Each array with a block axis, and the cache that it is in."""
    found: list[tuple[KVCache, jax.Array]] = []

    def note(cache: KVCache, pool: jax.Array) -> jax.Array:
        found.append((cache, pool))
        return pool

    map_pools(note, caches)
    return found


def take_out(state: State, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, list[Page]]:
    """Copies the blocks that are cached. Each page has its own arrays, so that it can be moved alone.

    Returns:
        where: as `Run.where`.
        pages: the copies.
    """
    tokens, numbers, rows, columns = inputs
    assert state.scheduler.prefixes is not None
    prefix_cache = state.scheduler.prefixes.cache
    matches, _ = prefix_cache.find(state.allocator, tokens, numbers[:, 2], numbers[:, 0])
    where = jnp.where(matches.begin[:, 0], matches.ids[:, 0], 0)
    ids = where.at[rows, columns].get(mode="fill", fill_value=0)
    by_dtype: dict[Any, list[jax.Array]] = {}
    for cache, pool in block_arrays(state.caches):
        taken = jnp.moveaxis(take_blocks(pool, ids.ravel(), cache), cache.k.ndim - 4, 0)
        by_dtype.setdefault(pool.dtype, []).append(taken.reshape(*ids.shape, -1))
    flat = [jnp.concatenate(parts, axis=2) for parts in by_dtype.values()]
    return with_serials(prefix_cache, where), [tuple(numbers[i] for numbers in flat) for i in range(len(ids))]


def put_in(state: State, inputs: tuple[jax.Array, ...], pages: list[Page]) -> tuple[State, jax.Array]:
    """Writes prompt blocks and inserts them into the prefix cache. They stay free, like blocks of a finished request.

    A prompt is skipped if the blocks before these are not cached, or if too few blocks are free. The state is donated.

    Returns:
        state: the new one.
        where: as `Run.where`.
    """
    tokens, numbers, rows, columns = inputs
    scheduler, allocator = state.scheduler, state.allocator
    prefixes, (salts, begins, ends) = scheduler.prefixes, numbers.T
    assert prefixes is not None
    seqs = allocator.of_seqs(jnp.full(len(tokens), scheduler.num_seqs, jnp.int32))  # empty sequences

    # 1. They begin with the cached blocks, which protects these from reuse, and get new blocks for the rest.
    matches, _ = prefixes.cache.find(seqs, tokens, ends, salts)
    seqs, _ = begin_with(seqs, matches)
    num_found = matches.num_found
    num_missing = jnp.where(num_found >= begins, ends - num_found, 0)
    seqs, _, ok = seqs.append(num_missing * seqs.block_size, q_len=columns.size * seqs.block_size)
    num_there = num_found + jnp.where(ok, num_missing, 0)

    # 2. The new blocks are written and inserted. Then all blocks are freed.
    is_new = (columns >= num_found[rows]) & (columns < num_there[rows])
    dropped = -1 - jnp.arange(columns.size, dtype=jnp.int32).reshape(columns.shape)
    ids = jnp.where(is_new, seqs.rows.at[rows, columns].get(mode="clip"), dropped)
    caches = write_pages(state.caches, pages, ids.ravel())
    cache, seqs, _ = prefixes.cache.insert_blocks(seqs, tokens, num_there, salts)
    is_there = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < num_there[:, None]
    where = jnp.where(is_there, seqs.rows[:, : tokens.shape[1]], 0)
    pool = seqs.free(jnp.ones(len(tokens), jnp.bool_)).pool
    state = dataclasses.replace(
        state,
        scheduler=dataclasses.replace(scheduler, prefixes=dataclasses.replace(prefixes, cache=cache)),
        allocator=dataclasses.replace(allocator, pool=pool),
        caches=caches,
    )
    return state, with_serials(cache, jnp.where(pool.is_cached(where), where, 0))


def with_serials(cache: PrefixCache, ids: jax.Array) -> jax.Array:
    return jnp.stack([ids, jnp.where(ids > 0, cache.cached.serials[ids], 0)])


def write_pages(caches: Any, pages: list[Page], ids: jax.Array) -> Any:
    """Writes pages that `take_out` copied to the blocks `ids`. Distinct ids below zero drop a block."""
    flat = {numbers[0].dtype: jnp.concatenate(numbers) for numbers in zip(*pages, strict=True)}

    def put(cache: KVCache, pool: jax.Array) -> jax.Array:
        axes = cache.k.ndim - 4
        taken, flat[pool.dtype] = jnp.split(flat[pool.dtype], [pool.size // pool.shape[axes]], axis=1)
        taken = taken.reshape(len(ids), *pool.shape[:axes], *pool.shape[axes + 1 :])
        return put_blocks(pool, jnp.moveaxis(taken, 0, axes), ids, cache)

    return map_pools(put, caches)
