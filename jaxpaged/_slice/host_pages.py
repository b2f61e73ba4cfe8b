"""Pages of the host tier: blocks of prompts copied out of the caches, and put back into them, in programs of their own.

A page is the keys and values of a few blocks in all caches.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged._allocator.prefix_cache import PrefixCache
from jaxpaged._allocator.prefix_match import begin_with
from jaxpaged._cache.kv_cache import KVCache, map_blocks
from jaxpaged._cache.transfer import put_blocks, take_blocks
from jaxpaged._slice.pytrees import caches_in
from jaxpaged._slice.state import State

Page = tuple[jax.Array, ...]  # the numbers of a few blocks in all caches, [blocks, numbers] of each dtype


def block_arrays(caches: Any) -> list[tuple[KVCache, jax.Array]]:
    """Each cache with each of its arrays that has a block axis."""
    found: list[tuple[KVCache, jax.Array]] = []

    def note(of: KVCache, pool: jax.Array) -> jax.Array:
        found.append((of, pool))
        return pool

    for each in caches_in(caches):
        map_blocks(functools.partial(note, each), each)
    return found


def take_out(state: State, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, list[Page]]:
    """`Run.where`, and copies of the blocks that are cached, each page in arrays of its own, so that it can leave and
    come back alone."""
    tokens, numbers, rows, columns = inputs
    assert state.scheduler.prefixes is not None
    cache = state.scheduler.prefixes.cache
    matches, _ = cache.find(state.allocator, tokens, numbers[:, 2], numbers[:, 0])
    where = jnp.where(matches.begin[:, 0], matches.ids[:, 0], 0)
    ids = where.at[rows, columns].get(mode="fill", fill_value=0)
    by_dtype: dict[Any, list[jax.Array]] = {}
    for of, pool in block_arrays(state.caches):
        taken = jnp.moveaxis(take_blocks(pool, ids.ravel(), of), of.k.ndim - 4, 0)
        by_dtype.setdefault(pool.dtype, []).append(taken.reshape(*ids.shape, -1))
    flat = [jnp.concatenate(parts, axis=2) for parts in by_dtype.values()]
    pages = [tuple(numbers[i] for numbers in flat) for i in range(len(ids))]
    return with_serials(cache, where), pages


def put_in(state: State, inputs: tuple[jax.Array, ...], pages: list[Page]) -> tuple[State, jax.Array]:
    """Lists blocks of prompts in the prefix cache again, and returns `Run.where`. They are free then, as those of a
    request that has ended.

    Nothing happens to a prompt if the blocks before them are not cached, or if fewer blocks are free. The state is
    donated.
    """
    tokens, numbers, rows, columns = inputs
    scheduler, allocator = state.scheduler, state.allocator
    prefixes, (salts, begins, ends) = scheduler.prefixes, numbers.T
    assert prefixes is not None
    seqs = allocator.of_seqs(jnp.full(len(tokens), scheduler.num_seqs, jnp.int32))  # empty ones

    # 1. They begin with what is cached, which is so kept from being overwritten, and get blocks for the rest.
    matches, _ = prefixes.cache.find(seqs, tokens, ends, salts)
    seqs, _ = begin_with(seqs, matches)
    num_found = matches.num_found
    num_missing = jnp.where(num_found >= begins, ends - num_found, 0)
    seqs, _, ok = seqs.append(num_missing * seqs.block_size, q_len=columns.size * seqs.block_size)
    num_there = num_found + jnp.where(ok, num_missing, 0)

    # 2. Those are written, listed, and given back.
    is_new = (columns >= num_found[rows]) & (columns < num_there[rows])
    dropped = -1 - jnp.arange(columns.size, dtype=jnp.int32).reshape(columns.shape)
    ids = jnp.where(is_new, seqs.rows.at[rows, columns].get(mode="clip"), dropped)
    caches = write_pages(state.caches, pages, ids.ravel())
    cache, seqs, _ = prefixes.cache.insert_blocks(seqs, tokens, num_there, salts)
    is_there = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < num_there[:, None]
    where = jnp.where(is_there, seqs.rows[:, : tokens.shape[1]], 0)
    pool = seqs.free(jnp.ones(len(tokens), jnp.bool_)).pool
    prefixes = dataclasses.replace(prefixes, cache=cache)
    scheduler, allocator = (
        dataclasses.replace(scheduler, prefixes=prefixes),
        dataclasses.replace(allocator, pool=pool),
    )
    state = dataclasses.replace(state, scheduler=scheduler, allocator=allocator, caches=caches)
    return state, with_serials(cache, jnp.where(pool.is_cached(where), where, 0))


def with_serials(cache: PrefixCache, ids: jax.Array) -> jax.Array:
    return jnp.stack([ids, jnp.where(ids > 0, cache.listing.serials[ids], 0)])


def write_pages(caches: Any, pages: list[Page], ids: jax.Array) -> Any:
    """The inverse of what `take_out` copies; ids below zero, distinct, drop a block."""
    flat = {numbers[0].dtype: jnp.concatenate(numbers) for numbers in zip(*pages, strict=True)}

    def put(of: KVCache, pool: jax.Array) -> jax.Array:
        axes = of.k.ndim - 4
        taken, flat[pool.dtype] = jnp.split(flat[pool.dtype], [pool.size // pool.shape[axes]], axis=1)
        taken = taken.reshape(len(ids), *pool.shape[:axes], *pool.shape[axes + 1 :])
        return put_blocks(pool, jnp.moveaxis(taken, 0, axes), ids, of)

    def put_all(of: KVCache) -> KVCache:
        return map_blocks(functools.partial(put, of), of)

    return jax.tree.map(put_all, caches, is_leaf=lambda x: isinstance(x, KVCache))
