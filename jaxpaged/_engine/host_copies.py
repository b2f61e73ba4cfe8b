"""Cached blocks on their way to host memory and back: a program each way, between slices."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpaged._allocator.prefix_cache import PrefixCache, begin_with
from jaxpaged._cache.kv_cache import KVCache, map_blocks
from jaxpaged._cache.transfer import put_blocks, take_blocks
from jaxpaged._engine.inputs import caches_in
from jaxpaged._engine.interrupts import without_interrupts
from jaxpaged._engine.slices import Report, State
from jaxpaged._integers import checked_size

Block = tuple[jax.Array, ...]  # its numbers in all caches, an array for each dtype
AT_ONCE = 64  # blocks that a program moves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Listed:
    """What the prefix cache knows of blocks, a row for each; see `PrefixCache`."""

    tokens: jax.Array  # int32 [ids, block_size]
    serials: jax.Array  # int32 [ids]
    parents: jax.Array  # int32 [ids]
    salts: jax.Array  # int32 [ids]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive blocks of a prompt, on the device or on their way."""

    tokens: np.ndarray  # int32 [columns, block_size], of the prompt
    salt: int
    first: int  # column
    keys: list[bytes]
    blocks: list[Block]

    @property
    def is_there(self) -> bool:
        return all(numbers.is_ready() for block in self.blocks for numbers in block)  # type: ignore[attr-defined]


@dataclasses.dataclass
class Moved:
    """What was moved before and behind a slice.

    Attributes:
        put: pieces, and for each block where it is now, and its serial there; 0: nowhere.
        taken: of each block its tokens, its serial and its parent's, its salt, and its numbers in host memory.
        serials: int32 `[blocks]`, of the blocks that are cached behind the slice; 0: it is not.
        salts: under which prompts are looked up behind the slice, without an adapter and with each.
    """

    put: list[tuple[Piece, Any, Any]] = dataclasses.field(default_factory=list)
    taken: list[Any] = dataclasses.field(default_factory=list)
    serials: Any = None
    salts: Any = None


