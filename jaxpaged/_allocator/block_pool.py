"""The pool of blocks: the free blocks in the order in which they are handed out, and the holders of each block."""

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
    """The free blocks, and the number of holders of each block. Immutable.

    Attributes:
        free_list: int32 `[blocks]`, a ring: the `num_free` entries from `bottom` on are the free blocks. The last of
            them, the top, is handed out next.
        bottom: int32 `[]`, start of the ring. Without a prefix cache it is 0, and `free_list[:num_free]` is a stack.
        num_free: int32 `[]`, number of free blocks.
        num_waiting: int32 `[]`, number of free blocks that may still hold a cached prefix. They are the first from
            `bottom` on. The least recently used is on top of them, and is the first of them to be handed out.
        extra_holders: int32 `[blocks]`, holders of a block beyond the first; 0 for a free block. Handing out a block
            does not change it, which keeps `append` cheap.
        cached_at: int32 `[blocks]`, for the prefix cache: `num_blocks` for a held cached block, the index in
            `free_list` for a waiting one, and -1 for a block that was never cached. The index becomes stale when the
            block is handed out; `is_cached` detects that.

    A held cached block is never written: a sequence that is shortened inside one gets a copy.
    """

    free_list: jax.Array
    bottom: jax.Array
    num_free: jax.Array
    num_waiting: jax.Array
    extra_holders: jax.Array
    cached_at: jax.Array

    @classmethod
    def create(cls, num_blocks: int) -> "BlockPool":
        # A separate array for each field: a buffer cannot be donated twice.
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
        """Ids of the free blocks at these depths below the top. A depth that does not exist gives an arbitrary id."""
        return self.free_list[self._ring(self.bottom + self.num_free - 1 - from_top)]

    def take(self, count: jax.Array) -> "BlockPool":
        """Hands out the top `count` blocks, which `peek` returns. They are no longer cached."""
        num_free = self.num_free - count
        return dataclasses.replace(self, num_free=num_free, num_waiting=jnp.minimum(self.num_waiting, num_free))

    def share(self, ids: jax.Array, wanted: jax.Array) -> "BlockPool":
        """Adds a holder for each wanted entry of `ids`, which are held blocks."""
        return dataclasses.replace(self, extra_holders=_add(self.extra_holders, ids, wanted, 1))

    def let_go(self, ids: jax.Array, given: jax.Array) -> "BlockPool":
        """Removes a holder for each given entry of `ids`. A block without holders becomes free.

        Cached blocks go below all free blocks, and others on top. Rows are released from last to first, and in each row
        the last block first. So the tail of a cached sequence is overwritten before its head, and blocks that are freed
        right after they were handed out are handed out again in the same order.

        Args:
            ids: int32 `[seqs, max_blocks]`. A block may be in several rows, but not twice in one.
            given: bool, the same shape.
        """
        rows = jnp.broadcast_to(jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None], ids.shape)
        holders = _add(self.extra_holders, ids, given, -1)
        unheld = given & (holders[ids] < 0)
        # If several rows release one block, the first of them returns it to the pool. The rows elect it with a minimum
        # over the block's count, which is negative here and is reset to zero below.
        claim = rows - ids.shape[0] - 1
        holders = holders.at[self._where(unheld, ids)].min(claim, mode="drop")
        mine = unheld & (holders[ids] == claim)
        cached = mine & (self.cached_at[ids] == self.num_blocks)

        # Indices in the ring, from ranks among the blocks that go on top and among those that go below.
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
        """Whether these blocks, held or free, still hold a cached prefix."""
        index = self.cached_at[ids]
        waits = (index >= 0) & (self._ring(index - self.bottom) < self.num_waiting)
        waits &= self.free_list.at[index].get(mode="clip") == ids
        return (index == self.num_blocks) | waits

    def mark_cached(self, ids: jax.Array, wanted: jax.Array) -> "BlockPool":
        """Marks the wanted ids as cached. They must be distinct held blocks."""
        return dataclasses.replace(self, cached_at=put(self.cached_at, ids, wanted, self.num_blocks))

    def forget(self) -> "BlockPool":
        """Removes the cached mark from all blocks. Waiting blocks become ordinary free blocks."""
        return dataclasses.replace(
            self, num_waiting=jnp.zeros_like(self.num_waiting), cached_at=jnp.full_like(self.cached_at, -1)
        )

    def acquire_cached(self, ids: jax.Array, wanted: jax.Array) -> "BlockPool":
        """Adds a holder for each wanted entry of `ids`, which are cached blocks, held or waiting.

        Waiting blocks are removed from the free list, which a prefix sum compacts. This is the only update whose cost
        grows with the pool.
        """
        waiting = wanted & (self.cached_at[ids] != self.num_blocks)
        waiting_ids = self._where(waiting, ids)
        # -1, so that the first holder counts to 0. Repeated ids write the same value.
        holders = self.extra_holders.at[waiting_ids].set(-1, mode="drop")
        cached_at = self.cached_at.at[waiting_ids].set(self.num_blocks, mode="drop")

        # In ring order, the blocks that still wait. (A waiting block need not be cached: see `forget`.)
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
        """Which blocks are free, bool `[blocks]`, False for the null block.

        The cost grows with the pool: use it for statistics, not in a decode step.
        """
        order = jnp.arange(self.num_blocks, dtype=jnp.int32)
        blocks = self.free_list[self._ring(self.bottom + order)]
        return put(jnp.zeros(self.num_blocks, jnp.bool_), blocks, order < self.num_free, True)

    @one_program()
    def num_holders(self) -> jax.Array:
        """Holders of each block, int32 `[blocks]`; 0 for free blocks and the null block. As slow as `is_free`."""
        return jnp.where(self.is_free(), 0, 1 + self.extra_holders).at[0].set(0)

    def _ring(self, indices: jax.Array) -> jax.Array:
        return indices % self.num_blocks

    def _where(self, wanted: jax.Array, indices: jax.Array) -> jax.Array:
        return jnp.where(wanted, indices, self.num_blocks)


def _add(counts: jax.Array, ids: jax.Array, wanted: jax.Array, amount: int) -> jax.Array:
    return counts.at[jnp.where(wanted, ids, counts.shape[0])].add(amount, mode="drop")
