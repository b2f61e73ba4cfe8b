"""Changes of seats with a prefix cache: finished requests insert their blocks, new ones begin with cached blocks.

This costs a hundred small operations, so it runs only when it is due.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._allocator.prefix_match import PrefixMatch, begin_with
from jaxpaged._put import put
from jaxpaged._scheduler import planning
from jaxpaged._scheduler.arrays import first_marked, per_seat, rows_of
from jaxpaged._scheduler.state import Prefixes, SchedulerState

NOTHING_TO_INSERT = jnp.iinfo(jnp.int32).max


def after_commit(
    prefixes: Prefixes, allocator: BlockAllocator, seated: jax.Array, has_left: jax.Array, is_sampled: jax.Array
) -> Prefixes:
    """Records work for `change_seats`: rows of requests that left, and full blocks that others may be waiting for.

    Args:
        prefixes: the state before the commit.
        allocator: the allocator after the plan.
        seated: int32 `[seats]`, the request that was in each seat.
        has_left: bool `[seats]`.
        is_sampled: bool `[seats]`, whether all known tokens of the request are computed.
    """
    num_full = allocator.lengths // allocator.block_size
    return dataclasses.replace(
        prefixes,
        left=jnp.where(has_left, seated, prefixes.left),
        num_inserted=jnp.where(is_sampled | has_left, NOTHING_TO_INSERT, jnp.maximum(num_full, prefixes.num_inserted)),
        is_due=prefixes.is_due | has_left.any() | (num_full > prefixes.num_inserted).any(),
    )


def change_seats[S: SchedulerState](
    scheduler: S, prefixes: Prefixes, allocator: BlockAllocator
) -> tuple[S, BlockAllocator]:
    prefixes, allocator, tags = vacate(scheduler, prefixes, allocator)
    candidates, matches = ready(scheduler, prefixes, allocator, tags)
    num_woken = woken_by_each(allocator, matches)
    scheduler, entered = planning.give_seats(scheduler, allocator, candidates, matches.num_blocks, num_woken)
    matches = rows_of(matches, entered)
    allocator, num_cached = begin_with(allocator, matches)
    has_entered = entered < scheduler.num_seqs
    is_first = has_entered & (per_seat(scheduler, prefixes.num_found) < 0)
    salts = prefixes.salts_of(per_seat(scheduler, scheduler.sampling.adapter))
    prefixes = dataclasses.replace(
        prefixes,
        cache=prefixes.cache.count(matches),
        salts=jnp.where(has_entered, salts, prefixes.salts),
        num_inserted=jnp.where(has_entered, matches.num_found, prefixes.num_inserted),
        num_found=put(prefixes.num_found, scheduler.seated, is_first, num_cached),
        is_due=jnp.zeros_like(prefixes.is_due),
    )
    return dataclasses.replace(scheduler, prefixes=prefixes), allocator


def vacate(
    scheduler: SchedulerState, prefixes: Prefixes, allocator: BlockAllocator
) -> tuple[Prefixes, BlockAllocator, jax.Array]:
    """Adds full blocks to the prefix cache, then frees the blocks of requests that left. Also returns the tags (short
    hashes) of each seat's blocks."""
    num_requests = scheduler.max_requests
    has_left = prefixes.left < num_requests
    blocks = tokens_in_blocks(scheduler, allocator, jnp.where(has_left, prefixes.left, scheduler.seated))
    num_full = allocator.lengths // allocator.block_size
    cache, allocator, tags = prefixes.cache.insert_blocks(allocator, blocks, num_full, prefixes.salts)
    prefixes = dataclasses.replace(prefixes, cache=cache, left=jnp.full_like(prefixes.left, num_requests))
    return prefixes, allocator.free(has_left), tags


