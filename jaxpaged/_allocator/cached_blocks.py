"""The cached blocks, and a hash table that finds a block by its tokens and all tokens before them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged._allocator.block_pool import BlockPool
from jaxpaged._public_state import public_state
from jaxpaged._put import put
from jaxpaged._threefry import threefry

PROBES = 6  # buckets of the table in which a block may be stored
# With every block cached, a bucket is taken with a probability of at most 1/8.
BUCKETS = 8  # minimum number of buckets per block of the pool


class Found(NamedTuple):
    """Result of a lookup of full blocks of sequences, arrays `[seqs, columns]`."""

    tags: jax.Array  # uint32, hash of each block and all blocks before it
    probes: jax.Array  # int32 [seqs, columns, PROBES], buckets in which each block may be stored
    are_taken: jax.Array  # bool [seqs, columns, PROBES], whether a cached block is in the bucket
    ids: jax.Array  # int32, cached block with the same tag and salt; 0: none
    are_cached: jax.Array  # bool, whether there is such a block
    are_same: jax.Array  # bool, whether it holds exactly these tokens, and follows the block in the column before


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CachedBlocks:
    """The cached blocks of a pool, found by salt, tokens and preceding block. Immutable.

    Attributes:
        tokens: int32 `[blocks, block_size]`, tokens of each cached block.
        salts: int32 `[blocks]`, salt of each cached block.
        serials: int32 `[blocks]`, a number unique to each cached block, from 1.
        parents: int32 `[blocks]`, serial of the preceding block of the sequence; 0 for a first block.
        tags: uint32 `[blocks]`, hash of the salt, the block's tokens and all tokens before them.
        homes: int32 `[blocks]`, bucket of the block in `table`.
        table: int32 `[buckets]`, a hash table of block ids. An entry is valid only if the block's home is this bucket
            and the pool still has the block as cached. Buckets with other entries are free.
        secret: uint32 `[4]`, key of the hashes.
        next_serial: int32 `[]`, serial of the next block to be inserted.
        companions: int32 `[groups - 1, blocks]`: for each cached block of the first group, the block of each other
            group with the same tokens. A companion is valid if the pool has it as cached, its home is -1 minus its
            group, and its serial is that of the block of the first group. None with a single group.

    Hashes only locate candidates: `look_up` compares the tokens. It skips blocks of other salts, even if their hashes
    are equal, so that they cannot hide a block.
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
    companions: jax.Array | None

    @classmethod
    def create(cls, num_blocks: int, block_size: int, num_groups: int, secret: Sequence[int]) -> CachedBlocks:
        # A separate array for each field: a buffer cannot be donated twice.
        return cls(
            tokens=jnp.zeros((num_blocks, block_size), jnp.int32),
            salts=jnp.zeros(num_blocks, jnp.int32),
            serials=jnp.zeros(num_blocks, jnp.int32),
            parents=jnp.zeros(num_blocks, jnp.int32),
            tags=jnp.zeros(num_blocks, jnp.uint32),
            homes=jnp.full(num_blocks, -1, jnp.int32),
            table=jnp.zeros(1 << (BUCKETS * num_blocks - 1).bit_length(), jnp.int32),
            secret=jnp.asarray(secret, jnp.uint32),
            next_serial=jnp.ones((), jnp.int32),
            companions=None if num_groups == 1 else jnp.zeros((num_groups - 1, num_blocks), jnp.int32),
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """`(num_blocks, block_size, num_groups)`."""
        num_blocks, block_size = self.tokens.shape
        return num_blocks, block_size, 1 if self.companions is None else 1 + len(self.companions)

    def clear(self) -> CachedBlocks:
        return dataclasses.replace(self, table=jnp.zeros_like(self.table))

    def look_up(self, pool: BlockPool, blocks: jax.Array, salts: jax.Array) -> Found:
        """Looks up `blocks`, tokens int32 `[seqs, columns, block_size]`, under `salts`, int32 `[seqs]`."""
        tags, probes = self._hash(blocks, salts)
        ids = self.table[probes]
        are_taken = pool.is_cached(ids) & (self.homes[ids] == probes)
        hits = are_taken & (self.tags[ids] == tags[..., None]) & (self.salts[ids] == salts[:, None, None])
        first = hits & (jnp.cumsum(hits, axis=-1, dtype=jnp.int32) == 1)
        ids, are_cached = jnp.where(first, ids, 0).sum(axis=-1, dtype=jnp.int32), hits.any(axis=-1)
        return Found(tags, probes, are_taken, ids, are_cached, self._confirm(ids, are_cached, blocks))

    def _hash(self, blocks: jax.Array, salts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Tags `[seqs, columns]`, and the buckets in which each block may be stored, `[seqs, columns, PROBES]`."""
        # Without the barrier XLA recomputes the hashes for each probe, and compiles for minutes on a CPU.
        tags, starts = jax.lax.optimization_barrier(chain_hashes(blocks, salts, self.secret))
        steps = tags * np.uint32(2) + np.uint32(1)  # odd, so that the probes differ
        probes = starts[..., None] + jnp.arange(PROBES, dtype=jnp.uint32)[None, None] * steps[..., None]
        return tags, (probes & np.uint32(self.table.shape[0] - 1)).astype(jnp.int32)

    def _confirm(self, ids: jax.Array, cached: jax.Array, blocks: jax.Array) -> jax.Array:
        """Whether the cached blocks hold exactly these tokens, and follow the block in the column before."""
        before = _before(jnp.where(cached, self.serials[ids], -1))
        return cached & (self.tokens[ids] == blocks).all(axis=-1) & (self.parents[ids] == before)

    def add(
        self, found: Found, own: jax.Array, wanted: jax.Array, is_full: jax.Array, blocks: jax.Array, salts: jax.Array
    ) -> tuple[CachedBlocks, jax.Array, jax.Array, jax.Array]:
        """Inserts the wanted blocks. Of duplicates the first wins; a block without a bucket or without its parent is
        skipped.

        Args:
            found: result of `look_up` for `blocks` and `salts`.
            own: int32 `[seqs, columns]`, blocks of the sequences.
            wanted: bool `[seqs, columns]`, full blocks that are neither found nor cached.
            is_full: bool `[seqs, columns]`.
            blocks: tokens of the blocks, as in `look_up`.
            salts: int32 `[seqs]`.

        Returns:
            cached: the new state.
            ids: int32 `[seqs, columns]`, the cached block with the same tokens.
            are_cached: bool `[seqs, columns]`, whether this block and all blocks before it are cached.
            new: bool `[seqs, columns]`, whether the sequence's own block was inserted now.
        """
        # 1. New blocks get buckets. Duplicates share the bucket of the first.
        table, firsts, homes = _claim_buckets(self.table, wanted, found, salts)
        entries = jnp.arange(own.size, dtype=jnp.int32).reshape(own.shape)
        are_first = firsts == entries
        ids = jnp.where(found.are_cached, found.ids, own.ravel()[firsts])
        before = _before(ids)

        # 2. The block found, or the first duplicate, must have exactly the same tokens and the same preceding block.
        same = (blocks.reshape(own.size, -1)[firsts] == blocks).all(axis=-1) & (before.ravel()[firsts] == before)
        same &= firsts % own.shape[1] == entries % own.shape[1]
        same = jnp.where(found.are_cached, found.are_same, (firsts >= 0) & same)
        are_cached = all_before(is_full & same)
        new = are_cached & are_first

        # 3. The fields of the new blocks.
        def inserted(old: jax.Array, values: jax.Array) -> jax.Array:
            return put(old, own, new, values)

        rank = jnp.cumsum(new.ravel().astype(jnp.int32), dtype=jnp.int32).reshape(new.shape)
        serials = inserted(self.serials, self.next_serial + rank - 1)
        cached = dataclasses.replace(
            self,
            tokens=inserted(self.tokens, blocks),
            salts=inserted(self.salts, jnp.broadcast_to(salts[:, None], own.shape)),
            serials=serials,
            parents=inserted(self.parents, jnp.where(before > 0, serials[before], 0)),
            tags=inserted(self.tags, found.tags),
            homes=inserted(self.homes, homes),
            table=put(table, homes, are_first, jnp.where(new, own, 0)),
            next_serial=self.next_serial + rank[-1, -1],
        )
        return cached, ids, are_cached, new

    def companions_of(self, pool: BlockPool, firsts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Blocks of the other groups with the same tokens, `[groups - 1, ...]`, and whether they are valid."""
        if self.companions is None:
            return firsts[None][:0], jnp.zeros_like(firsts[None], jnp.bool_)[:0]
        ids = self.companions[:, firsts]
        groups = jnp.arange(len(ids), dtype=jnp.int32).reshape(-1, *[1] * firsts.ndim)
        are_cached = pool.is_cached(ids) & (self.homes[ids] == -2 - groups)
        return ids, are_cached & (self.serials[ids] == self.serials[firsts][None])

    def add_companions(
        self, pool: BlockPool, own: jax.Array, firsts: jax.Array, wanted: jax.Array
    ) -> tuple[CachedBlocks, jax.Array, jax.Array]:
        """Inserts the wanted blocks of the other groups. Of duplicates the first wins.

        Args:
            pool: the allocator's pool.
            own: int32 `[groups - 1, seqs, columns]`, blocks of the sequences.
            firsts: int32 `[seqs, columns]`, cached blocks of the first group with the same tokens.
            wanted: bool, in the shape of `own`.

        Returns:
            cached: the new state.
            ids: int32, in the shape of `own`: the cached block for each wanted one.
            new: bool, in the shape of `own`: whether the sequence's own block was inserted now.
        """
        assert self.companions is not None
        ids, are_cached = self.companions_of(pool, firsts)
        size = self.companions.size
        entries = jnp.arange(own.size, dtype=jnp.int32).reshape(own.shape)
        groups = jnp.arange(len(own), dtype=jnp.int32)[:, None, None]
        targets = jnp.where(wanted & ~are_cached, groups * pool.num_blocks + firsts[None], size)
        winners = jnp.full(size, own.size, jnp.int32).at[targets].min(entries, mode="drop")
        winners = winners.at[targets].get(mode="fill", fill_value=own.size)
        new = winners == entries
        ids = jnp.where(are_cached, ids, own.ravel().at[winners].get(mode="clip"))
        cached = dataclasses.replace(
            self,
            companions=put(self.companions.ravel(), targets, new, own).reshape(self.companions.shape),
            serials=put(self.serials, own, new, self.serials[firsts][None]),
            homes=put(self.homes, own, new, -2 - groups),
        )
        return cached, ids, new


def _claim_buckets(
    table: jax.Array, wanted: jax.Array, found: Found, salts: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Assigns buckets to all new blocks, with one round per probe. The first entry that claims a bucket gets it.

    Returns:
        table: the table, with a negative number in each bucket that was assigned.
        firsts: int32 `[seqs, columns]`: the entry (`row * columns + column`) that got the bucket. It represents all
            entries with the same tag and salt. -1: no bucket was free.
        homes: int32 `[seqs, columns]`: that bucket.
    """
    num_entries = wanted.size
    entries = jnp.arange(num_entries, dtype=jnp.int32).reshape(wanted.shape)
    claims = entries - num_entries - 1  # negative, and the first entry has the minimum
    firsts, homes = jnp.full_like(entries, -1), jnp.full_like(entries, -1)
    for probe in range(found.probes.shape[-1]):
        bucket = found.probes[..., probe]
        is_claim = wanted & (firsts < 0) & ~found.are_taken[..., probe] & (table[bucket] >= 0)
        table = table.at[jnp.where(is_claim, bucket, table.size)].min(claims, mode="drop")
        claim = table[bucket]
        first = jnp.where(claim < 0, claim + num_entries + 1, 0)
        served = wanted & (firsts < 0) & (claim < 0) & (found.tags.ravel()[first] == found.tags)
        served &= salts[first // wanted.shape[1]] == salts[:, None]
        firsts, homes = jnp.where(served, first, firsts), jnp.where(served, bucket, homes)
    return table, firsts, homes


def all_before(flags: jax.Array) -> jax.Array:
    """Whether all flags of the row are true up to and including this column."""
    return jnp.cumsum(~flags, axis=1, dtype=jnp.int32) == 0


def _before(values: jax.Array) -> jax.Array:
    """The values shifted by one column, with 0 in the first column."""
    return jnp.pad(values[:, :-1], ((0, 0), (1, 0)))


def chain_hashes(blocks: jax.Array, salts: jax.Array, secret: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two hashes of each block's salt, its tokens and all tokens before them, uint32 `[seqs, columns]` each.

        hashes[i] = F(outer_key, sum over p < (i + 1) * block_size of F(inner_key, (p, tokens[p])))
        inner_key, outer_key = F(secret[:2], (salt, 0)), F(secret[2:], (salt, 0))

    F(key, block) is Threefry-2x32, used as a pseudo-random function with a 64-bit key, input and output. The two hashes
    are the halves of the output. The sum is modulo 2^32 in each half, so that one prefix sum gives all hashes.

    A user who does not know the secret can produce collisions only by chance. Two different prefixes with one salt
    differ at some position p, where F is independent, so their sums are equal with probability 2^-64. Different sums
    have independent hashes, and so have different salts, because their keys differ. Two 32-bit tags are equal with
    probability 2^-32.

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