class HostCopies:
    """The programs, and what they moved, on the engine's own thread.

    Args:
        state: the engine's.
        mesh: of the caches, if they lie on several devices.
        most_staged: the most blocks on their way to host memory.
        compiler_options: for `jax.jit`.
    """

    def __init__(self, state: State, mesh: Mesh | None, *, most_staged: int, compiler_options: dict[str, Any]):
        block_size, max_length = state.allocator.block_size, state.scheduler.tokens.shape[1]
        self.at_once = min(AT_ONCE, state.allocator.num_blocks - 1)
        self._most_staged = most_staged
        take, put = take_out, put_in
        (device, *_) = caches_in(state.caches)[0].k.sharding.device_set
        self._on_device: Any = SingleDeviceSharding(device)
        if mesh is not None:
            self._on_device = NamedSharding(mesh, P(mesh.axis_names))
            of_state, of_caches = (jax.tree.map(lambda x: x.sharding.spec, tree) for tree in (state, state.caches))
            of_blocks = P(mesh.axis_names)
            on_mesh: dict[str, Any] = dict(mesh=mesh, check_vma=False)
            take = jax.shard_map(take, in_specs=(P(), of_caches, P()), out_specs=(P(), of_blocks), **on_mesh)
            in_specs = (of_state, P(), P(), P(), P(), of_blocks)
            put = jax.shard_map(put, in_specs=in_specs, out_specs=(of_state, P()), **on_mesh)
        self._on_host = self._on_device.with_memory_kind("pinned_host")

        ids, number = np.zeros(self.at_once, np.int32), np.zeros((), np.int32)
        self._tokens = np.zeros((max_length // block_size, block_size), np.int32)
        assert state.scheduler.prefixes is not None
        taken_from = state.scheduler.prefixes.cache, state.caches
        self._take_out = jax.jit(take, compiler_options=compiler_options).lower(*taken_from, ids).compile()
        _, blocks = jax.eval_shape(take, *taken_from, ids)
        self._nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=self._on_device), blocks[0])
        put = jax.jit(put, donate_argnums=0, compiler_options=compiler_options)
        blocks = [self._nothing] * self.at_once
        self._put_in = put.lower(state, self._tokens, number, number, number, blocks).compile()
        self._known = np.zeros(state.allocator.num_blocks, np.int32)  # serials whose blocks are on the host

    def bring(self, blocks: list[Block]) -> list[Block]:
        """Begins to copy blocks to the device."""
        return jax.device_put(blocks, self._on_device)

    def put(self, state: State, piece: Piece) -> tuple[State, tuple[Piece, Any, Any]]:
        """The state with the blocks of a piece, and for `Moved` where they are. The state is donated."""
        tokens = self._tokens.copy()
        tokens[: len(piece.tokens)] = piece.tokens
        num_blocks = len(piece.blocks)
        blocks = piece.blocks + [self._nothing] * (self.at_once - num_blocks)
        numbers = (np.int32(number) for number in (piece.salt, piece.first, piece.first + num_blocks))
        state, (ids, serials) = self._put_in(state, tokens, *numbers, blocks)
        return state, (piece, ids, serials)

    def take(self, state: State, report: Report, put: list[tuple[Piece, Any, Any]]) -> Moved:
        """Takes copies of what a slice has listed out of the pool. `report`: in NumPy's arrays."""
        assert state.scheduler.prefixes is not None
        put = [(piece, np.asarray(ids), np.asarray(serials)) for piece, ids, serials in put]
        moved = Moved(put, serials=np.asarray(report.serials), salts=np.asarray(report.salts).tolist())
        for _, ids, serials in put:
            self._known[ids] = serials
        (new,) = np.nonzero((moved.serials > 0) & (moved.serials != self._known))
        for begin in range(0, len(new), self.at_once):
            ids = new[begin : begin + self.at_once].astype(np.int32)
            padded = np.pad(ids, (0, self.at_once - len(ids)))
            listed, blocks = self._take_out(state.scheduler.prefixes.cache, state.caches, padded)
            moved.taken.append((listed, blocks[: len(ids)]))
            if begin >= self._most_staged:  # not more at once: these are gone before the next slice
                moved.taken[-1] = listed, jax.block_until_ready(self.send(blocks[: len(ids)]))
        self._known = moved.serials.copy()
        return moved

    @without_interrupts()  # of which JAX makes other errors in here
    def send(self, blocks: list[Block]) -> list[Block]:
        """Begins to copy blocks to host memory."""
        return jax.device_put(blocks, self._on_host)

    def read(self, moved: Moved) -> Moved:
        """The same in NumPy's arrays, with a tuple for each block that was taken, on its way to host memory."""
        taken: list[Any] = []
        for listed, blocks in moved.taken:
            numbers = (np.asarray(x).tolist() for x in (listed.serials, listed.parents, listed.salts))
            taken += zip(np.asarray(listed.tokens), *numbers, self.send(blocks), strict=False)
        return dataclasses.replace(moved, taken=taken)


def take_out(cache: PrefixCache, caches: Any, ids: jax.Array) -> tuple[Listed, list[Block]]:
    """Copies of blocks, int32 `[ids]`, of one array or few each, so that each can leave and come back alone."""
    listed = Listed(cache.tokens[ids], cache.serials[ids], cache.parents[ids], cache.salts[ids])
    by_dtype: dict[Any, list[jax.Array]] = {}

    def take(of: KVCache, pool: jax.Array) -> jax.Array:
        axes = of.k.ndim - 4
        taken = jnp.moveaxis(take_blocks(pool, ids, of), axes, 0).reshape(len(ids), -1)
        by_dtype.setdefault(pool.dtype, []).append(taken)
        return pool

    for each in caches_in(caches):
        map_blocks(functools.partial(take, each), each)
    flat = [jnp.concatenate(parts, axis=1) for parts in by_dtype.values()]
    return listed, [tuple(numbers[i] for numbers in flat) for i in range(len(ids))]


