"""The prefix cache: full blocks found again by their tokens and all tokens before them, inside jit."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._allocator.block_pool import BlockPool
from jaxpaged._integers import checked_size
from jaxpaged._one_program import one_program
from jaxpaged._public_state import public_state
from jaxpaged._put import put
from jaxpaged._threefry import threefry

PROBES = 6  # buckets of the table in which a block may be listed
# If all blocks are cached, a probe meets one of them 1 time in 8.
BUCKETS = 8  # of the table, for each block of the pool, at least


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Beginnings:
    """The cached blocks with which sequences may begin, a row for each."""

    num_asked: jax.Array  # int32 [seqs], full blocks that were looked up
    num_found: jax.Array  # int32 [seqs], those that were found, in each group
    ids: jax.Array  # int32 [seqs, groups, columns]
    begin: jax.Array  # bool [seqs, groups, columns]: those that a row begins with, without what its window has passed

    @property
    def num_blocks(self) -> jax.Array:
        """Blocks that each begins with, in all groups."""
        return self.begin.sum(axis=(1, 2), dtype=jnp.int32)


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefixCache:
    """The tokens in full blocks of a `BlockAllocator`'s pool, so that other prompts can share the blocks. Immutable.

    It is a pytree of its own, so that a program without it pays nothing. It describes the pool of one
    allocator: use one prefix cache with that allocator and the allocators that follow from it.

    Attributes:
        tokens: int32 `[blocks, block_size]`, the tokens of a cached block.
        salts: int32 `[blocks]`, the tenant of a cached block.
        serials: int32 `[blocks]`, a number unique to each cached block, from 1 on.
        parents: int32 `[blocks]`, the serial of the block before it in its sequence; 0 for a first block.
        tags: uint32 `[blocks]`, a hash of the salt, of the block's tokens and of all before them.
        homes: int32 `[blocks]`, the block's bucket in `table`.
        table: int32 `[buckets]`, a hash table of block ids. An id counts only if the block's home is there and the
            pool still knows the block as cached; other buckets are free.
        secret: uint32 `[4]`, the key of the hashes.
        next_serial: int32 `[]`.
        num_lookups: int32 `[]`, full blocks that `match_prefix` looked up; modulo 2^32, as is `num_hits`.
        num_hits: int32 `[]`, full blocks that it found.
        companions: int32 `[groups - 1, blocks]`, for a cached block of the first group the block of each other group
            with the same tokens. It counts if the pool knows it as cached, `homes` has -1 minus its group, and its
            serial is that of the block of the first group. None if there is one group.

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

    tokens: jax.Array
    salts: jax.Array
    serials: jax.Array
    parents: jax.Array
    tags: jax.Array
    homes: jax.Array
    table: jax.Array
    secret: jax.Array = dataclasses.field(repr=False)
    next_serial: jax.Array
    num_lookups: jax.Array
    num_hits: jax.Array
    companions: jax.Array | None = None

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
        if num_blocks < 2 or block_size < 1 or BUCKETS * num_blocks > 2**30:
            raise ValueError(
                "num_blocks must be at least 2 and at most 2^27, block_size at least 1; "
                f"got {num_blocks=}, {block_size=}."
            )
        num_groups = checked_size("num_groups", num_groups)
        if not 0 <= secret < 2**128:
            raise ValueError("secret must be from 0 to 2^128 - 1, as secrets.randbits(128) is; got another number.")
        words = [operator.index(secret) >> shift & 0xFFFFFFFF for shift in (0, 32, 64, 96)]
        return cls(
            tokens=jnp.zeros((num_blocks, block_size), jnp.int32),
            salts=jnp.zeros(num_blocks, jnp.int32),
            serials=jnp.zeros(num_blocks, jnp.int32),
            parents=jnp.zeros(num_blocks, jnp.int32),
            tags=jnp.zeros(num_blocks, jnp.uint32),
            homes=jnp.full(num_blocks, -1, jnp.int32),
            table=jnp.zeros(1 << (BUCKETS * num_blocks - 1).bit_length(), jnp.int32),
            secret=jnp.asarray(words, jnp.uint32),
            next_serial=jnp.ones((), jnp.int32),
            num_lookups=jnp.zeros((), jnp.int32),
            num_hits=jnp.zeros((), jnp.int32),
            companions=None if num_groups == 1 else jnp.zeros((num_groups - 1, num_blocks), jnp.int32),
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
        lengths = allocator._rows("lengths", lengths, jnp.int32)
        if self._num_columns(allocator, tokens) == 0:
            return self, allocator, jnp.zeros_like(lengths)
        return self._match_prefix(allocator, tokens, lengths, salts)

    @one_program()
    def _match_prefix(
        self, allocator: BlockAllocator, tokens: jax.Array, lengths: jax.Array, salts: jax.Array
    ) -> tuple[PrefixCache, BlockAllocator, jax.Array]:
        num_columns = self._num_columns(allocator, tokens)
        legal = (lengths > 0) & (lengths <= tokens.shape[1]) & allocator.is_seat_free
        num_full = jnp.where(legal, (lengths - 1) // allocator.block_size, 0)
        blocks = _cut(tokens, lengths, num_columns, allocator.block_size)
        beginnings, _ = self.find(allocator, blocks, num_full, salts)
        allocator, num_cached = begin_with(allocator, beginnings)
        return self.counted(beginnings), allocator, num_cached

    def insert(
        self, allocator: BlockAllocator, tokens: ArrayLike, *, salts: ArrayLike | None = None
    ) -> tuple[PrefixCache, BlockAllocator]:
        """Caches the full blocks of sequences, after their keys and values were written.

        If a block's tokens and all tokens before them are cached already, the sequence takes the cached block and gives
        its own back. A prefix that several sequences computed side by side is so kept once.

        If all buckets in which a block may be listed are taken, the block is not cached, nor are the blocks
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
        if self._num_columns(allocator, tokens) == 0:
            return self, allocator
        return self._insert(allocator, tokens, salts)

    @one_program()
    def _insert(
        self, allocator: BlockAllocator, tokens: jax.Array, salts: jax.Array
    ) -> tuple[PrefixCache, BlockAllocator]:
        num_columns, lengths = self._num_columns(allocator, tokens), allocator.lengths
        num_full = jnp.where(lengths <= tokens.shape[1], lengths // allocator.block_size, 0)
        blocks = _cut(tokens, lengths, num_columns, allocator.block_size)
        return self.insert_blocks(allocator, blocks, num_full, salts)[:2]

    def find(
        self, allocator: BlockAllocator, blocks: jax.Array, num_full: jax.Array, salts: jax.Array
    ) -> tuple[Beginnings, jax.Array]:
        """The cached blocks with which sequences begin.

        Args:
            allocator: whose blocks these are.
            blocks: int32 `[seqs, columns, block_size]`, each sequence's tokens from the first on, in full blocks.
            num_full: int32 `[seqs]`, how many of them are asked for.
            salts: int32 `[seqs]`.

        Returns:
            beginnings: a row for each sequence.
            tags: uint32 `[seqs, columns]`: a hash of the block and of all blocks before it.
        """
        asked = jnp.arange(blocks.shape[1], dtype=jnp.int32)[None] < num_full[:, None]
        tags, probes = self._hash(blocks, salts)
        ids, listed, _ = self._look_up(allocator.pool, tags, probes, salts)
        found = _all_before(asked & self._confirm(ids, listed, blocks))
        if allocator.windows == (None,):
            num_found = found.sum(axis=1, dtype=jnp.int32)
            return Beginnings(num_full, num_found, ids[:, None], found[:, None]), tags
        others, there = self._companions(allocator.pool, ids)
        ids, there = jnp.concatenate([ids[None], others]), jnp.concatenate([found[None], found[None] & there])

        # The most blocks behind which no group lacks a block that its window shows there.
        column = jnp.arange(blocks.shape[1], dtype=jnp.int32)
        first = allocator.num_passed_at((column + 1) * allocator.block_size)[:, None]  # [groups, 1, columns]
        last_missing = jax.lax.cummax(jnp.where(there, -1, column[None, None]), axis=2)
        is_end = found & (last_missing < first).all(axis=0)
        num_found = jnp.where(is_end, column[None] + 1, 0).max(axis=1, initial=0)
        first = allocator.num_passed_at(num_found * allocator.block_size)[..., None]  # [groups, seqs, 1]
        begin = (column[None, None] >= first) & (column[None, None] < num_found[None, :, None])
        return Beginnings(num_full, num_found, ids.swapaxes(0, 1), begin.swapaxes(0, 1)), tags

    def counted(self, beginnings: Beginnings) -> PrefixCache:
        """With what was looked up, and what of it was found, in the counts."""
        return dataclasses.replace(
            self,
            num_lookups=self.num_lookups + beginnings.num_asked.sum(dtype=jnp.int32),
            num_hits=self.num_hits + beginnings.num_found.sum(dtype=jnp.int32),
        )

    def insert_blocks(
        self, allocator: BlockAllocator, blocks: jax.Array, num_full: jax.Array, salts: jax.Array
    ) -> tuple[PrefixCache, BlockAllocator, jax.Array]:
        """As `insert`, of the first `num_full` blocks of each row, given as to `find`; and their tags."""
        num_seqs, num_columns = blocks.shape[:2]
        is_full = jnp.arange(num_columns, dtype=jnp.int32)[None] < num_full[:, None]
        own, is_own = _entries(allocator, num_columns)
        own, is_own = own[0], is_own[0]
        tags, probes = self._hash(blocks, salts)
        ids, listed, taken = self._look_up(allocator.pool, tags, probes, salts)

        # 1. New blocks get buckets; of equal ones the first gets one for all.
        wanted = is_full & is_own & ~listed & ~allocator.pool.is_cached(own)
        table, firsts, homes = _find_buckets(self.table, wanted, taken, tags, probes, salts)
        is_given = firsts >= 0
        entries = jnp.arange(own.size, dtype=jnp.int32).reshape(own.shape)
        canonical = jnp.where(listed, ids, own.ravel()[firsts])
        before = jnp.pad(canonical[:, :-1], ((0, 0), (1, 0)))  # the null block before the first

        # 2. The block found, or the first of equal ones, has exactly the same tokens, and the same block before it.
        same = (blocks.reshape(own.size, -1)[firsts] == blocks).all(axis=-1) & (before.ravel()[firsts] == before)
        same &= firsts % num_columns == entries % num_columns
        same = jnp.where(listed, self._confirm(ids, listed, blocks), is_given & same)
        good = _all_before(is_full & same)
        new = good & is_given & ~listed & (firsts == entries)
        prefix_cache = self._list(new, own, before, blocks, salts, tags, homes)
        table = put(table, homes, is_given & (firsts == entries), jnp.where(new, own, 0))

        # 3. Duplicates are given back.
        pool = allocator.pool.mark_cached(own, new)
        are_cached = _all_before(good & pool.is_cached(canonical))
        shared = are_cached & is_own & (canonical != own)
        pool = pool.acquire_cached(canonical, shared).let_go(own, shared)
        tables = allocator.rows.at[:num_seqs, :num_columns].set(jnp.where(shared, canonical, own))
        prefix_cache = dataclasses.replace(prefix_cache, table=table)
        allocator = allocator.with_rows(tables, allocator.lengths, pool)
        return *prefix_cache._insert_companions(allocator, canonical, are_cached), tags

    def _insert_companions(
        self, allocator: BlockAllocator, firsts: jax.Array, are_cached: jax.Array
    ) -> tuple[PrefixCache, BlockAllocator]:
        """Lists the blocks of the other groups with those of the first, `[seqs, columns]`, that are cached."""
        if self.companions is None:
            return self, allocator
        num_seqs, num_columns = firsts.shape
        pool, num_blocks = allocator.pool, allocator.num_blocks
        own, is_own = (values[1:] for values in _entries(allocator, num_columns))  # [groups - 1, seqs, columns]
        ids, listed = self._companions(pool, firsts)
        wanted = are_cached[None] & is_own

        # Of equal ones that are new the first is listed.
        entries = jnp.arange(own.size, dtype=jnp.int32).reshape(own.shape)
        groups = jnp.arange(len(own), dtype=jnp.int32)[:, None, None]
        targets = groups * num_blocks + firsts[None]
        targets = jnp.where(wanted & ~listed, targets, self.companions.size)
        winners = jnp.full(self.companions.size, own.size, jnp.int32).at[targets].min(entries, mode="drop")
        winners = winners.at[targets].get(mode="fill", fill_value=own.size)
        new = winners == entries
        ids = jnp.where(listed, ids, own.ravel().at[winners].get(mode="clip"))
        companions = self.companions.ravel().at[jnp.where(new, targets, self.companions.size)].set(own, mode="drop")
        listing = dataclasses.replace(
            self,
            companions=companions.reshape(self.companions.shape),
            serials=self.serials.at[jnp.where(new, own, num_blocks)].set(self.serials[firsts][None], mode="drop"),
            homes=self.homes.at[jnp.where(new, own, num_blocks)].set(-2 - groups, mode="drop"),
        )

        own, ids, new, shared = (values.reshape(-1, num_columns) for values in (own, ids, new, wanted & (ids != own)))
        pool = pool.mark_cached(own, new).acquire_cached(ids, shared).let_go(own, shared)
        tables = allocator.rows.at[num_seqs:, :num_columns].set(jnp.where(shared, ids, own))
        return listing, allocator.with_rows(tables, allocator.lengths, pool)

    def _companions(self, pool: BlockPool, firsts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(the blocks of the other groups that go with those of the first, `[groups - 1, ...]`, whether they count)."""
        if self.companions is None:
            return firsts[None][:0], jnp.zeros_like(firsts[None], jnp.bool_)[:0]
        ids = self.companions[:, firsts]
        groups = jnp.arange(len(ids), dtype=jnp.int32).reshape(-1, *[1] * firsts.ndim)
        are_listed = pool.is_cached(ids) & (self.homes[ids] == -2 - groups)
        return ids, are_listed & (self.serials[ids] == self.serials[firsts][None])

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
        return dataclasses.replace(self, table=jnp.zeros_like(self.table)), allocator

    def _list(
        self,
        new: jax.Array,
        own: jax.Array,
        before: jax.Array,
        blocks: jax.Array,
        salts: jax.Array,
        tags: jax.Array,
        homes: jax.Array,
    ) -> PrefixCache:
        rank = jnp.cumsum(new.ravel().astype(jnp.int32), dtype=jnp.int32).reshape(new.shape)

        def listed(old: jax.Array, values: jax.Array) -> jax.Array:
            return put(old, own, new, values)

        serials = listed(self.serials, self.next_serial + rank - 1)
        return dataclasses.replace(
            self,
            tokens=listed(self.tokens, blocks),
            salts=listed(self.salts, jnp.broadcast_to(salts[:, None], own.shape)),
            serials=serials,
            parents=listed(self.parents, jnp.where(before > 0, serials[before], 0)),
            tags=listed(self.tags, tags),
            homes=listed(self.homes, homes),
            next_serial=self.next_serial + rank[-1, -1],
        )

    def _hash(self, blocks: jax.Array, salts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """tags `[seqs, columns]`, and the buckets in which each may be listed, `[seqs, columns, PROBES]`."""
        # Without the barrier each probe computes them again, and the compilation takes minutes on a CPU.
        tags, starts = jax.lax.optimization_barrier(chain_hashes(blocks, salts, self.secret))
        steps = tags * np.uint32(2) + np.uint32(1)  # odd: the probes differ
        probes = starts[..., None] + jnp.arange(PROBES, dtype=jnp.uint32)[None, None] * steps[..., None]
        return tags, (probes & np.uint32(self.table.shape[0] - 1)).astype(jnp.int32)

    def _look_up(
        self, pool: BlockPool, tags: jax.Array, probes: jax.Array, salts: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(ids, listed: whether there is a block with that tag and salt, taken: whether each probed bucket is).

        Blocks of other salts with the same tag are passed over: they hide nothing.
        """
        ids = self.table[probes]
        taken = pool.is_cached(ids) & (self.homes[ids] == probes)
        hits = taken & (self.tags[ids] == tags[..., None]) & (self.salts[ids] == salts[:, None, None])
        first = hits & (jnp.cumsum(hits, axis=-1, dtype=jnp.int32) == 1)
        return jnp.where(first, ids, 0).sum(axis=-1, dtype=jnp.int32), hits.any(axis=-1), taken

    def _confirm(self, ids: jax.Array, listed: jax.Array, blocks: jax.Array) -> jax.Array:
        """Whether the listed blocks hold these tokens, behind the one in the column before."""
        before = jnp.pad(jnp.where(listed, self.serials[ids], -1)[:, :-1], ((0, 0), (1, 0)))  # 0 before the first
        return listed & (self.tokens[ids] == blocks).all(axis=-1) & (self.parents[ids] == before)

    def _num_columns(self, allocator: BlockAllocator, tokens: jax.Array) -> int:
        return min(tokens.shape[1] // allocator.block_size, allocator.block_tables.shape[-1])

    def check_sizes(self, allocator: BlockAllocator) -> None:
        num_groups = 1 if self.companions is None else 1 + len(self.companions)
        sizes = *self.tokens.shape, num_groups
        wanted = allocator.num_blocks, allocator.block_size, allocator.num_groups
        if sizes != wanted:
            raise ValueError(
                f"a prefix cache has its allocator's (num_blocks, block_size, num_groups), {wanted}; got {sizes}."
            )

    def _check(self, allocator: BlockAllocator, tokens: Any, salts: Any) -> tuple[jax.Array, jax.Array]:
        self.check_sizes(allocator)
        tokens = jnp.asarray(tokens)
        num_seqs = allocator.lengths.shape[0]
        if tokens.ndim != 2 or tokens.shape[0] != num_seqs or tokens.dtype != jnp.int32:
            raise ValueError(
                f"tokens must be int32 [{num_seqs}, width], a row for each sequence; "
                f"got {tokens.dtype} {list(tokens.shape)}."
            )
        salts = jnp.zeros(num_seqs, jnp.int32) if salts is None else salts
        return tokens, allocator._rows("salts", salts, jnp.int32)


def chain_hashes(blocks: jax.Array, salts: jax.Array, secret: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two hashes for each block, of its salt, of its tokens and of all before it, uint32 `[seqs, columns]` each.

        hashes[i] = F(outer_key, sum over p < (i + 1) * block_size of F(inner_key, (p, tokens[p])))
        inner_key, outer_key = F(secret[:2], (salt, 0)), F(secret[2:], (salt, 0))

    F(key, block) is Threefry-2x32, taken for a pseudo-random function: a key of 64 bits, 64 bits in, 64 bits out. The
    two hashes are the halves. The sum is modulo 2^32 in each half, so that one prefix sum makes all hashes.

    Without the secret, tokens chosen beforehand collide by chance only. Two prefixes of one salt differ at some p, and
    F is independent there: their sums are equal with probability 2^-64. F makes independent hashes of different sums,
    and so do different salts, which have different keys. Two tags of 32 bits are equal with probability 2^-32.

    References:
        Bellare, Guerin, Rogaway, XOR MACs (1995), for the sum of a function of position and word.
    """
    num_seqs, num_columns, block_size = blocks.shape
    salts = salts.astype(jnp.uint32)[:, None]
    inner_key, outer_key = (
        threefry((secret[i], secret[i + 1]), (salts, jnp.zeros_like(salts))) for i in (0, 2)
    )  # [seqs, 1] each half
    position = jnp.arange(num_columns * block_size, dtype=jnp.uint32)[None]
    words = threefry(inner_key, (position, blocks.reshape(num_seqs, -1).astype(jnp.uint32)))
    x, y = (half.reshape(blocks.shape).sum(axis=2, dtype=jnp.uint32).cumsum(axis=1, dtype=jnp.uint32) for half in words)
    return threefry(outer_key, (x, y))


def _find_buckets(
    table: jax.Array, wanted: jax.Array, taken: jax.Array, tags: jax.Array, probes: jax.Array, salts: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lists new blocks, all at once: one round a probe, in each of which the first entry to ask for a bucket gets it.

    Returns:
        table: with a number below 0 in the buckets that were given out.
        firsts: int32 `[seqs, columns]`: the entry (`row * columns + column`) that got the bucket for this one and all
            of the same tag and salt, itself among them; -1: there was none.
        homes: int32, in the same shape: that bucket.
    """
    num_entries = wanted.size
    entries = jnp.arange(num_entries, dtype=jnp.int32).reshape(wanted.shape)
    claims = entries - num_entries - 1  # below 0, the first is the least
    firsts, homes = jnp.full_like(entries, -1), jnp.full_like(entries, -1)
    for probe in range(probes.shape[-1]):
        bucket = probes[..., probe]
        asks = wanted & (firsts < 0) & ~taken[..., probe] & (table[bucket] >= 0)
        table = table.at[jnp.where(asks, bucket, table.size)].min(claims, mode="drop")
        claim = table[bucket]
        first = jnp.where(claim < 0, claim + num_entries + 1, 0)
        served = wanted & (firsts < 0) & (claim < 0) & (tags.ravel()[first] == tags)
        served &= salts[first // wanted.shape[1]] == salts[:, None]
        firsts, homes = jnp.where(served, first, firsts), jnp.where(served, bucket, homes)
    return table, firsts, homes


def begin_with(allocator: BlockAllocator, beginnings: Beginnings) -> tuple[BlockAllocator, jax.Array]:
    """Empty sequences begin with the cached blocks that were found for them; the others do not change.

    Also returns how many tokens these hold, int32 `[seqs]`.
    """
    num_columns, tables, num_passed = beginnings.ids.shape[2], allocator.rows, allocator.num_passed
    ids, begin = (x.swapaxes(0, 1).reshape(-1, num_columns) for x in (beginnings.ids, beginnings.begin))
    num_cached = beginnings.num_found * allocator.block_size
    if num_passed is not None:
        num_passed = jnp.where(num_cached[None] > 0, allocator.num_passed_at(num_cached), num_passed)
    allocator = allocator.with_rows(
        tables.at[:, :num_columns].set(jnp.where(begin, ids, tables[:, :num_columns])),
        jnp.where(num_cached > 0, num_cached, allocator.lengths),
        allocator.pool.acquire_cached(ids, begin),
        num_passed,
    )
    return allocator, num_cached


def _entries(allocator: BlockAllocator, num_columns: int) -> tuple[jax.Array, jax.Array]:
    """The first columns of the tables, `[groups, seqs, columns]`, and which of them are blocks that the rows hold."""
    shape = allocator.num_groups, -1, num_columns
    is_entry = allocator.is_entry(allocator.lengths)
    return tuple(x[:, :num_columns].reshape(shape) for x in (allocator.rows, is_entry))  # type: ignore[return-value]


def _cut(tokens: jax.Array, lengths: jax.Array, num_columns: int, block_size: int) -> jax.Array:
    """Rows with the newest token last -> the full blocks from the first token on, `[seqs, columns, block_size]`."""
    position = jnp.arange(num_columns * block_size, dtype=jnp.int32)[None]
    column = jnp.clip(tokens.shape[1] - lengths[:, None] + position, 0, tokens.shape[1] - 1)
    return jnp.take_along_axis(tokens, column, axis=1).reshape(-1, num_columns, block_size)


def _all_before(flags: jax.Array) -> jax.Array:
    """Whether a row's flags are true up to here."""
    return jnp.cumsum(~flags, axis=1, dtype=jnp.int32) == 0
