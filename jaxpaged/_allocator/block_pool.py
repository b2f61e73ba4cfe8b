"""The pool: which blocks are free, in which order they go, and how many hold each. It knows no sequences."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpaged._one_program import one_program
from jaxpaged._public_state import public_state
from jaxpaged._put import put


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockPool:
    """The free blocks and the holders of the others. Immutable.

    Attributes:
        free_list: int32 `[blocks]`, a ring: `num_free` entries from `bottom` on are the free blocks. The one on top,
            the last of them, goes next.
        bottom: int32 `[]`. It is 0 until a prefix cache is used, and then `free_list[:num_free]` is a plain stack.
        num_free: int32 `[]`.
        num_waiting: int32 `[]`, free blocks, those from `bottom` on, that may still hold a cached prefix. They are
            below the others. The one unused longest is on top of them, and so is overwritten first.
        extra_holders: int32 `[blocks]`, holders of a block beyond the first; 0 for a free block. Handing out a block
            does not change it, so that `append` stays a few operations on the batch.
        cached_at: int32 `[blocks]`, for the prefix cache: `num_blocks` while a cached block is held; its index in
            `free_list` while it waits there; -1 for a block that never was cached. The index is stale once the block is
            handed out: `is_cached` sees that it is no longer among those waiting.

    A cached block is never written while it is held: a sequence shortened inside it gets a copy.
    """

    free_list: jax.Array
    bottom: jax.Array
    num_free: jax.Array
    num_waiting: jax.Array
    extra_holders: jax.Array
    cached_at: jax.Array

    @classmethod
    def create(cls, num_blocks: int) -> "BlockPool":
        # One array each: two leaves that are one buffer cannot both be donated.
        return cls(
            free_list=jnp.arange(num_blocks - 1, -1, -1, dtype=jnp.int32),
            bottom=jnp.zeros((), jnp.int32),
            num_free=jnp.asarray(num_blocks - 1, jnp.int32),
            num_waiting=jnp.zeros((), jnp.int32),
            extra_holders=jnp.zeros(num_blocks, jnp.int32),
            cached_at=jnp.full(num_blocks, -1, jnp.int32),
        )

    @property
    def num_blocks(self) -> int:
        return self.free_list.shape[-1]

    def peek(self, from_top: jax.Array) -> jax.Array:
        """The ids at these depths below the top of the free blocks; any id if there are too few."""
        return self.free_list[self._ring(self.bottom + self.num_free - 1 - from_top)]

    def take(self, count: jax.Array) -> "BlockPool":
        """Hands out the `count` blocks on top, which `peek` returned. Cached ones among them are no longer cached."""
        num_free = self.num_free - count
        return dataclasses.replace(self, num_free=num_free, num_waiting=jnp.minimum(self.num_waiting, num_free))

    def share(self, ids: jax.Array, wanted: jax.Array) -> "BlockPool":
        """One more holder for each wanted entry of `ids`, blocks that are held."""
        return dataclasses.replace(self, extra_holders=_add(self.extra_holders, ids, wanted, 1))

    def let_go(self, ids: jax.Array, given: jax.Array) -> "BlockPool":
        """One holder less for each given entry of `ids`; a block without holders is then free.

        Args:
            ids: int32 `[seqs, max_blocks]`. No row names a block twice; several rows may.
            given: bool, in the same shape.

        The result is that of one row after the other, the last row first, and in each the last block first: cached
        blocks go under all free ones, the others on top. So a sequence's tail is overwritten before its head, and
        blocks freed right after they were handed out are handed out again in the same order.
        """
        rows = jnp.broadcast_to(jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None], ids.shape)
        holders = _add(self.extra_holders, ids, given, -1)
        unheld = given & (holders[ids] < 0)
        # If several rows let go of one block, the first puts it back. They choose it in the count itself, which is
        # below zero here and which that row sets to zero.
        claim = rows - ids.shape[0] - 1
        holders = holders.at[self._where(unheld, ids)].min(claim, mode="drop")
        mine = unheld & (holders[ids] == claim)
        cached = mine & (self.cached_at[ids] == self.num_blocks)

        # Indices in the ring: ranks among the blocks on top, and among those below.
        both = jnp.stack([(mine & ~cached).ravel(), cached.ravel()]).astype(jnp.int32)
        ranks = jnp.cumsum(both, axis=1, dtype=jnp.int32)
        num_top, num_below = ranks[0, -1], ranks[1, -1]
        rank_top, rank_below = (ranks - both).reshape(2, *ids.shape)
        bottom = self._ring(self.bottom - num_below)
        index_below = self._ring(bottom + rank_below)
        index = jnp.where(cached, index_below, self._ring(self.bottom + self.num_free + num_top - 1 - rank_top))
        return dataclasses.replace(
            self,
            free_list=put(self.free_list, index, mine, ids),
            bottom=bottom,
            num_free=self.num_free + num_top + num_below,
            num_waiting=self.num_waiting + num_below,
            extra_holders=put(holders, ids, mine, 0),
            cached_at=put(self.cached_at, ids, cached, index_below),
        )

    @one_program()
    def is_cached(self, ids: jax.Array) -> jax.Array:
        """Whether these blocks, held or free, are cached and not overwritten."""
        index = self.cached_at[ids]
        waits = (index >= 0) & (self._ring(index - self.bottom) < self.num_waiting)
        waits &= self.free_list.at[index].get(mode="clip") == ids
        return (index == self.num_blocks) | waits

    def mark_cached(self, ids: jax.Array, wanted: jax.Array) -> "BlockPool":
        """Marks the wanted ids, distinct held blocks, as cached."""
        return dataclasses.replace(self, cached_at=put(self.cached_at, ids, wanted, self.num_blocks))

    def forget(self) -> "BlockPool":
        """No block is cached any more. Waiting ones become free blocks like the others."""
        return dataclasses.replace(
            self, num_waiting=jnp.zeros_like(self.num_waiting), cached_at=jnp.full_like(self.cached_at, -1)
        )

    def acquire_cached(self, ids: jax.Array, wanted: jax.Array) -> "BlockPool":
        """One more holder for each wanted entry of `ids`, cached blocks, held or waiting.

        Waiting ones leave the free list, and the others close ranks. Only this costs time with the size of the pool:
        one prefix sum over the free list.
        """
        waiting = wanted & (self.cached_at[ids] != self.num_blocks)
        waiting_ids = self._where(waiting, ids)
        # -1 before the first of them is counted. Repeats write the same.
        holders = self.extra_holders.at[waiting_ids].set(-1, mode="drop")
        cached_at = self.cached_at.at[waiting_ids].set(self.num_blocks, mode="drop")

        # In the order of the ring: which blocks still wait. (A waiting block need not be cached: see `forget`.)
        order = jnp.arange(self.num_blocks, dtype=jnp.int32)
        blocks = self.free_list[self._ring(self.bottom + order)]
        stays = (order < self.num_waiting) & (cached_at[blocks] != self.num_blocks)
        rank = jnp.cumsum(stays.astype(jnp.int32), dtype=jnp.int32)
        num_waiting = rank[-1]
        num_taken = self.num_waiting - num_waiting
        bottom = self._ring(self.bottom + num_taken)
        index = self._ring(bottom + rank - 1)
        still_cached = stays & (cached_at[blocks] >= 0) & (self._ring(self.bottom + order) == cached_at[blocks])
        return dataclasses.replace(
            self,
            free_list=put(self.free_list, index, stays, blocks),
            bottom=bottom,
            num_free=self.num_free - num_taken,
            num_waiting=num_waiting,
            extra_holders=_add(holders, ids, wanted, 1),
            cached_at=put(cached_at, blocks, still_cached, index),
        )

    def is_free(self) -> jax.Array:
        """bool `[blocks]`, false for the null block. As large as the pool: for figures, not for a decode step."""
        order = jnp.arange(self.num_blocks, dtype=jnp.int32)
        blocks = self.free_list[self._ring(self.bottom + order)]
        return put(jnp.zeros(self.num_blocks, jnp.bool_), blocks, order < self.num_free, True)

    @one_program()
    def num_holders(self) -> jax.Array:
        """int32 `[blocks]`, 0 for the free ones and the null block. As large as the pool, as `is_free`."""
        return jnp.where(self.is_free(), 0, 1 + self.extra_holders).at[0].set(0)

    def _ring(self, indices: jax.Array) -> jax.Array:
        return indices % self.num_blocks

    def _where(self, wanted: jax.Array, indices: jax.Array) -> jax.Array:
        return jnp.where(wanted, indices, self.num_blocks)


def _add(counts: jax.Array, ids: jax.Array, wanted: jax.Array, amount: int) -> jax.Array:
    return counts.at[jnp.where(wanted, ids, counts.shape[0])].add(amount, mode="drop")