def put_in(
    state: State, tokens: jax.Array, salt: jax.Array, first: jax.Array, num_full: jax.Array, blocks: list[Block]
) -> tuple[State, tuple[jax.Array, jax.Array]]:
    """Lists blocks of one prompt in the prefix cache again. They are free then, as those of a request that has ended.

    Nothing happens if the blocks before them are not cached, or if fewer blocks are free.

    Args:
        state: donated.
        tokens: int32 `[columns, block_size]`, the prompt in blocks.
        salt: int32 `[]`, under which they were found.
        first: int32 `[]`, the column of `blocks[0]`.
        num_full: int32 `[]`, the column behind the last one that counts.
        blocks: from `take_out`; behind the last one that counts, any.

    Returns:
        state: the new one.
        (ids, serials): int32 `[len(blocks)]`, where each block is now and its serial; 0: it is not cached.
    """
    scheduler, allocator = state.scheduler, state.allocator
    prefixes = scheduler.prefixes
    assert prefixes is not None
    row = allocator.of_seqs(jnp.full(1, scheduler.num_seats, jnp.int32))  # an empty one
    in_row, salts = tokens[None], salt[None]

    # 1. The row begins with what is cached, which is so kept from being overwritten, and gets blocks for the rest.
    beginnings, _ = prefixes.cache.find(row, in_row, num_full[None], salts)
    row, _ = begin_with(row, beginnings)
    (num_found,) = beginnings.num_found
    num_missing = jnp.where(num_found >= first, num_full - num_found, 0)
    row, _, (ok,) = row.append(num_missing[None] * row.block_size, q_len=len(blocks) * row.block_size)
    num_there = num_found + jnp.where(ok, num_missing, 0)

    # 2. Those are written, listed, and given back.
    columns = first + jnp.arange(len(blocks), dtype=jnp.int32)
    is_new = (columns >= num_found) & (columns < num_there)
    ids = row.rows[0].at[columns].get(mode="fill", fill_value=0)
    caches = write_blocks(state.caches, blocks, jnp.where(is_new, ids, -1 - jnp.arange(len(blocks), dtype=jnp.int32)))
    cache, row, _ = prefixes.cache.insert_blocks(row, in_row, num_there[None], salts)
    ids = jnp.where(columns < num_there, row.rows[0].at[columns].get(mode="fill", fill_value=0), 0)
    row = row.free(jnp.ones(1, jnp.bool_))
    serials = jnp.where((ids > 0) & row.pool.is_cached(ids), cache.serials[ids], 0)
    prefixes = dataclasses.replace(prefixes, cache=cache)
    state = dataclasses.replace(
        state,
        scheduler=dataclasses.replace(scheduler, prefixes=prefixes),
        allocator=dataclasses.replace(allocator, pool=row.pool),
        caches=caches,
    )
    return state, (ids, serials)


def write_blocks(caches: Any, blocks: list[Block], ids: jax.Array) -> Any:
    """The inverse of `take_out`; ids below zero, distinct, drop a block."""
    flat = {numbers[0].dtype: jnp.stack(numbers) for numbers in zip(*blocks, strict=True)}
    used = dict.fromkeys(flat, 0)

    def put(of: KVCache, pool: jax.Array) -> jax.Array:
        axes = of.k.ndim - 4
        layers, block = pool.shape[:axes], pool.shape[axes + 1 :]
        size = pool.size // pool.shape[axes]
        begin = used[pool.dtype]
        used[pool.dtype] = begin + size
        taken = flat[pool.dtype][:, begin : begin + size].reshape(len(ids), *layers, *block)
        return put_blocks(pool, jnp.moveaxis(taken, 0, axes), ids, of)

    return jax.tree.map(
        lambda each: map_blocks(functools.partial(put, each), each), caches, is_leaf=lambda x: isinstance(x, KVCache)
    )


def block_bytes(caches: Any) -> int:
    """Bytes of a block in all caches, on all devices together."""
    size = 0

    def count(of: KVCache, pool: jax.Array) -> jax.Array:
        nonlocal size
        size += pool.nbytes // of.k.shape[-4]
        return pool

    for each in caches_in(caches):
        map_blocks(functools.partial(count, each), each)
    return size


def host_capacity(host_cache_bytes: int, state: State, windows: tuple[int | None, ...]) -> int:
    """The blocks that host memory of so many bytes holds."""
    if state.scheduler.prefixes is None:
        raise ValueError("host memory keeps blocks of the prefix cache: pass prefix_cache=True with host_cache_bytes.")
    if windows != (None,):
        raise ValueError(f"host_cache_bytes takes one group of layers; got {windows=}. Leave one of them out.")
    size = block_bytes(state.caches)
    if (capacity := checked_size("host_cache_bytes", host_cache_bytes) // size) < 1:
        raise ValueError(f"host_cache_bytes must hold a block, of {size} bytes; got {host_cache_bytes=}.")
    return capacity