def ready(
    scheduler: SchedulerState, prefixes: Prefixes, allocator: BlockAllocator, tags: jax.Array
) -> tuple[jax.Array, PrefixMatch]:
    """The first waiting requests that need not wait for blocks of others, and the blocks found for each.

    The requests are int32 `[seats]`, padded with `max_requests`.
    """
    candidates = planning.first_waiting(scheduler)
    of_each = scheduler.num_known, prefixes.findable, scheduler.sampling.adapter
    num_known, findable, adapters = rows_of(of_each, candidates)
    num_asked = jnp.maximum(jnp.minimum(num_known - 1, findable), 0) // allocator.block_size
    blocks = tokens_in_blocks(scheduler, allocator, candidates)
    matches, new_tags = prefixes.cache.find(allocator, blocks, num_asked, prefixes.salts_of(adapters))
    waits = is_being_computed(scheduler, prefixes, allocator, candidates, matches, tags, new_tags)
    is_ready = (candidates < scheduler.max_requests) & ~waits

    num_seqs = scheduler.num_seqs
    every = jnp.arange(num_seqs, dtype=jnp.int32)
    order = first_marked(every, is_ready, size=num_seqs, fill_value=num_seqs)
    candidates = candidates.at[order].get(mode="fill", fill_value=scheduler.max_requests)
    return candidates, rows_of(matches, order)


def tokens_in_blocks(scheduler: SchedulerState, allocator: BlockAllocator, request_ids: jax.Array) -> jax.Array:
    """The requests' tokens in blocks, int32 `[requests, columns, block_size]`; arbitrary past the known tokens."""
    block_size = allocator.block_size
    num_columns = min(scheduler.tokens.shape[1] // block_size, allocator.block_tables.shape[-1])
    tokens = rows_of(scheduler.tokens, request_ids)
    return tokens[:, : num_columns * block_size].reshape(-1, num_columns, block_size)


def is_being_computed(
    scheduler: SchedulerState,
    prefixes: Prefixes,
    allocator: BlockAllocator,
    candidates: jax.Array,
    matches: PrefixMatch,
    tags: jax.Array,
    new_tags: jax.Array,
) -> jax.Array:
    """Whether a request earlier in rank computes the first block that a candidate lacks, bool `[seats]`.

    Args:
        scheduler: the scheduler, with the seated requests.
        prefixes: the blocks that these have inserted.
        allocator: for its block size.
        candidates: int32 `[seats]`, waiting requests.
        matches: the blocks that these have found.
        tags: uint32 `[seats, columns]`, tags of the tokens of seated requests.
        new_tags: uint32 `[seats, columns]`, tags of the candidates' tokens.
    """
    num_seqs, column = scheduler.num_seqs, matches.num_found
    lacks = (column < matches.num_asked)[None]
    others = jnp.concatenate([scheduler.seated, candidates])
    of_others = jnp.concatenate([tags, new_tags]).at[:, column].get(mode="clip")  # [others, candidates]
    its_own = new_tags.at[jnp.arange(num_seqs, dtype=jnp.int32), column].get(mode="clip")[None]
    num_inserted = jnp.concatenate([prefixes.num_inserted, jnp.zeros_like(column)])[:, None]
    num_full = (rows_of(scheduler.num_known, others) // allocator.block_size)[:, None]
    will_list = (num_inserted <= column[None]) & (column[None] < num_full)
    ranks = scheduler.ranks.at[others].get(mode="fill", fill_value=scheduler.max_requests)
    is_before = ranks[:, None] < ranks[None, num_seqs:]
    return (lacks & is_before & will_list & (of_others == its_own)).any(axis=0)


def woken_by_each(allocator: BlockAllocator, matches: PrefixMatch) -> jax.Array:
    """The free blocks that each match would hold and no earlier match holds, counted, int32 `[seats]`."""
    pool, ids = allocator.pool, matches.ids.reshape(len(matches.ids), -1)
    is_free = matches.begin.reshape(ids.shape) & (pool.cached_at[ids] != pool.num_blocks)
    order = jnp.broadcast_to(jnp.arange(len(ids), dtype=jnp.int32)[:, None], ids.shape)
    first = jnp.full(pool.num_blocks, len(ids), jnp.int32)
    first = first.at[jnp.where(is_free, ids, pool.num_blocks)].min(order, mode="drop")
    return (is_free & (first[ids] == order)).sum(axis=1, dtype=jnp.int32)
