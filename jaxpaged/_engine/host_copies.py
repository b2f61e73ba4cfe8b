"""Pages of cached blocks on their way to host memory and back: a program each way, between slices."""

import dataclasses
import functools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpaged import _device
from jaxpaged._allocator.block_pool import BlockPool
from jaxpaged._allocator.prefix_cache import PrefixCache, begin_with
from jaxpaged._cache.kv_cache import KVCache, map_blocks
from jaxpaged._cache.transfer import put_blocks, take_blocks
from jaxpaged._engine.inputs import caches_in
from jaxpaged._engine.state import State

Page = tuple[jax.Array, ...]  # the numbers of a few blocks in all caches, [blocks, numbers] of each dtype

PAGE_BYTES = 4 * 1024 * 1024  # a copy of less is not at the rate of the link [host_pages_h100]
MOST_IN_PAGE = 4  # blocks: what is listed at once may end anywhere in a page
MOVED_BYTES = 256 * 1024 * 1024  # by a program at most
MOST_STAGED, MOST_LEAVING = 2, 4  # times that, waiting on the device, and on their way from there
MOST_PROMPTS = 8  # whose blocks a program puts in


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive blocks of a prompt, on the device or on their way."""

    tokens: np.ndarray  # int32 [columns, block_size], of the prompt
    salt: int
    first: int  # column
    keys: list[bytes]  # from there on
    columns: np.ndarray  # int32 [pages, blocks], where in the prompt the blocks of each page are; -1: nowhere
    pages: list[Page]

    @property
    def is_there(self) -> bool:
        return all(numbers.is_ready() for page in self.pages for numbers in page)  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Blocks that are to be copied, in pages: see `in_pages`."""

    ids: np.ndarray  # int32 [pages, blocks]; 0: no block
    serials: np.ndarray  # int32 [pages, blocks]
    parents: np.ndarray  # int32 [pages], serials of the blocks before the first ones


@dataclasses.dataclass(frozen=True)
class Taken:
    """Pages of blocks that were wanted.

    Attributes:
        wanted: these.
        words: int32 `[pages, blocks, block_size + 2]`: of each block its tokens, its salt and its serial; 0: it was
            overwritten before.
        pages: on their way to host memory.
    """

    wanted: Wanted
    words: Any
    pages: list[Page]


