"""Snapshots: whether going back is sound, pinning blocks, going back, and which blocks were freed after one."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpaged._allocator.block_pool import BlockPool
from jaxpaged._allocator.state import AllocatorState


def still_holds(allocator: AllocatorState, snapshot: AllocatorState) -> jax.Array:
    _check_sizes(allocator, snapshot)
    ids = snapshot.block_tables
    same = allocator.pool.generations[ids] == snapshot.pool.generations[ids]
    return (same | ~snapshot.is_entry(snapshot.lengths)).all()


def hold[S: AllocatorState](allocator: S, snapshot: S) -> tuple[S, jax.Array]:
    ok = still_holds(allocator, snapshot)
    entries = ok & snapshot.is_entry(snapshot.lengths)
    pool = allocator.pool.share(snapshot.block_tables, entries)
    return dataclasses.replace(allocator, pool=_pin(pool, snapshot.block_tables, entries, 1)), ok


def release[S: AllocatorState](allocator: S, snapshot: S) -> tuple[S, jax.Array]:
    _check_sizes(allocator, snapshot)
    ids, entries = snapshot.block_tables, snapshot.is_entry(snapshot.lengths)
    # Generations do not count: a restored allocator holds old pins of blocks whose tokens were dropped.
    # The pins are removed, and put back if there were too few: two updates of one array, each in place. Testing first
    # would need a copy as large as the pool.
    pool = _pin(allocator.pool, ids, entries, -1)
    ok = ((pool.pins[ids] >= 0) | ~entries).all()
    pool = _pin(pool, ids, entries & ~ok, 1).let_go(ids, entries & ok)
    return dataclasses.replace(allocator, pool=pool), ok


def restore[S: AllocatorState](allocator: S, snapshot: S) -> tuple[S, jax.Array]:
    ok = still_holds(allocator, snapshot)
    now, old = allocator.pool, snapshot.pool
    ids, num_blocks = snapshot.block_tables, snapshot.num_blocks

    # The full blocks of the snapshot's sequences have not changed. All other tokens are dropped: so no snapshot of the
    # states undone here stays sound.
    full = jnp.arange(ids.shape[1], dtype=jnp.int32)[None] < (snapshot.lengths // snapshot.block_size)[:, None]
    kept = jnp.zeros(num_blocks, jnp.bool_).at[jnp.where(full, ids, num_blocks)].set(True, mode="drop")
    generations = jnp.where(kept, old.generations, now.generations + 1)

    # A cached prefix is surely still there if its block was held all the time, or waited all the time.
    every_id = jnp.arange(num_blocks, dtype=jnp.int32)
    same = now.is_cached(every_id) & (now.generations == old.generations)
    same &= (now.cached_at == num_blocks) == (old.cached_at == num_blocks)
    cached_at = jnp.where(same, old.cached_at, -1)

    # Read everything before any of it is replaced, or XLA keeps copies to read from.
    ok, generations, cached_at = jax.lax.optimization_barrier((ok, generations, cached_at))
    pool = dataclasses.replace(old, generations=generations, cached_at=cached_at)
    restored = dataclasses.replace(snapshot, pool=pool)
    return jax.tree.map(lambda new, same: jnp.where(ok, new, same), restored, allocator), ok


def freed_since(allocator: AllocatorState, before: AllocatorState) -> jax.Array:
    _check_sizes(allocator, before)
    ids, pool = before.block_tables, allocator.pool
    let_go = before.is_entry(before.lengths) & (pool.generations[ids] != before.pool.generations[ids])
    return jnp.where(let_go & pool.is_free()[ids] & ~pool.is_cached(ids), ids, 0).ravel()


def _pin(pool: BlockPool, ids: jax.Array, entries: jax.Array, amount: int) -> BlockPool:
    pins = pool.pins.at[jnp.where(entries, ids, pool.num_blocks)].add(amount, mode="drop")
    return dataclasses.replace(pool, pins=pins)


def _check_sizes(allocator: AllocatorState, snapshot: AllocatorState) -> None:
    sizes, wanted = ((*x.block_tables.shape, x.num_blocks, x.block_size) for x in (snapshot, allocator))
    if sizes != wanted:
        raise ValueError(
            "a snapshot is an earlier state of the same allocator; got (seqs, max_blocks, num_blocks, block_size) = "
            f"{sizes} and {wanted}."
        )
