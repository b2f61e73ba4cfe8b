"""The prefix cache: reuses full blocks of equal prompt beginnings, inside `jax.jit`."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._allocator.block_pool import BlockPool
from jaxpaged._allocator.cached_blocks import BUCKETS, CachedBlocks, all_before
from jaxpaged._allocator.prefix_match import PrefixMatch, begin_with, longest_matches
from jaxpaged._debug import check_range
from jaxpaged._integers import checked_array, checked_size
from jaxpaged._one_program import one_program
from jaxpaged._public_state import public_state


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefixCache:
    """Finds full blocks of a `BlockAllocator` by their tokens, so that prompts with a common prefix share its blocks.

    Immutable. A prefix cache describes the pool of one allocator: use it only with that allocator and the allocators
    derived from it. It is a separate pytree, so that programs without it have no extra cost. It never reads or writes
    the `KVCache`.

    Attributes:
        cached: the cached blocks and their tokens.
        num_lookups: int32 `[]`, number of full blocks that `match_prefix` looked up, modulo 2^32.
        num_hits: int32 `[]`, number of full blocks that it found, modulo 2^32.

    Matches are exact. A hash only locates a block; the block's tokens, its salt and the serial of the preceding block
    are then compared. A hash collision causes at most a miss, never another sequence's tokens.

    Salts isolate tenants: a sequence finds only blocks that were inserted with its own salt, and blocks of other salts
    cannot hide them. Tenants share the hash table and the pool. With a random `secret`, a tenant cannot choose tokens
    that collide with another tenant's.

    A block stays cached while it is held, and afterwards until the allocator needs its space. The allocator hands out
    free blocks that are not cached first, then the least recently used cached blocks, the tail of a sequence before its
    head.

    With several layer groups, the blocks of the first group are looked up, and the blocks of the other groups are
    stored with them. A match ends at a position where every group has all blocks that its window shows.
    """

    cached: CachedBlocks
    num_lookups: jax.Array
    num_hits: jax.Array

    @classmethod
    def create(cls, *, num_blocks: int, block_size: int, secret: int = 0, num_groups: int = 1) -> PrefixCache:
        """Creates an empty prefix cache for an allocator of the same sizes.

        Args:
            num_blocks: blocks in the pool, including the null block.
            block_size: tokens per block.
            secret: key of the hashes, an int below 2^128. If tenants do not trust each other, use a random key,
                `secrets.randbits(128)`. The key does not change the matches. Call `create` outside of `jax.jit`, where
                the secret would become a constant of the program.
            num_groups: number of the allocator's layer groups.

        Raises:
            ValueError: a size is not an int, `num_blocks` is below 2 or needs a hash table of 2^31 buckets or more,
                `block_size` or `num_groups` is below 1, or `secret` is not from 0 to 2^128 - 1.

        Example:
            >>> import jax.numpy as jnp, jaxpaged
            >>> allocator = jaxpaged.BlockAllocator.create(num_blocks=8, block_size=2, num_seqs=2, max_blocks_per_seq=4)
            >>> prefix_cache = jaxpaged.PrefixCache.create(num_blocks=8, block_size=2)
            >>> prompts = jnp.array([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]])
            >>> allocator, slots, ok = allocator.append(jnp.array([5, 0]), q_len=5)  # the first prompt
            >>> prefix_cache, allocator = prefix_cache.insert(allocator, prompts)  # after its tokens are written
            >>> lengths = jnp.array([0, 5])  # the second prompt
            >>> prefix_cache, allocator, num_cached = prefix_cache.match_prefix(allocator, prompts, lengths)
            >>> num_cached.tolist(), allocator.block_tables.tolist()
            ([0, 4], [[1, 2, 3, 0], [1, 2, 0, 0]])
            >>> allocator, slots, ok = allocator.append(lengths - num_cached, q_len=5)  # the rest of the second prompt
        """
        num_blocks = checked_size("num_blocks", num_blocks, 2, 2**30 // BUCKETS)
        block_size = checked_size("block_size", block_size)
        num_groups = checked_size("num_groups", num_groups)
        if not 0 <= secret < 2**128:
            raise ValueError("secret must be from 0 to 2^128 - 1, as secrets.randbits(128) is; got another number.")
        words = [operator.index(secret) >> shift & 0xFFFFFFFF for shift in (0, 32, 64, 96)]
        return cls(
            cached=CachedBlocks.create(num_blocks, block_size, num_groups, words),
            num_lookups=jnp.zeros((), jnp.int32),
            num_hits=jnp.zeros((), jnp.int32),
        )

    @property
    def hit_rate(self) -> jax.Array:
        """`num_hits / num_lookups`, float32 `[]`; 0 before the first lookup."""
        return self.num_hits.astype(jnp.float32) / jnp.maximum(self.num_lookups, 1).astype(jnp.float32)

    def match_prefix(
        self, allocator: BlockAllocator, tokens: ArrayLike, lengths: ArrayLike, *, salts: ArrayLike | None = None
    ) -> tuple[PrefixCache, BlockAllocator, jax.Array]:
        """Starts sequences in empty rows with the cached blocks of their prompts.

        Only full blocks are shared. The last token of a prompt is never shared, because its logits are needed. Append
        the rest of each prompt with `append(lengths - num_cached, q_len=...)`. The same right-aligned `tokens` match
        the slots that `append` returns, where cached tokens have padding. If `append` refuses a row, the row keeps its
        cached blocks until `free`.

        Args:
            allocator: the allocator of the cached blocks.
            tokens: int32 `[seqs, width]`, each prompt right-aligned in its row.
            lengths: int32 `[seqs]`, length of each prompt in tokens; 0 leaves the row unchanged.
            salts: int32 `[seqs]`, only blocks inserted with the same salt are found. None: 0.

        Returns:
            prefix_cache: the new prefix cache, with new counts.
            allocator: the new allocator, in which each row holds the blocks found for it.
            num_cached: int32 `[seqs]`, number of cached tokens, a multiple of the block size. It is 0, and the row is
                unchanged, if nothing was found, the row is occupied, or the length is negative or above `width`.

        Raises:
            ValueError: an array has the wrong shape or dtype, or the allocator's sizes are not those of `create`.

        Example: see `create`.
        """
        tokens, salts = self._check(allocator, tokens, salts)
        lengths, width = allocator._rows("lengths", lengths), tokens.shape[1]
        check_range("lengths of match_prefix", lengths, 0, width, limit=f"{width=}")
        if width < allocator.block_size:
            return self, allocator, jnp.zeros_like(lengths)
        return self._match_prefix(allocator, tokens, lengths, salts)

    @one_program()
    def _match_prefix(
        self, allocator: BlockAllocator, tokens: jax.Array, lengths: jax.Array, salts: jax.Array
    ) -> tuple[PrefixCache, BlockAllocator, jax.Array]:
        legal = (lengths > 0) & (lengths <= tokens.shape[1]) & (allocator.lengths == 0)
        num_full = jnp.where(legal, (lengths - 1) // allocator.block_size, 0)
        matches, _ = self.find(allocator, _in_blocks(allocator, tokens, lengths), num_full, salts)
        allocator, num_cached = begin_with(allocator, matches)
        return self.count(matches), allocator, num_cached

    def insert(
        self, allocator: BlockAllocator, tokens: ArrayLike, *, salts: ArrayLike | None = None
    ) -> tuple[PrefixCache, BlockAllocator]:
        """Caches the full blocks of sequences. Call it after their keys and values are written.

        If a block with the same tokens, after the same prefix, is already cached, the sequence switches to the cached
        block and releases its own. So a prefix that several sequences computed at the same time is kept only once.

        If all buckets in which a block may be stored are in use, the block and the blocks after it in its sequence are
        not cached. With every block of the pool cached, this affects fewer than 1 block in 100,000.

        Args:
            allocator: the allocator of the sequences.
            tokens: int32 `[seqs, width]`, all tokens of each sequence, right-aligned. A sequence longer than `width` is
                not cached.
            salts: int32 `[seqs]`, as in `match_prefix`. None: 0.

        Returns:
            prefix_cache: the new prefix cache.
            allocator: the new allocator. Tables may name other blocks with the same tokens; lengths do not change.

        Raises:
            ValueError: an array has the wrong shape or dtype, or the allocator's sizes are not those of `create`.

        Example: see `create`.
        """
        tokens, salts = self._check(allocator, tokens, salts)
        if tokens.shape[1] < allocator.block_size:
            return self, allocator
        return self._insert(allocator, tokens, salts)

    @one_program()
    def _insert(
        self, allocator: BlockAllocator, tokens: jax.Array, salts: jax.Array
    ) -> tuple[PrefixCache, BlockAllocator]:
        lengths = allocator.lengths
        num_full = jnp.where(lengths <= tokens.shape[1], lengths // allocator.block_size, 0)
        return self.insert_blocks(allocator, _in_blocks(allocator, tokens, lengths), num_full, salts)[:2]

    def find(
        self, allocator: BlockAllocator, blocks: jax.Array, num_full: jax.Array, salts: jax.Array
    ) -> tuple[PrefixMatch, jax.Array]:
        """Finds the cached blocks with which sequences begin.

        Args:
            allocator: the allocator of the cached blocks.
            blocks: int32 `[seqs, columns, block_size]`, tokens of each sequence from its beginning, in full blocks.
            num_full: int32 `[seqs]`, number of blocks to look up.
            salts: int32 `[seqs]`.

        Returns:
            matches: the matches, one row per sequence.
            tags: uint32 `[seqs, columns]`, hash of each block and all blocks before it.
        """
        found = self.cached.look_up(allocator.pool, blocks, salts)
        there = all_before(_first_columns(num_full, blocks.shape[1]) & found.are_same)
        if allocator.windows == (None,):
            num_found = there.sum(axis=1, dtype=jnp.int32)
            return PrefixMatch(num_full, num_found, found.ids[:, None], there[:, None]), found.tags
        others, are_there = self.cached.companions_of(allocator.pool, found.ids)
        ids = jnp.concatenate([found.ids[None], others])
        are_there = jnp.concatenate([there[None], there[None] & are_there])
        return longest_matches(allocator, num_full, ids, are_there), found.tags

    def count(self, matches: PrefixMatch) -> PrefixCache:
        """Adds the lookups and hits of `matches` to the counts."""
        return dataclasses.replace(
            self,
            num_lookups=self.num_lookups + matches.num_asked.sum(dtype=jnp.int32),
            num_hits=self.num_hits + matches.num_found.sum(dtype=jnp.int32),
        )

    def insert_blocks(
        self, allocator: BlockAllocator, blocks: jax.Array, num_full: jax.Array, salts: jax.Array
    ) -> tuple[PrefixCache, BlockAllocator, jax.Array]:
        """Same as `insert` for the first `num_full` blocks of each row, with arguments as in `find`. Also returns the
        tags."""
        num_seqs, num_columns = blocks.shape[:2]
        is_full = _first_columns(num_full, num_columns)
        owns, are_own = _entries(allocator, num_columns)
        own, is_own = owns[0], are_own[0]
        found = self.cached.look_up(allocator.pool, blocks, salts)
        wanted = is_full & is_own & ~found.are_cached & ~allocator.pool.is_cached(own)
        cached, ids, are_cached, new = self.cached.add(found, own, wanted, is_full, blocks, salts)
        pool = allocator.pool.mark_cached(own, new)
        are_cached = all_before(are_cached & pool.is_cached(ids))
        allocator = _with_cached(allocator, pool, 0, own, ids, are_cached & is_own)
        if allocator.num_groups > 1:
            wanted = are_cached[None] & are_own[1:]
            cached, companions, new = cached.add_companions(allocator.pool, owns[1:], ids, wanted)
            own, ids, new, wanted = (x.reshape(-1, num_columns) for x in (owns[1:], companions, new, wanted))
            pool = allocator.pool.mark_cached(own, new)
            allocator = _with_cached(allocator, pool, num_seqs, own, ids, wanted)
        return dataclasses.replace(self, cached=cached), allocator, found.tags

    def clear(self, allocator: BlockAllocator) -> tuple[PrefixCache, BlockAllocator]:
        """Removes all blocks from the prefix cache, for example when the model's weights change.

        Sequences keep their blocks, and a later `insert` would cache these again, so first free the sequences that were
        computed with the old weights. The order of the free blocks and the counts of lookups and hits do not change.

        Args:
            allocator: the allocator of the cached blocks.

        Returns:
            prefix_cache: an empty prefix cache with the same secret.
            allocator: the new allocator. Going back to an older allocator does not restore the removed blocks.

        Raises:
            ValueError: the allocator's sizes are not those of `create`.

        Example:
            >>> import jax.numpy as jnp, jaxpaged
            >>> allocator = jaxpaged.BlockAllocator.create(num_blocks=8, block_size=2, num_seqs=1, max_blocks_per_seq=4)
            >>> prefix_cache = jaxpaged.PrefixCache.create(num_blocks=8, block_size=2)
            >>> allocator, slots, ok = allocator.append(jnp.array([5]), q_len=5)
            >>> prefix_cache, allocator = prefix_cache.insert(allocator, jnp.array([[1, 2, 3, 4, 5]]))
            >>> allocator = allocator.free(jnp.array([True]))
            >>> prefix_cache, allocator = prefix_cache.clear(allocator)
            >>> int(allocator.num_waiting), int(allocator.num_free)
            (0, 7)
        """
        self.check_sizes(allocator)
        allocator = dataclasses.replace(allocator, pool=allocator.pool.forget())
        return dataclasses.replace(self, cached=self.cached.clear()), allocator

    def check_sizes(self, allocator: BlockAllocator) -> None:
        sizes, wanted = self.cached.sizes, (allocator.num_blocks, allocator.block_size, allocator.num_groups)
        if sizes != wanted:
            raise ValueError(
                "a prefix cache must have its allocator's (num_blocks, block_size, num_groups); got "
                f"{sizes} for an allocator with {wanted}. Pass the allocator's sizes to PrefixCache.create."
            )

    def _check(self, allocator: BlockAllocator, tokens: Any, salts: Any) -> tuple[jax.Array, jax.Array]:
        self.check_sizes(allocator)
        num_seqs = len(allocator.lengths)
        tokens = checked_array("tokens", tokens, num_seqs, "width", which="a row for each sequence")
        return tokens, jnp.zeros(num_seqs, jnp.int32) if salts is None else allocator._rows("salts", salts)


def _entries(allocator: BlockAllocator, num_columns: int) -> tuple[jax.Array, jax.Array]:
    """The first columns of the tables, `[groups, seqs, columns]`, and which of these entries the rows hold."""
    shape = allocator.num_groups, -1, num_columns
    is_entry = allocator.is_entry(allocator.lengths)
    return tuple(x[:, :num_columns].reshape(shape) for x in (allocator.rows, is_entry))  # type: ignore[return-value]


def _in_blocks(allocator: BlockAllocator, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Cuts right-aligned tokens into blocks from each sequence's first token, `[seqs, columns, block_size]`."""
    width, block_size = tokens.shape[1], allocator.block_size
    num_columns = min(width // block_size, allocator.block_tables.shape[-1])
    position = jnp.arange(num_columns * block_size, dtype=jnp.int32)[None]
    index = jnp.clip(width - lengths[:, None] + position, 0, width - 1)
    return jnp.take_along_axis(tokens, index, axis=1).reshape(-1, num_columns, block_size)


def _first_columns(counts: jax.Array, num_columns: int) -> jax.Array:
    """Mask of the first `counts` columns of each row, bool `[rows, columns]`."""
    return jnp.arange(num_columns, dtype=jnp.int32)[None] < counts[:, None]


def _with_cached(
    allocator: BlockAllocator, pool: BlockPool, first: int, own: jax.Array, ids: jax.Array, wanted: jax.Array
) -> BlockAllocator:
    """Replaces the wanted blocks of rows with cached blocks that have the same tokens, and releases the old ones.

    Args:
        allocator: allocator whose tables change.
        pool: the allocator's pool, with marks of newly cached blocks.
        first: index of the first table row.
        own: int32 `[rows, columns]`, the first columns of these rows.
        ids: int32 `[rows, columns]`, cached blocks.
        wanted: bool `[rows, columns]`.
    """
    shared = wanted & (ids != own)
    pool = pool.acquire_cached(ids, shared).let_go(own, shared)
    tables = lax.dynamic_update_slice(allocator.rows, jnp.where(shared, ids, own), (first, 0))
    return allocator.with_rows(tables, allocator.lengths, pool)