class HostCopies:
    """The programs. All but `bring` are for the engine's own thread.

    Args:
        state: the engine's.
        mesh: of the caches, if they lie on several devices.
        compiler_options: for `jax.jit`.
    """

    def __init__(self, state: State, mesh: Mesh | None, *, compiler_options: dict[str, Any]):
        block_size, num_blocks = state.allocator.block_size, state.allocator.num_blocks
        self._prompts = MOST_PROMPTS, state.scheduler.tokens.shape[1] // block_size, block_size
        self._leaving: list[list[Page]] = []  # that were sent last
        self.in_page, self.page_bytes = page_size(state.caches)
        self.num_pages = max(min(MOVED_BYTES // self.page_bytes, -(-(num_blocks - 1) // self.in_page)), 1)  # at once
        self.most_staged, self.most_leaving = MOST_STAGED * self.num_pages, MOST_LEAVING * self.num_pages
        take, put = take_out, put_in
        if _device.is_gpu():  # other arrays come with each call: a CUDA graph would have to be changed for each
            compiler_options = compiler_options | {"xla_gpu_enable_command_buffer": ""}
        (device, *_) = caches_in(state.caches)[0].k.sharding.device_set
        self._on_device: Any = SingleDeviceSharding(device)
        if mesh is not None:
            self._on_device = NamedSharding(mesh, P(None, mesh.axis_names))
            of_state, of_caches = (jax.tree.map(lambda x: x.sharding.spec, tree) for tree in (state, state.caches))
            of_pages = P(None, mesh.axis_names)
            on_mesh: dict[str, Any] = dict(mesh=mesh, check_vma=False)
            take = jax.shard_map(take, in_specs=(P(), P(), of_caches, P()), out_specs=(P(), of_pages), **on_mesh)
            in_specs = (of_state, P(), P(), P(), P(), of_pages)
            put = jax.shard_map(put, in_specs=in_specs, out_specs=(of_state, P()), **on_mesh)
        self._on_host = self._on_device.with_memory_kind("pinned_host")

        assert state.scheduler.prefixes is not None
        taken_from = state.scheduler.prefixes.cache, state.allocator.pool, state.caches
        take = jax.jit(take, compiler_options=compiler_options)
        counts = sorted({max(self.num_pages // 8, 1), self.num_pages})
        lowered = [take.lower(*taken_from, np.zeros((count, self.in_page), np.int32)) for count in counts]
        _, pages = lowered[0].out_info
        self._nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=self._on_device), pages[0])
        put = jax.jit(put, donate_argnums=0, compiler_options=compiler_options)
        lowered.append(put.lower(state, *self._inputs([])))
        with ThreadPoolExecutor(len(lowered)) as threads:
            *compiled, self._put_in = threads.map(lambda program: program.compile(), lowered)
        self._take_out = dict(zip(counts, compiled, strict=True))  # by how many pages

    def reserve(self, capacity: int) -> None:
        """Has JAX take host memory for so many pages, and those that leave meanwhile: on a GPU that takes up to a
        second a GiB, because it is pinned. JAX keeps what is given back to it."""
        jax.block_until_ready(
            [jax.device_put([self._nothing], self._on_host) for _ in range(capacity + self.most_leaving)]
        )

    def bring(self, pages: list[Page]) -> list[Page]:
        """Begins to copy pages to the device."""
        return jax.device_put(pages, self._on_device)

    def put(self, state: State, pieces: list[Piece]) -> tuple[State, tuple[list[Piece], Any]]:
        """The state with the blocks of pieces, and for `Moves` where they are. The state is donated.

        Args:
            state: the engine's.
            pieces: of `MOST_PROMPTS` prompts at most, one of each, with `num_pages` pages at most.
        """
        state, where = self._put_in(state, *self._inputs(pieces))
        where.copy_to_host_async()
        for piece in pieces:
            piece.pages.clear()  # their memory is free once they are put in
        return state, (pieces, where)

    def _inputs(self, pieces: list[Piece]) -> tuple[Any, ...]:
        """Of `put_in`, behind the state."""
        tokens, numbers = np.zeros(self._prompts, np.int32), np.zeros((MOST_PROMPTS, 3), np.int32)
        columns, rows = np.full((self.num_pages, self.in_page), -1, np.int32), np.zeros(self.num_pages, np.int32)
        pages = list[Page]()
        for i, piece in enumerate(pieces):
            tokens[i, : len(piece.tokens)] = piece.tokens
            numbers[i] = piece.salt, piece.first, piece.first + len(piece.keys)
            of_piece = slice(len(pages), len(pages) + len(piece.pages))
            columns[of_piece], rows[of_piece] = piece.columns, i
            pages += piece.pages
        return tokens, numbers, columns, rows, pages + [self._nothing] * (self.num_pages - len(pages))

    def take(self, state: State, wanted: Wanted) -> list[Taken]:
        """Begins to copy blocks to host memory, once those before are there: the others wait on the device."""
        assert state.scheduler.prefixes is not None
        jax.block_until_ready(self._leaving)
        taken = []
        for begin in range(0, len(wanted.ids), self.num_pages):
            end = begin + self.num_pages
            these = Wanted(wanted.ids[begin:end], wanted.serials[begin:end], wanted.parents[begin:end])
            count = min(count for count in self._take_out if count >= len(these.ids))
            padded = np.pad(these.ids, ((0, count - len(these.ids)), (0, 0)))
            taken_from = state.scheduler.prefixes.cache, state.allocator.pool, state.caches
            words, pages = self._take_out[count](*taken_from, padded)
            words.copy_to_host_async()
            taken.append(Taken(these, words, jax.device_put(pages[: len(these.ids)], self._on_host)))
        self._leaving = [these.pages for these in taken]
        return taken


def in_pages(ids: np.ndarray, serials: np.ndarray, parents: np.ndarray, in_page: int) -> np.ndarray:
    """Blocks in pages, int32 `[pages, in_page]`, those listed first first. In a page each is the parent of the next.

    0 stands behind the last block of a page that is not full.

    Args:
        ids: int `[ids]`, of listed blocks.
        serials: int32 `[blocks]`.
        parents: int32 `[blocks]`, their serials.
        in_page: blocks in a page.
    """
    ids = ids[np.argsort(serials[ids])]
    order = np.arange(len(ids))
    is_first = np.ones(len(ids), np.bool_)
    is_first[1:] = parents[ids[1:]] != serials[ids[:-1]]
    nth = order - np.maximum.accumulate(np.where(is_first, order, 0))  # in its row of parents and children
    page = np.cumsum(nth % in_page == 0) - 1
    pages = np.zeros((page[-1] + 1 if len(ids) else 0, in_page), np.int32)
    pages[page, nth % in_page] = ids
    return pages


def take_out(cache: PrefixCache, pool: BlockPool, caches: Any, ids: jax.Array) -> tuple[jax.Array, list[Page]]:
    """Copies of blocks, int32 `[pages, blocks]`, each page in arrays of its own, so that it can leave and come back
    alone; and for `Taken` their words."""
    num_pages, in_page = ids.shape
    serials = jnp.where(pool.is_cached(ids), cache.serials[ids], 0)
    words = jnp.concatenate([cache.tokens[ids], cache.salts[ids][..., None], serials[..., None]], axis=2)
    by_dtype: dict[Any, list[jax.Array]] = {}

    def take(of: KVCache, pool: jax.Array) -> jax.Array:
        axes = of.k.ndim - 4
        taken = jnp.moveaxis(take_blocks(pool, ids.ravel(), of), axes, 0).reshape(num_pages, in_page, -1)
        by_dtype.setdefault(pool.dtype, []).append(taken)
        return pool

    for each in caches_in(caches):
        map_blocks(functools.partial(take, each), each)
    flat = [jnp.concatenate(parts, axis=2) for parts in by_dtype.values()]
    return words, [tuple(numbers[i] for numbers in flat) for i in range(num_pages)]


def put_in(
    state: State, tokens: jax.Array, numbers: jax.Array, columns: jax.Array, rows: jax.Array, pages: list[Page]
) -> tuple[State, jax.Array]:
    """Lists blocks of prompts in the prefix cache again. They are free then, as those of a request that has ended.

    Nothing happens to a prompt if the blocks before them are not cached, or if fewer blocks are free.

    Args:
        state: donated.
        tokens: int32 `[prompts, columns, block_size]`, in blocks.
        numbers: int32 `[prompts, 3]`: the salt under which they were found, the column of the first one that counts,
            and the column behind the last; three times 0: no prompt.
        columns: int32 `[pages, blocks]`, of each block of each page; -1: it does not count.
        rows: int32 `[pages]`, the prompt of each page.
        pages: from `take_out`.

    Returns:
        state: the new one.
        where: int32 `[2, pages, blocks]`: the block that has each column now, and its serial; 0: none has.
    """
    scheduler, allocator = state.scheduler, state.allocator
    prefixes, (salts, first, num_full) = scheduler.prefixes, numbers.T
    assert prefixes is not None
    seqs = allocator.of_seqs(jnp.full(len(tokens), scheduler.num_seats, jnp.int32))  # empty ones

    # 1. They begin with what is cached, which is so kept from being overwritten, and get blocks for the rest.
    beginnings, _ = prefixes.cache.find(seqs, tokens, num_full, salts)
    seqs, _ = begin_with(seqs, beginnings)
    num_found = beginnings.num_found
    num_missing = jnp.where(num_found >= first, num_full - num_found, 0)
    seqs, _, ok = seqs.append(num_missing * seqs.block_size, q_len=columns.size * seqs.block_size)
    num_there = num_found + jnp.where(ok, num_missing, 0)

    # 2. Those are written, listed, and given back.
    rows = rows[:, None]
    counts = (columns >= 0) & (columns < num_there[rows])
    is_new = counts & (columns >= num_found[rows])
    dropped = -1 - jnp.arange(columns.size, dtype=jnp.int32)
    ids = jnp.where(is_new, seqs.rows[rows, columns], dropped.reshape(columns.shape))
    caches = write_pages(state.caches, pages, ids.ravel())
    cache, seqs, _ = prefixes.cache.insert_blocks(seqs, tokens, num_there, salts)
    ids = jnp.where(counts, seqs.rows[rows, columns], 0)
    seqs = seqs.free(jnp.ones(len(tokens), jnp.bool_))
    serials = jnp.where((ids > 0) & seqs.pool.is_cached(ids), cache.serials[ids], 0)
    prefixes = dataclasses.replace(prefixes, cache=cache)
    state = dataclasses.replace(
        state,
        scheduler=dataclasses.replace(scheduler, prefixes=prefixes),
        allocator=dataclasses.replace(allocator, pool=seqs.pool),
        caches=caches,
    )
    return state, jnp.stack([ids, serials])


def write_pages(caches: Any, pages: list[Page], ids: jax.Array) -> Any:
    """The inverse of `take_out`; ids below zero, distinct, drop a block."""
    flat = {numbers[0].dtype: jnp.concatenate(numbers) for numbers in zip(*pages, strict=True)}
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


def page_size(caches: Any) -> tuple[int, int]:
    """Blocks in a page, a power of two: as many as make a large copy, but few. And its bytes, in all caches and on all
    devices together."""
    of_block = 0

    def count(of: KVCache, pool: jax.Array) -> jax.Array:
        nonlocal of_block
        of_block += pool.nbytes // of.k.shape[-4]
        return pool

    for each in caches_in(caches):
        map_blocks(functools.partial(count, each), each)
    in_page = min(1 << max(math.ceil(math.log2(PAGE_BYTES / of_block)), 0), MOST_IN_PAGE)
    return in_page, in_page * of_block
