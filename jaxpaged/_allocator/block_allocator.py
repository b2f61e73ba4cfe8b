"""The block allocator: which block belongs to whom, as a pytree, inside jit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._allocator import report, sharing, snapshots, swapping
from jaxpaged._allocator.block_pool import BlockPool
from jaxpaged._allocator.sharing import Copies
from jaxpaged._allocator.state import AllocatorState
from jaxpaged._export import exportable
from jaxpaged._integers import as_int32, checked_size


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockAllocator(AllocatorState):
    """Block tables, lengths and free blocks of a fixed set of sequences. Immutable: every operation returns a new one.

    Attributes:
        block_tables: int32 `[seqs, max_blocks]`; row i's first `ceil(lengths[i] / block_size)` entries are its blocks,
            in order; the others are 0.
        lengths: int32 `[seqs]`, in tokens. A sequence of length 0 is a free seat, unless it is swapped out.
        swapped_lengths: int32 `[seqs]`, in tokens, of sequences that are swapped out; 0 for the others.
        pool: the free blocks, and how many hold each of the others.
        block_size: tokens in a block (static).

    Invariants, which `broken_invariants` tests:

    - Block 0, the null block, is never handed out. Every other block is either free or held, never both.
    - A block's holders are the table entries that name it and the pins that `hold` put on it. It is free when there
      are none.
    - Sequences share full blocks only. A partly filled last block is in one table row, and whoever writes to a
      sequence's slots past its length disturbs nobody.
    - A block's tokens stay as they are while it is held by whoever wrote or was given them: `fork` and `rollback`
      return the copies that keep it so.
    - What is refused is exactly as it was.

    All operations work on all sequences at once with prefix sums: no loop, no sort, no host. They run inside jit,
    scan, while_loop and vmap. `docs/allocator.md` says what each costs.
    """

    @classmethod
    def create(cls, *, num_blocks: int, block_size: int, num_seqs: int, max_blocks: int) -> "BlockAllocator":
        """An allocator with all blocks free, to be handed out in the order 1, 2, 3, ...

        Args:
            num_blocks: blocks in the pool, the null block included: `num_blocks - 1` can be handed out.
            block_size: tokens in a block.
            num_seqs: sequences, that is, rows.
            max_blocks: the most blocks that one sequence may hold, the width of its table row.

        Raises:
            ValueError: a size that is no int or below 1, `num_blocks` below 2, or 2^31 slots and more, in the pool or
                in a table row.

        Example:
            >>> import jax.numpy as jnp, jaxpaged
            >>> allocator = jaxpaged.BlockAllocator.create(num_blocks=8, block_size=16, num_seqs=2, max_blocks=3)
            >>> allocator, slots, ok = allocator.append(jnp.array([3, 1]), max_tokens=3)
            >>> slots.tolist()  # row 1 has one token: it stands last, behind two places of padding
            [[16, 17, 18], [128, 128, 32]]
        """
        num_blocks, block_size = checked_size("num_blocks", num_blocks, 2), checked_size("block_size", block_size)
        num_seqs, max_blocks = checked_size("num_seqs", num_seqs), checked_size("max_blocks", max_blocks)
        if num_blocks * block_size >= 2**31:
            raise ValueError(f"slots are int32: a pool holds less than 2^31 tokens; got {num_blocks=}, {block_size=}.")
        if max_blocks * block_size >= 2**31:
            raise ValueError(
                f"lengths are int32: a sequence holds less than 2^31 tokens; got {max_blocks=}, {block_size=}."
            )
        return cls(
            block_tables=jnp.zeros((num_seqs, max_blocks), jnp.int32),
            lengths=jnp.zeros(num_seqs, jnp.int32),
            swapped_lengths=jnp.zeros(num_seqs, jnp.int32),
            pool=BlockPool.create(num_blocks),
            block_size=block_size,
        )

    def positions(self, q_len: int) -> jax.Array:
        """Where the newest `q_len` tokens of each sequence stand, int32 `[seqs, q_len]`; negative: no such token."""
        return self.lengths[:, None] - q_len + jnp.arange(q_len, dtype=jnp.int32)[None]

    def slots(self, seqs: ArrayLike, positions: ArrayLike) -> jax.Array:
        """Where tokens of sequences stand in the cache, for packed tokens of several sequences.

        Args:
            seqs: int32, any shape: the row of each token.
            positions: int32, the same shape: its position in that sequence.

        Returns:
            int32, the same shape. `num_blocks * block_size`, which `write_kv` drops, where there is no such token.

        Raises:
            ValueError: the two are not int32 of one shape.
        """
        seqs, positions = as_int32(seqs), as_int32(positions)
        if seqs.shape != positions.shape or seqs.dtype != jnp.int32 or positions.dtype != jnp.int32:
            received = f"{seqs.dtype} {list(seqs.shape)} and {positions.dtype} {list(positions.shape)}"
            raise ValueError(f"seqs and positions must be int32 of one shape; got {received}.")
        exists = (seqs >= 0) & (positions >= 0) & (positions < self.lengths.at[seqs].get(mode="fill", fill_value=0))
        block_ids = self.block_tables.at[seqs, positions // self.block_size].get(mode="clip")
        slots = block_ids * self.block_size + positions % self.block_size
        return jnp.where(exists, slots, self.num_blocks * self.block_size)

    def append(
        self, num_tokens: ArrayLike, *, max_tokens: int = 1, order: ArrayLike | None = None
    ) -> tuple["BlockAllocator", jax.Array, jax.Array]:
        """Makes room for new tokens at the end of each sequence.

        All or nothing per sequence: one that is refused is exactly as it was. Blocks are granted in row order, and
        nobody overtakes: behind the first row that finds too few, every row that needs a new block is refused too
        (those whose last block still has room are not). A row is also refused where its table is too narrow, its
        count is negative or above `max_tokens`, or it is swapped out and its count is not 0.

        Args:
            num_tokens: int32 `[seqs]`; 0 leaves a sequence as it is. Or bool: which sequences get one token.
            max_tokens: the most tokens that a sequence may get in this call (static).
            order: int32 `[seqs]`: blocks are granted to the rows from the smallest number to the largest, equal ones
                in row order. None: in row order.

        Returns:
            allocator: the new one.
            slots: int32 `[seqs, max_tokens]`, where each new token goes, for `write_kv`. The tokens stand at the end
                of the row, as `paged_attention` wants its queries; before them, and in refused rows, stands
                `num_blocks * block_size`, which `write_kv` drops.
            ok: bool `[seqs]`.

        Raises:
            ValueError: `num_tokens` is not int32 or bool `[seqs]`, `order` is not int32 `[seqs]`, or `max_tokens` is no
                int or below 1.
        """
        counts = as_int32(num_tokens)
        counts = counts.astype(jnp.int32) if counts.dtype == jnp.bool_ else counts
        num_tokens = self._rows("num_tokens", counts, jnp.int32)
        max_tokens = checked_size("max_tokens", max_tokens)
        order = None if order is None else self._rows("order", order, jnp.int32)
        num_seqs, max_blocks = self.block_tables.shape
        legal = (num_tokens >= 0) & (num_tokens <= jnp.where(self.swapped_lengths == 0, max_tokens, 0))
        lengths = self.lengths + jnp.where(legal, num_tokens, 0)
        legal &= lengths <= max_blocks * self.block_size

        # 1. Who gets blocks: a prefix of the rows that need some.
        held = self.blocks_of(self.lengths)
        needed = jnp.where(legal, self.blocks_of(lengths) - held, 0)
        ok, starts, total = self.grant(legal, needed, order)
        granted = jnp.where(ok, needed, 0)
        lengths = jnp.where(ok, lengths, self.lengths)

        # 2. Their ids, from the top of the free blocks into the tables behind the blocks already held.
        rank = jnp.arange(-(-max_tokens // self.block_size), dtype=jnp.int32)[None]  # no row needs more new blocks
        ids = self.pool.peek(starts[:, None] + rank)
        entries = jnp.where(rank < granted[:, None], held[:, None] + rank, max_blocks + rank)
        rows = jnp.arange(num_seqs, dtype=jnp.int32)[:, None]
        block_tables = self.block_tables.at[rows, entries].set(ids, mode="drop", unique_indices=True)

        # 3. The slots of the new tokens, right-aligned.
        positions = dataclasses.replace(self, lengths=lengths).positions(max_tokens)
        is_new = ok[:, None] & (positions >= self.lengths[:, None])
        block_ids = block_tables.at[rows, positions // self.block_size].get(mode="clip")
        slots = block_ids * self.block_size + positions % self.block_size
        slots = jnp.where(is_new, slots, self.num_blocks * self.block_size)

        return self.with_rows(block_tables, lengths, self.pool.take(total)), slots, ok

    def free(self, seqs: ArrayLike) -> "BlockAllocator":
        """Gives back all blocks of the marked sequences, which become empty. Freeing an empty one changes nothing.

        One that is swapped out is given up, and its seat is free.
        A block that another sequence or a pin holds too stays with them. Blocks go back last first, so that a `free`
        right after an `append` restores the free list.

        Args:
            seqs: bool `[seqs]`.

        Raises:
            ValueError: `seqs` is not bool `[seqs]`.
        """
        return self.let_go(self._rows("seqs", seqs, jnp.bool_))

    def fork(self, parents: ArrayLike, *, replace: bool = False) -> tuple["BlockAllocator", Copies, jax.Array]:
        """Makes rows into copies of others: parallel sampling, beam search.

        Row i becomes what row `parents[i]` was before the call. Full blocks are shared. A partly filled last block has
        one owner: each child gets a block of its own, and the tokens in it must be copied, in the same jit, before
        anything else is written: `cache = copy_blocks(cache, *copies)`. With `replace`, where a parent is itself
        replaced, its first child takes the block over without a copy, if the free blocks suffice for the other copies.
        So a beam search in which every beam goes on needs at most one free block for each child of a parent beyond its
        first; one that ends, and whose row stays, leaves its parent's children to take a block each.

        All or nothing per row, in row order, as in `append`. A refused row is as it was.

        Args:
            parents: int32 `[seqs]`; -1, or a row's own number, leaves it as it is, and is ok.
            replace: false: a row that holds tokens is refused as a child. True: what it held is given back. (Static.)

        Returns:
            allocator: the new one.
            copies: (source_ids, destination_ids), int32 `[seqs]` each, for `copy_blocks`; 0, 0 where there is none.
            ok: bool `[seqs]`; false for a parent that does not exist, a row that is occupied, a parent or row that is
                swapped out, or too few free blocks.

        Raises:
            ValueError: `parents` is not int32 `[seqs]`.

        Example:
            >>> import jax.numpy as jnp, jaxpaged
            >>> allocator = jaxpaged.BlockAllocator.create(num_blocks=9, block_size=4, num_seqs=3, max_blocks=3)
            >>> allocator, _, _ = allocator.append(jnp.array([6, 0, 0]), max_tokens=6)
            >>> allocator, (source_ids, destination_ids), ok = allocator.fork(jnp.array([0, 0, 0]))
            >>> allocator.block_tables.tolist(), source_ids.tolist(), destination_ids.tolist()
            ([[1, 2, 0], [1, 3, 0], [1, 4, 0]], [0, 2, 2], [0, 3, 4])
        """
        return sharing.fork(self, self._rows("parents", parents, jnp.int32), replace)

    def rollback(self, lengths: ArrayLike) -> tuple["BlockAllocator", Copies, jax.Array]:
        """Shortens sequences to the given lengths, as when speculative decoding rejects tokens.

        Blocks beyond are let go. Where a sequence then ends inside a block that is shared, pinned or cached, it gets a
        block of its own in place of that one, and its tokens must be copied before anything else is written:
        `cache = copy_blocks(cache, *copies)`. A sequence never ends so where all that it gives up was appended to it
        since its last `fork`, `hold` and `insert` (speculative decoding behind a prompt): the copies are then all 0
        and may be left alone, and cost nothing.

        All or nothing per row, in row order, as in `append`.

        Args:
            lengths: int32 `[seqs]`, at most the present ones. A row's present length leaves it as it is.

        Returns:
            allocator: the new one.
            copies: (source_ids, destination_ids), int32 `[seqs]` each, for `copy_blocks`; 0, 0 where there is none.
            ok: bool `[seqs]`; false for a length that is negative or beyond the present one, or too few free blocks.

        Raises:
            ValueError: `lengths` is not int32 `[seqs]`.
        """
        return sharing.rollback(self, self._rows("lengths", lengths, jnp.int32))

    def swap_out(self, seqs: ArrayLike) -> tuple["BlockAllocator", jax.Array]:
        """Gives back the blocks of sequences whose tokens move to the host, and keeps their seats.

        The tokens are moved by whoever has the cache, in the same jit and before anything else is written: from the
        blocks returned, and later, at the same places, to those that `swap_in` returns. A block that a sequence
        shares stays with the others, and comes back as one of its own.

        Args:
            seqs: bool `[seqs]`; for a sequence that is empty or swapped out already nothing happens.

        Returns:
            allocator: the new one. What left has length 0 and a `swapped_lengths`; `append` and `fork` refuse it,
                `free` gives it up.
            block_ids: int32 `[seqs, max_blocks]`, the blocks that they had, in order; 0 elsewhere.

        Raises:
            ValueError: `seqs` is not bool `[seqs]`.
        """
        return swapping.swap_out(self, self._rows("seqs", seqs, jnp.bool_))

    def swap_in(self, seqs: ArrayLike) -> tuple["BlockAllocator", jax.Array, jax.Array]:
        """Gives new blocks to sequences that were swapped out: all or nothing for each, in row order, as in `append`.

        Args:
            seqs: bool `[seqs]`.

        Returns:
            allocator: the new one.
            block_ids: int32 `[seqs, max_blocks]`, where each block of what came back goes; 0 elsewhere.
            ok: bool `[seqs]`; false for a marked row that is not swapped out, or for too few free blocks.

        Raises:
            ValueError: `seqs` is not bool `[seqs]`.

        Example:
            >>> import jax.numpy as jnp, jaxpaged
            >>> allocator = jaxpaged.BlockAllocator.create(num_blocks=9, block_size=4, num_seqs=2, max_blocks=3)
            >>> allocator, _, _ = allocator.append(jnp.array([6, 0]), max_tokens=6)
            >>> allocator, old_ids = allocator.swap_out(jnp.array([True, False]))
            >>> allocator, _, _ = allocator.append(jnp.array([0, 3]), max_tokens=3)
            >>> allocator, new_ids, ok = allocator.swap_in(jnp.array([True, False]))
            >>> old_ids[0].tolist(), new_ids[0].tolist()
            ([1, 2, 0], [2, 3, 0])
        """
        return swapping.swap_in(self, self._rows("seqs", seqs, jnp.bool_))

    def still_holds(self, snapshot: "BlockAllocator") -> jax.Array:
        """Whether going back to `snapshot` is sound, bool `[]`.

        That is, whether every block of its sequences was held ever since, and none of their tokens given up: then
        what was written for them is still there. (Sequences that were shortened inside a block after the snapshot
        count as having given up that block's tokens, even those past the snapshot's length.)

        Args:
            snapshot: an allocator that this one came from, by any operations.

        Raises:
            ValueError: `snapshot` is of other sizes.
        """
        return snapshots.still_holds(self, snapshot)

    def hold(self, snapshot: "BlockAllocator") -> tuple["BlockAllocator", jax.Array]:
        """Pins the blocks of a snapshot's sequences: whoever frees them, they stay, until `release(snapshot)`.

        Args:
            snapshot: an allocator that this one came from, or this one itself.

        Returns:
            allocator: the new one, unchanged where not ok.
            ok: bool `[]`, `still_holds(snapshot)`.

        Raises:
            ValueError: `snapshot` is of other sizes.

        Example:
            >>> import jax.numpy as jnp, jaxpaged
            >>> snapshot = jaxpaged.BlockAllocator.create(num_blocks=4, block_size=4, num_seqs=1, max_blocks=3)
            >>> snapshot, _, _ = snapshot.append(jnp.array([6]), max_tokens=6)
            >>> allocator, ok = snapshot.hold(snapshot)
            >>> allocator = allocator.free(jnp.array([True]))
            >>> int(allocator.num_held)
            2
            >>> allocator, ok = allocator.restore(snapshot)
            >>> allocator.lengths.tolist()
            [6]
        """
        return snapshots.hold(self, snapshot)

    def release(self, snapshot: "BlockAllocator") -> tuple["BlockAllocator", jax.Array]:
        """Takes back the pins of `hold(snapshot)`; blocks that nobody else holds are free.

        A block counts its pins and does not know whose they are: releasing a snapshot that was never held takes back
        the pins that another one put on the same blocks. Release exactly what was held.

        Args:
            snapshot: one that was held.

        Returns:
            allocator: the new one, unchanged where not ok.
            ok: bool `[]`; false where a block of the snapshot is not pinned, as after releasing it before.

        Raises:
            ValueError: `snapshot` is of other sizes.
        """
        return snapshots.release(self, snapshot)

    def restore(self, snapshot: "BlockAllocator") -> tuple["BlockAllocator", jax.Array]:
        """Goes back to `snapshot` if that is sound; everything since, pins included, is undone.

        Using the old allocator itself does the same where `still_holds(snapshot)`, but for three things that `restore`
        sees to: snapshots taken since are no longer held to be sound, cached prefixes whose blocks may have been
        overwritten since are forgotten, and where it is not sound nothing changes. To go back twice, keep what the
        first `restore` returned.

        Returns:
            allocator: the snapshot, or where not ok this one, unchanged.
            ok: bool `[]`, `still_holds(snapshot)`.

        Raises:
            ValueError: `snapshot` is of other sizes.
        """
        return snapshots.restore(self, snapshot)

    def freed_since(self, before: "BlockAllocator") -> jax.Array:
        """Blocks that sequences held in `before` and that are free now, for `zero_blocks`.

        Args:
            before: an allocator that this one came from.

        Returns:
            int32 `[seqs * max_blocks]`, 0 where there is none. Blocks in which a cached prefix waits are not among
            them, nor those that were handed out again, so that zeroing them takes nothing from anybody.

        Raises:
            ValueError: `before` is of other sizes.
        """
        return snapshots.freed_since(self, before)

    def broken_invariants(self) -> tuple[str, ...]:
        """The names of the invariants that this state breaks; empty if all is well. On the host, for tests."""
        return report.broken_invariants(self)

    def __str__(self) -> str:
        return report.describe(self)

    def _rows(self, name: str, values: ArrayLike, dtype: Any) -> jax.Array:
        array = as_int32(values)
        if array.shape != self.lengths.shape or array.dtype != dtype:
            wanted = f"{jnp.dtype(dtype).name} {list(self.lengths.shape)}"
            raise ValueError(f"{name} must be {wanted}, one for each sequence; got {array.dtype} {list(array.shape)}.")
        return array
