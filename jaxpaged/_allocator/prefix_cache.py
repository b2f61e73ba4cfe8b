"""The prefix cache: full blocks found again by their tokens and all tokens before them, inside jit."""

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
from jaxpaged._allocator.listing import BUCKETS, Listing, all_before
from jaxpaged._allocator.prefix_match import PrefixMatch, begin_with, longest_matches
from jaxpaged._debug import check_range
from jaxpaged._integers import checked_array, checked_size
from jaxpaged._one_program import one_program
from jaxpaged._public_state import public_state


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefixCache:
    """The tokens in full blocks of a `BlockAllocator`'s pool, so that other prompts can share the blocks. Immutable.

    It is a pytree of its own, so that a program without it pays nothing. It describes the pool of one
    allocator: use one prefix cache with that allocator and the allocators that follow from it.

    Attributes:
        listing: which blocks are cached, with which tokens.
        num_lookups: int32 `[]`, full blocks that `match_prefix` looked up; modulo 2^32, as is `num_hits`.
        num_hits: int32 `[]`, full blocks that it found.

    With several groups of layers the blocks of the first group are looked up, and the others go with them. A match
    ends where each group has all blocks that its window shows there.

    A match is exact. The hashes only say where to look. The block found there is compared token by token, with its
    salt and with the serial of the block matched before it, so that a collision never serves another sequence's tokens.
    It costs at most a miss.

    Salts keep tenants apart. A sequence finds only blocks inserted under its own salt, and a lookup passes over the
    blocks of other salts, whatever their hashes. Tenants share the buckets of the table and the blocks of the pool.
    With a random `secret`, a tenant who chooses tokens cannot aim at another's buckets: see `chain_hashes`.

    A block stays cached while it is held, and after that until its space is needed. Free blocks that are not cached are
    handed out first, then the cached ones unused longest, of a sequence the tail before the head. Nothing here reads or
    writes the `KVCache`.
    """

    listing: Listing
    num_lookups: jax.Array
    num_hits: jax.Array

    @classmethod
    def create(cls, *, num_blocks: int, block_size: int, secret: int = 0, num_groups: int = 1) -> PrefixCache:
        """An empty one for an allocator of `num_blocks` blocks of `block_size` tokens.

        Args:
            num_blocks: blocks in the pool, the null block included.
            block_size: tokens in a block.
            secret: the key of the hashes, below 2^128. Tenants who do not trust each other need a random one:
                `secrets.randbits(128)`. It does not change what is found. Call `create` outside of `jit`: traced, the
                number is a constant of the program.
            num_groups: the allocator's groups of layers.

        Raises:
            ValueError: `num_blocks` below 2, `block_size` or `num_groups` below 1, a table of 2^31 buckets and more, or
                a `secret` below 0 or from 2^128 on.

        Example:
            >>> import jax.numpy as jnp, jaxpaged
            >>> allocator = jaxpaged.BlockAllocator.create(num_blocks=8, block_size=2, num_seqs=2, max_blocks_per_seq=4)
            >>> prefix_cache = jaxpaged.PrefixCache.create(num_blocks=8, block_size=2)
            >>> prompts = jnp.array([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]])
            >>> allocator, slots, ok = allocator.append(jnp.array([5, 0]), q_len=5)  # the first prompt, and ...
            >>> prefix_cache, allocator = prefix_cache.insert(allocator, prompts)  # ... once its tokens are written
            >>> lengths = jnp.array([0, 5])  # the second
            >>> prefix_cache, allocator, num_cached = prefix_cache.match_prefix(allocator, prompts, lengths)
            >>> num_cached.tolist(), allocator.block_tables.tolist()
            ([0, 4], [[1, 2, 3, 0], [1, 2, 0, 0]])
            >>> allocator, slots, ok = allocator.append(lengths - num_cached, q_len=5)  # the rest of it
        """
        num_blocks = checked_size("num_blocks", num_blocks, 2, 2**30 // BUCKETS)
        block_size = checked_size("block_size", block_size)
        num_groups = checked_size("num_groups", num_groups)
        if not 0 <= secret < 2**128:
            raise ValueError("secret must be from 0 to 2^128 - 1, as secrets.randbits(128) is; got another number.")
        words = [operator.index(secret) >> shift & 0xFFFFFFFF for shift in (0, 32, 64, 96)]
        return cls(
            listing=Listing.create(num_blocks, block_size, num_groups, words),
            num_lookups=jnp.zeros((), jnp.int32),
            num_hits=jnp.zeros((), jnp.int32),
        )

    @property
    def hit_rate(self) -> jax.Array:
        """Blocks found divided by blocks looked up, float32 `[]`; 0 before the first lookup."""
        return self.num_hits.astype(jnp.float32) / jnp.maximum(self.num_lookups, 1).astype(jnp.float32)

    def match_prefix(
        self, allocator: BlockAllocator, tokens: ArrayLike, lengths: ArrayLike, *, salts: ArrayLike | None = None
    ) -> tuple[PrefixCache, BlockAllocator, jax.Array]:
        """Starts sequences in empty rows with the cached blocks of their prompts.

        Only full blocks are shared, and never a whole prompt: its last token is computed, because its logits are
        needed. Append the rest with `append(lengths - num_cached, q_len=...)`. With prompts at the end of their
        rows, the same `tokens` fit the slots that it returns: cached tokens have slots of padding. If that `append` is
        refused, the row keeps the cached blocks until `free`.

        Args:
            allocator: the allocator whose blocks these are.
            tokens: int32 `[seqs, width]`, each prompt at the end of its row.
            lengths: int32 `[seqs]`, the prompts' lengths; 0: leave this row as it is.
            salts: int32 `[seqs]`: only blocks inserted with the same salt are found. None: 0.

        Returns:
            prefix_cache: the new one, which differs in the counts.
            allocator: the new one. Each row holds the blocks that were found for it.
            num_cached: int32 `[seqs]`, in tokens, a multiple of the block size. It is 0, and the row unchanged, if
                nothing was found, the row is occupied, or the length is negative or above `width`.

        Raises:
            ValueError: shapes, dtypes or sizes that do not fit.

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
        """Caches the full blocks of sequences, after their keys and values were written.

        If a block's tokens and all tokens before them are cached already, the sequence uses the cached block and gives
        its own back. A prefix that several sequences computed side by side is so kept once.

        If all buckets in which a block may be listed are in use, the block is not cached, nor are the blocks
        after it in its sequence. With every block of the pool cached, fewer than 1 block in 100,000 meets this.

        Args:
            allocator: the allocator whose blocks these are.
            tokens: int32 `[seqs, width]`, all tokens of each sequence, the newest at the end of the row. Of a
                sequence longer than `width` nothing is cached.
            salts: int32 `[seqs]`, as in `match_prefix`. None: 0.

        Returns:
            prefix_cache: the new one.
            allocator: the new one. Tables may name other blocks with the same tokens; lengths do not change.

        Raises:
            ValueError: shapes, dtypes or sizes that do not fit.

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
        """The cached blocks with which sequences begin.

        Args:
            allocator: whose blocks these are.
            blocks: int32 `[seqs, columns, block_size]`, each sequence's tokens from the first on, in full blocks.
            num_full: int32 `[seqs]`, how many of them are asked for.
            salts: int32 `[seqs]`.

        Returns:
            matches: a row for each sequence.
            tags: uint32 `[seqs, columns]`: a hash of the block and of all blocks before it.
        """
        found = self.listing.look_up(allocator.pool, blocks, salts)
        there = all_before(_first_columns(num_full, blocks.shape[1]) & found.are_same)
        if allocator.windows == (None,):
            num_found = there.sum(axis=1, dtype=jnp.int32)
            return PrefixMatch(num_full, num_found, found.ids[:, None], there[:, None]), found.tags
        others, are_there = self.listing.companions_of(allocator.pool, found.ids)
        ids = jnp.concatenate([found.ids[None], others])
        are_there = jnp.concatenate([there[None], there[None] & are_there])
        return longest_matches(allocator, num_full, ids, are_there), found.tags

    def count(self, matches: PrefixMatch) -> PrefixCache:
        """With what was looked up, and what of it was found, in the counts."""
        return dataclasses.replace(
            self,
            num_lookups=self.num_lookups + matches.num_asked.sum(dtype=jnp.int32),
            num_hits=self.num_hits + matches.num_found.sum(dtype=jnp.int32),
        )

    def insert_blocks(
        self, allocator: BlockAllocator, blocks: jax.Array, num_full: jax.Array, salts: jax.Array
    ) -> tuple[PrefixCache, BlockAllocator, jax.Array]:
        """As `insert`, of the first `num_full` blocks of each row, given as to `find`; and their tags."""
        num_seqs, num_columns = blocks.shape[:2]
        is_full = _first_columns(num_full, num_columns)
        owns, are_own = _entries(allocator, num_columns)
        own, is_own = owns[0], are_own[0]
        found = self.listing.look_up(allocator.pool, blocks, salts)
        wanted = is_full & is_own & ~found.are_listed & ~allocator.pool.is_cached(own)
        listing, ids, are_listed, new = self.listing.add(found, own, wanted, is_full, blocks, salts)
        pool = allocator.pool.mark_cached(own, new)
        are_cached = all_before(are_listed & pool.is_cached(ids))
        allocator = _with_cached(allocator, pool, 0, own, ids, are_cached & is_own)
        if allocator.num_groups > 1:
            wanted = are_cached[None] & are_own[1:]
            listing, companions, new = listing.add_companions(allocator.pool, owns[1:], ids, wanted)
            own, ids, new, wanted = (x.reshape(-1, num_columns) for x in (owns[1:], companions, new, wanted))
            pool = allocator.pool.mark_cached(own, new)
            allocator = _with_cached(allocator, pool, num_seqs, own, ids, wanted)
        return dataclasses.replace(self, listing=listing), allocator, found.tags

    def clear(self, allocator: BlockAllocator) -> tuple[PrefixCache, BlockAllocator]:
        """Forgets every block, as when the weights change: no block computed with the old weights is found again.

        Sequences keep their blocks, and `insert` caches them again: first free the sequences whose tokens are no longer
        valid. The order of free blocks does not change, and no free block is cached. The counts of lookups and hits
        stay.

        Args:
            allocator: the allocator whose blocks these are.

        Returns:
            prefix_cache: an empty one, with the same secret.
            allocator: the new one. Going back to an older one does not bring the forgotten blocks back.

        Raises:
            ValueError: an allocator of other sizes.

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
        return dataclasses.replace(self, listing=self.listing.clear()), allocator

    def check_sizes(self, allocator: BlockAllocator) -> None:
        sizes, wanted = self.listing.sizes, (allocator.num_blocks, allocator.block_size, allocator.num_groups)
        if sizes != wanted:
            raise ValueError(
                f"a prefix cache has its allocator's (num_blocks, block_size, num_groups), {wanted}; got {sizes}."
            )

    def _check(self, allocator: BlockAllocator, tokens: Any, salts: Any) -> tuple[jax.Array, jax.Array]:
        self.check_sizes(allocator)
        num_seqs = len(allocator.lengths)
        tokens = checked_array("tokens", tokens, num_seqs, "width", which="a row for each sequence")
        return tokens, jnp.zeros(num_seqs, jnp.int32) if salts is None else allocator._rows("salts", salts)


def _entries(allocator: BlockAllocator, num_columns: int) -> tuple[jax.Array, jax.Array]:
    """The first columns of the tables, `[groups, seqs, columns]`, and which of them are blocks that the rows hold."""
    shape = allocator.num_groups, -1, num_columns
    is_entry = allocator.is_entry(allocator.lengths)
    return tuple(x[:, :num_columns].reshape(shape) for x in (allocator.rows, is_entry))  # type: ignore[return-value]


def _in_blocks(allocator: BlockAllocator, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Rows with the newest token last -> the full blocks from the first token on, `[seqs, columns, block_size]`."""
    width, block_size = tokens.shape[1], allocator.block_size
    num_columns = min(width // block_size, allocator.block_tables.shape[-1])
    position = jnp.arange(num_columns * block_size, dtype=jnp.int32)[None]
    index = jnp.clip(width - lengths[:, None] + position, 0, width - 1)
    return jnp.take_along_axis(tokens, index, axis=1).reshape(-1, num_columns, block_size)


def _first_columns(counts: jax.Array, num_columns: int) -> jax.Array:
    """The first `counts` columns of each row, bool `[rows, columns]`."""
    return jnp.arange(num_columns, dtype=jnp.int32)[None] < counts[:, None]


def _with_cached(
    allocator: BlockAllocator, pool: BlockPool, first: int, own: jax.Array, ids: jax.Array, wanted: jax.Array
) -> BlockAllocator:
    """Rows hold cached blocks with the same tokens in place of their own wanted blocks, which they let go.

    Args:
        allocator: its tables change.
        pool: its pool.
        first: the first of the rows of the tables.
        own: int32 `[rows, columns]`, the first columns of the rows.
        ids: int32, in that shape: the cached blocks.
        wanted: bool, in that shape.
    """
    shared = wanted & (ids != own)
    pool = pool.acquire_cached(ids, shared).let_go(own, shared)
    tables = lax.dynamic_update_slice(allocator.rows, jnp.where(shared, ids, own), (first, 0))
    return allocator.with_rows(tables, allocator.lengths, pool)
