"""Copies of blocks to host memory and back, between slices."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpaged import _device
from jaxpaged._engine.on_mesh import whole_beside
from jaxpaged._engine.requests import CompletionState
from jaxpaged._engine.room import keep_room
from jaxpaged._integers import checked_size
from jaxpaged._slice.host_pages import Page, block_arrays, put_in, take_out
from jaxpaged._slice.options import ResolvedOptions
from jaxpaged._slice.state import State

# Copies of less than 4 MiB do not reach the bandwidth of the link, and each copy costs host time. [host_pages_h100]
PAGE_BYTES = 16 * 1024 * 1024  # [host_room_h100]
MOST_IN_PAGE = 8  # blocks, because the last page of a prompt is partly empty
MOVED_BYTES, MOVED_PAGES = 512 * 1024 * 1024, 32  # of the largest program; for 32 layers it compiles in 11 s
# Programs move 1/1, 1/4 and 1/16 of that, because the time of a program depends on its size, not on the pages used.
PARTS = 1, 4, 16  # [host_room_h100]
MOST_STAGED = 2  # times the largest program's pages, in transit to the device [host_room_h100]
MOST_LEAVING = 2  # times the largest program's pages, in transit to host memory
MOST_PROMPTS, MOST_TOKENS = 32, 2**18  # prompts in a program, and the tokens of these at their longest


@dataclasses.dataclass(eq=False)
class Run:
    """Consecutive pages of a prompt in transit. Pages begin at multiples of the blocks in a page.

    Attributes:
        row: the request, whose prompt includes its generated tokens here.
        salt: the salt of its prefixes.
        tokens: int32 `[columns, block_size]`, from the first token to the end of the run.
        keys: the keys of these blocks.
        begin: the first column that is moved.
        num_pages: the number of pages moved.
        pages: the pages in transit to the device, until they are in the caches; or those copied to host memory.
        is_sent: whether a run to the device belongs to a slice that was sent.
        where: int32 `[2, runs, columns]`: block ids and serial numbers of this and other runs on the device; 0: none.
        index: the index of this run in `where`.
        aux: the `aux` of the moved blocks, NumPy arrays `[blocks, block_size, ...]`. None without `prompt_aux`.
    """

    row: CompletionState
    salt: int
    tokens: np.ndarray
    keys: list[bytes]
    begin: int
    num_pages: int
    pages: list[Page] = dataclasses.field(default_factory=list)
    is_sent: bool = False
    where: Any = None
    index: int = 0
    aux: Any = None

    @property
    def moved(self) -> list[bytes]:
        return self.keys[self.begin :]

    @property
    def is_there(self) -> bool:
        return all(numbers.is_ready() for page in self.pages for numbers in page)  # type: ignore[attr-defined]


class HostCopies:
    """The programs that move pages. `take` and `put` must run on the engine's thread.

    Args:
        host_cache_bytes: size of the tier in host memory. It is allocated here, with room for pages in transit. On a
            GPU it is pinned, which needs up to a second per GiB.
        state: the engine's state.
        mesh: the mesh of the caches, if there are several devices.
        compiler_options: options of `jax.jit`.
    """

    def __init__(self, host_cache_bytes: int, state: State, mesh: Mesh | None, compiler_options: dict[str, Any]):
        scheduler, allocator = state.scheduler, state.allocator
        self.num_blocks, self.block_size = allocator.num_blocks, allocator.block_size
        max_model_len = scheduler.tokens.shape[1]
        assert scheduler.prefixes is not None  # see `check_host_tier`
        self.salts = np.asarray(scheduler.prefixes.salt).tolist()
        of_block = sum(pool.nbytes // self.num_blocks for _, pool in block_arrays(state.caches))
        # Blocks in a page: a power of two.
        self.in_page = min(1 << max(math.ceil(math.log2(PAGE_BYTES / of_block)), 0), MOST_IN_PAGE)
        self.page_bytes = self.in_page * of_block
        self.capacity = checked_size("host_cache_bytes", host_cache_bytes) // self.page_bytes
        if self.capacity < 1:
            raise ValueError(
                f"host_cache_bytes must be at least {self.page_bytes}, the bytes of a page; got {host_cache_bytes=}."
            )
        in_pool = -(-(self.num_blocks - 1) // self.in_page)
        self.num_pages = max(min(MOVED_BYTES // self.page_bytes, MOVED_PAGES, in_pool), 1)  # of the largest program
        self.most_staged, self.most_leaving = MOST_STAGED * self.num_pages, MOST_LEAVING * self.num_pages
        self.num_prompts = max(min(MOST_PROMPTS, MOST_TOKENS // max_model_len), 1)
        self._sizes = sorted({-(-self.num_pages // part) for part in PARTS})
        self._num_columns = max_model_len // self.block_size
        self._leaving: list[list[Page]] = []  # of the last `take`

        take, put = take_out, put_in
        if _device.is_gpu():  # a CUDA graph would be updated in each call, because the pages differ
            compiler_options = compiler_options | {"xla_gpu_enable_command_buffer": ""}
        self._on_device: Any = whole_beside(state.caches, mesh)
        if mesh is not None:
            self._on_device = NamedSharding(mesh, of_pages := P(None, mesh.axis_names))
            of_state = jax.tree.map(lambda x: x.sharding.spec, state)
            on_mesh: dict[str, Any] = dict(mesh=mesh, check_vma=False)
            take = jax.shard_map(take, in_specs=(of_state, P()), out_specs=(P(), of_pages), **on_mesh)
            put = jax.shard_map(put, in_specs=(of_state, P(), of_pages), out_specs=(of_state, P()), **on_mesh)
        self._on_host = self._on_device.with_memory_kind("pinned_host")
        jitted = jax.jit(take, compiler_options=compiler_options)
        to_take = [jitted.lower(state, self._inputs([], size)) for size in self._sizes]
        _, (page, *_) = to_take[0].out_info
        self._nothing: Page = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=self._on_device), page)
        in_place = jax.jit(put, donate_argnums=0, compiler_options=compiler_options)
        to_put = [in_place.lower(state, self._inputs([], size), [self._nothing] * size) for size in self._sizes]
        with ThreadPoolExecutor(4) as threads:
            compiled = [threads.map(lambda program: program.compile(), programs) for programs in (to_take, to_put)]
        self._take_out, self._put_in = (dict(zip(self._sizes, programs, strict=True)) for programs in compiled)
        pages = [jax.device_put(self._nothing, self._on_host) for _ in range(self.capacity + self.most_leaving)]
        jax.block_until_ready(pages)
        if _device.is_gpu():
            most = self.most_staged + self.most_leaving
            self._kept = keep_room(self._nothing, most, whole_beside(state.caches, mesh))

    def bring(self, pages: list[Page]) -> list[Page]:
        """Starts to copy pages to the device."""
        return jax.device_put(pages, self._on_device)

    def put(self, state: State, runs: Sequence[Run]) -> Iterator[State]:
        """Writes runs that are on the device into the caches. Yields new states, each donated to the next program."""
        for batch in self._batches(runs):
            pages = [page for run in batch for page in run.pages]
            size = self._size_for(batch)
            pages += [self._nothing] * (size - len(pages))
            state, where = self._put_in[size](state, self._inputs(batch, size), pages)
            self._record(batch, where, [[] for _ in batch])  # frees the pages
            yield state

    def take(self, state: State, runs: Sequence[Run]) -> None:
        """Starts to copy runs to host memory, after the copies of the last call have ended."""
        leaving, self._leaving = self._leaving, []
        jax.block_until_ready(leaving)  # an error is reported once
        for batch in self._batches(runs):
            size = self._size_for(batch)
            where, pages = self._take_out[size](state, self._inputs(batch, size))
            each = iter(pages)
            pages = [list(itertools.islice(each, run.num_pages)) for run in batch]
            self._record(batch, where, jax.device_put(pages, self._on_host))
        self._leaving = [run.pages for run in runs]

    def _record(self, batch: Sequence[Run], where: jax.Array, pages: Sequence[list[Page]]) -> None:
        where.copy_to_host_async()
        for i, run in enumerate(batch):
            run.where, run.index, run.pages = where, i, pages[i]

    def _batches(self, runs: Sequence[Run]) -> Iterator[list[Run]]:
        """Splits runs into batches, one per program. Runs that continue each other are in different batches, because a
        program looks up all of its runs before it moves any."""
        batch: list[Run] = []
        for run in runs:
            before = run.keys[run.begin - 1] if run.begin else None
            num_pages = run.num_pages + sum(other.num_pages for other in batch)
            is_full = num_pages > self.num_pages or len(batch) == self.num_prompts
            if batch and (is_full or any(before in other.moved for other in batch)):
                yield batch
                batch = []
            batch.append(run)
        if batch:
            yield batch

    def _size_for(self, batch: Sequence[Run]) -> int:
        """The pages of the smallest program with room for a batch."""
        return next(size for size in self._sizes if sum(run.num_pages for run in batch) <= size)

    def _inputs(self, runs: Sequence[Run], num_pages: int) -> tuple[np.ndarray, ...]:
        """The inputs of a program of `num_pages` pages.

        Returns:
            tokens: int32 `[prompts, columns, block_size]`.
            numbers: int32 `[prompts, 3]`: the salt, the first column to move, and the end of the columns to move.
            rows: int32 `[pages, 1]`, the prompt of each page.
            columns: int32 `[pages, blocks]`, the column of each block of each page; past the end: none.
        """
        num_prompts = min(self.num_prompts, num_pages)
        tokens = np.zeros((num_prompts, self._num_columns, self.block_size), np.int32)
        numbers, rows = np.zeros((num_prompts, 3), np.int32), np.zeros((num_pages, 1), np.int32)
        columns = np.full((num_pages, self.in_page), self._num_columns, np.int32)
        end = 0
        for i, run in enumerate(runs):
            begin, end = end, end + run.num_pages
            tokens[i, : len(run.tokens)] = run.tokens
            numbers[i] = run.salt, run.begin, len(run.keys)
            rows[begin:end] = i
            columns[begin:end].ravel()[:] = run.begin + np.arange(run.num_pages * self.in_page)
        return tokens, numbers, rows, columns


def check_host_tier(options: ResolvedOptions) -> None:
    """Raises `ValueError` if the options rule out a host tier."""
    max_model_len, block_size, windows = options.max_model_len, options.block_size, options.windows
    has_blocks = options.prefix_cache and max_model_len >= block_size and windows == (None,)
    if options.host_cache_bytes is not None and not has_blocks:
        raise ValueError(
            "host_cache_bytes keeps blocks of a prefix cache with one group of layers: pass prefix_cache=True, "
            f"a max_model_len of at least {block_size}, and no windows; got {max_model_len=}, {windows=}."
        )
