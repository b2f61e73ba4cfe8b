"""The block allocator: a pytree that assigns cache blocks to sequences, inside `jax.jit`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxpaged._allocator import inspection, prefix_groups, sharing
from jaxpaged._allocator.block_pool import BlockPool
from jaxpaged._allocator.prefix_groups import PrefixGroups
from jaxpaged._allocator.sharing import Copies
from jaxpaged._allocator.state import AllocatorState, Window, checked_windows
from jaxpaged._debug import check_range
from jaxpaged._integers import as_int32, checked_array, checked_query_starts, checked_size, known_values
from jaxpaged._one_program import one_program
from jaxpaged._public_state import public_state

MORE_PASSED = 3  # `append` releases at most this many passed blocks more than it may grant, per sequence and group


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockAllocator(AllocatorState):
    """Assigns the blocks of a pool to a fixed number of sequences. Immutable: every operation returns a new allocator.

    Attributes:
        block_tables: int32 `[seqs, max_blocks]`, or `[groups, seqs, max_blocks]` with several layer groups. The first
            `ceil(lengths[i] / block_size)` entries of row i are the sequence's blocks, in order; the others are 0.
        lengths: int32 `[seqs]`, length of each sequence in tokens. A row of length 0 is free.
        pool: the free blocks, and the number of holders of each block.
        block_size: tokens per block (static).
        windows: sliding window of each layer group in tokens, or None (static). The layers of a group share one block
            table; all groups share one pool.
        num_passed: int32 `[groups, seqs]`, number of entries at the start of each row that the group's window has
            passed. Their blocks are released, and the entries may hold any number. None if no group has a window.

    Invariants, which `broken_invariants` checks:

    - Block 0, the null block, is never handed out. Every other block is either free or held, never both.
    - A block is held by the table entries that name it. It is free if no entry does.
    - Sequences share only full blocks. A partly filled last block is in one table row, so that writing to a sequence's
      slots past its length changes no other sequence.
    - The tokens of a block do not change while it is held. `fork` and `rollback` return the copies that this needs.
    - A refused row does not change, except that `append` may release blocks that its windows have passed.

    Every operation handles all sequences at once with prefix sums, without loops, sorts or the host. Operations work
    inside jit, scan, while_loop and vmap. `docs/allocator.md` lists their costs.
    """

    @classmethod
    def create(
        cls,
        *,
        num_blocks: int,
        block_size: int,
        num_seqs: int,
        max_blocks_per_seq: int,
        windows: Sequence[Window] = (None,),
    ) -> BlockAllocator:
        """Creates an allocator with all blocks free. Blocks are handed out in the order 1, 2, 3, ...

        Args:
            num_blocks: blocks in the pool, including the null block; `num_blocks - 1` can be handed out.
            block_size: tokens per block.
            num_seqs: number of sequences, the rows of the tables.
            max_blocks_per_seq: maximum number of blocks of a sequence in each group, the width of a table row.
            windows: for each layer group the `sliding_window` of its layers in tokens, or None. Groups without a
                window come first.

        Raises:
            ValueError: a size or window is not an int or below 1; `num_blocks` is below 2; the pool or a table row has
                2^31 slots or more; `windows` is empty, or has None after a window.

        Example:
            >>> import jax.numpy as jnp
            >>> from jaxpaged import BlockAllocator
            >>> allocator = BlockAllocator.create(num_blocks=8, block_size=16, num_seqs=2, max_blocks_per_seq=3)
            >>> allocator, slots, ok = allocator.append(jnp.array([3, 1]), q_len=3)
            >>> slots.tolist()  # row 1 gets one token: two entries of padding, then its slot
            [[16, 17, 18], [128, 128, 32]]
        """
        num_blocks, block_size = checked_size("num_blocks", num_blocks, 2), checked_size("block_size", block_size)
        num_seqs = checked_size("num_seqs", num_seqs)
        max_blocks_per_seq = checked_size("max_blocks_per_seq", max_blocks_per_seq)
        windows = checked_windows(windows)
        if not windows or None in windows[windows.count(None) :]:
            raise ValueError(f"windows must have one group or more, those without a window first; got {windows}.")
        if num_blocks * block_size >= 2**31:
            raise ValueError(f"slots are int32: a pool holds less than 2^31 tokens; got {num_blocks=}, {block_size=}.")
        if max_blocks_per_seq * block_size >= 2**31:
            raise ValueError(
                f"lengths are int32: a sequence holds less than 2^31 tokens; got {max_blocks_per_seq=}, {block_size=}."
            )
        return cls._create(num_blocks, block_size, num_seqs, max_blocks_per_seq, windows)

    @staticmethod
    @one_program("num_blocks", "block_size", "num_seqs", "max_blocks_per_seq", "windows")
    def _create(
        num_blocks: int, block_size: int, num_seqs: int, max_blocks_per_seq: int, windows: tuple[Window, ...]
    ) -> BlockAllocator:
        has_windows, groups = windows[-1] is not None, () if len(windows) == 1 else (len(windows),)
        return BlockAllocator(
            block_tables=jnp.zeros((*groups, num_seqs, max_blocks_per_seq), jnp.int32),
            lengths=jnp.zeros(num_seqs, jnp.int32),
            pool=BlockPool.create(num_blocks),
            block_size=block_size,
            windows=windows,
            num_passed=jnp.zeros((len(windows), num_seqs), jnp.int32) if has_windows else None,
        )

    def group(self, index: int) -> BlockAllocator:
        """A read-only view of one layer group, with which the layers of the group attend.

        Raises:
            ValueError: `index` is not from 0 to `num_groups - 1`.
        """
        if not 0 <= index < self.num_groups:
            raise ValueError(f"a group is from 0 to {self.num_groups - 1}, the groups of the windows; got {index!r}.")
        if self.num_groups == 1:
            return self
        window, num_passed = self.windows[index], self.num_passed
        return dataclasses.replace(
            self,
            block_tables=self.block_tables[index],
            windows=(window,),
            num_passed=None if window is None or num_passed is None else num_passed[index : index + 1],
        )

    @one_program("q_len")
    def positions(self, q_len: int) -> jax.Array:
        """Positions of the last `q_len` tokens of each sequence, int32 `[seqs, q_len]`. Negative: no such token."""
        return self.lengths[:, None] - q_len + jnp.arange(q_len, dtype=jnp.int32)[None]

    def prefix_groups(self, q_len: int = 1, *, query_starts: ArrayLike | None = None) -> PrefixGroups:
        """Groups sequences that begin with the same blocks, for the `prefix_groups` argument of `paged_attention`.

        Attention then reads the shared blocks once per group: if m sequences begin with the same n blocks, each skips
        n - n / m block reads on average. A sequence joins the group that saves it the most. Only neighbouring rows form
        a group, so place sequences with a common prefix in neighbouring rows; empty rows between them are skipped. Only
        full blocks without new tokens are shared.

        Call it in each step, after `append`. The groups are valid for that step only.

        Args:
            q_len: number of query tokens of each sequence.
            query_starts: int32 `[seqs + 1]`, for packed query tokens, as in `paged_attention`. Replaces `q_len`.

        Returns:
            The groups. They share nothing if the layer group has a window.

        Raises:
            ValueError: the allocator has several layer groups (call it on `allocator.group(i)`), `q_len` is not an int
                or below 1, or `query_starts` is not int32 `[seqs + 1]`.

        Example:
            >>> import jax.numpy as jnp, jaxpaged
            >>> allocator = jaxpaged.BlockAllocator.create(num_blocks=8, block_size=2, num_seqs=3, max_blocks_per_seq=4)
            >>> allocator, *_ = allocator.append(jnp.array([5, 0, 0]), q_len=5)
            >>> allocator, copies, ok = allocator.fork(jnp.array([-1, 0, 0]))
            >>> allocator, slots, ok = allocator.append(jnp.array([1, 1, 1]))
            >>> allocator.prefix_groups().num_blocks.tolist()
            [2, 2, 2]
        """
        if self.num_groups > 1:
            raise ValueError(f"the allocator has {self.num_groups} groups; call it on allocator.group(i).")
        starts = None if query_starts is None else checked_query_starts(query_starts, self.lengths.shape[0])
        return self._prefix_groups(checked_size("q_len", q_len), starts)

    @one_program("q_len")
    def _prefix_groups(self, q_len: int, starts: jax.Array | None) -> PrefixGroups:
        if starts is None:
            starts = jnp.arange(self.lengths.shape[0] + 1, dtype=jnp.int32) * q_len
            is_empty = self.lengths == 0
        else:
            is_empty = starts[1:] <= starts[:-1]
        num_full = jnp.maximum(self.lengths - jnp.diff(starts), 0) // self.block_size
        if self.windows[0] is not None:  # attention with a window shares nothing, and passed entries are arbitrary
            num_full = jnp.zeros_like(num_full)
        return prefix_groups.find(self.block_tables, num_full, is_empty, starts)

    def slots(self, seqs: ArrayLike, positions: ArrayLike) -> jax.Array:
        """Looks up the cache slots of existing tokens.

        Args:
            seqs: int32, any shape: row of each token.
            positions: int32, the same shape: position of each token in its sequence.

        Returns:
            int32, the same shape, or `[groups, ...]` with several layer groups. A token that does not exist or whose
            block was released gets `num_blocks * block_size`, which `write_kv` drops.

        Raises:
            ValueError: `seqs` and `positions` are not int32, or differ in shape.
        """
        seqs, positions = as_int32(seqs), as_int32(positions)
        if seqs.shape != positions.shape or seqs.dtype != jnp.int32 or positions.dtype != jnp.int32:
            received = f"{seqs.dtype} {list(seqs.shape)} and {positions.dtype} {list(positions.shape)}"
            raise ValueError(f"seqs and positions must be int32 of one shape; got {received}.")
        return self._slots(seqs, positions)

    @one_program()
    def _slots(self, seqs: jax.Array, positions: jax.Array) -> jax.Array:
        exists = (seqs >= 0) & (positions >= 0) & (positions < self.lengths.at[seqs].get(mode="fill", fill_value=0))
        column = positions // self.block_size
        block_ids = self.block_tables.at[..., seqs, column].get(mode="clip")
        offset, exists, column = (
            jnp.broadcast_to(x, block_ids.shape) for x in (positions % self.block_size, exists, column)
        )
        slots = block_ids * self.block_size + offset
        if self.num_passed is not None:
            exists &= column >= self.num_passed.at[:, seqs].get(mode="clip").reshape(column.shape)
        return jnp.where(exists, slots, self.num_blocks * self.block_size)

    def append(
        self, num_tokens: ArrayLike, *, q_len: int | None = None, order: ArrayLike | None = None
    ) -> tuple[BlockAllocator, jax.Array, jax.Array]:
        """Appends room for new tokens to each sequence, and returns the slots to write them to.

        A sequence gets room for all of its new tokens or for none; a refused sequence keeps its tokens. Blocks are
        granted in row order. Once a row needs more blocks than are left, every later row that needs a new block is
        refused too; rows that fit into their last block are not. A row is also refused if its tokens exceed its table
        row, or if its count is negative or above `q_len`.

        With sliding windows, a sequence that requests tokens first releases blocks that its windows have passed, since
        no new or later token sees them. For each group a call releases at most a few blocks more than the tokens may
        need, and the next calls release the rest.

        Args:
            num_tokens: int32 `[seqs]`, number of new tokens; 0 leaves a sequence unchanged. Or bool `[seqs]`: True
                appends one token.
            q_len: maximum of `num_tokens`, and the width of `slots` (static). None: at most one token, and `slots` has
                no such axis.
            order: int32 `[seqs]`: rows with smaller numbers get blocks first, and equal numbers go in row order. None:
                row order.

        Returns:
            allocator: the new allocator.
            slots: int32 `[seqs, q_len]`, or `[seqs]` if `q_len` is None, after a leading axis of groups if there are
                several: slots of the new tokens, for `write_kv`. They are right-aligned, like the queries of
                `paged_attention`. Padding, and all slots of a refused row, are `num_blocks * block_size`, which
                `write_kv` drops.
            ok: bool `[seqs]`, False for refused rows.

        Raises:
            ValueError: `num_tokens` is not int32 or bool `[seqs]`, `order` is not int32 `[seqs]`, `q_len` is not an
                int or below 1, or a count that is known at trace time is above `q_len`.
        """
        counts, known = as_int32(num_tokens), known_values(num_tokens)
        counts = counts.astype(jnp.int32) if counts.dtype == jnp.bool_ else counts
        num_tokens = self._rows("num_tokens", counts)
        q_len = None if q_len is None else checked_size("q_len", q_len)
        most = 1 if q_len is None else q_len
        if known is not None and known.max() > most:
            row = int(known.argmax())
            raise ValueError(
                f"num_tokens must be at most q_len={most}, the width of the slots; got {known[row]} for sequence "
                f"{row}. Pass q_len={known[row]}."
            )
        check_range("num_tokens of append", num_tokens, 0, most, limit=f"q_len={most}")
        order = None if order is None else self._rows("order", order)
        return self._append(num_tokens, order, q_len)

    @one_program("q_len")
    def _append(
        self, num_tokens: jax.Array, order: jax.Array | None, q_len: int | None
    ) -> tuple[BlockAllocator, jax.Array, jax.Array]:
        num_rows, max_blocks = self.rows.shape
        most = 1 if q_len is None else q_len
        legal = (num_tokens >= 0) & (num_tokens <= most)
        lengths = self.lengths + jnp.where(legal, num_tokens, 0)
        legal &= lengths <= max_blocks * self.block_size

        # 1. The sequences that get blocks: a prefix of those that need some.
        most_new = -(-most // self.block_size)  # per row
        self = self.let_go_passed(legal & (num_tokens > 0), most_new + MORE_PASSED)
        held = self.num_blocks_for(self.lengths)
        needed = self.per_row(jnp.where(legal, self.num_blocks_for(lengths) - held, 0))
        ok, starts, total = self.grant(legal, needed, order)
        granted = jnp.where(self.per_row(ok), needed, 0)
        lengths = jnp.where(ok, lengths, self.lengths)

        # 2. Their ids, from the top of the free blocks into the tables, after the blocks already held.
        rank = jnp.arange(most_new, dtype=jnp.int32)[None]
        ids = self.pool.peek(starts[:, None] + rank)
        entries = jnp.where(rank < granted[:, None], self.per_row(held)[:, None] + rank, max_blocks + rank)
        rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
        tables = self.rows.at[rows, entries].set(ids, mode="drop", unique_indices=True)

        # 3. The slots of the new tokens, right-aligned.
        positions = dataclasses.replace(self, lengths=lengths).positions(most)
        is_new = self.per_row(ok[:, None] & (positions >= self.lengths[:, None]))
        positions = self.per_row(positions)
        block_ids = tables.at[rows, positions // self.block_size].get(mode="clip")
        slots = block_ids * self.block_size + positions % self.block_size
        slots = jnp.where(is_new, slots, self.num_blocks * self.block_size)
        slots = slots if self.num_groups == 1 else slots.reshape(self.num_groups, -1, most)

        return self.with_rows(tables, lengths, self.pool.take(total)), slots[..., 0] if q_len is None else slots, ok

    def free(self, seqs: ArrayLike) -> BlockAllocator:
        """Releases all blocks of the marked sequences, which become empty. Freeing an empty sequence changes nothing.

        A block that another sequence also holds stays held. A sequence's last block is released first, so that with
        one layer group, `free` right after `append` restores the free list.

        Args:
            seqs: bool `[seqs]`, True for the sequences to free.

        Returns:
            The new allocator.

        Raises:
            ValueError: `seqs` is not bool `[seqs]`.
        """
        return self.let_go(self._rows("seqs", seqs, jnp.bool_))

    def fork(self, parents: ArrayLike, *, replace: bool = False) -> tuple[BlockAllocator, Copies, jax.Array]:
        """Copies sequences to other rows, for parallel sampling and beam search.

        Row i becomes a copy of row `parents[i]` as it was before the call. Full blocks are shared. A partly filled
        last block is not: each child gets its own copy. Copy its tokens with `cache = copy_blocks(cache, *copies)`, in
        the same jit and before any other write.

        With `replace=True`, a row that holds tokens may become a child, even if it is a parent itself. The first child
        of a replaced parent inherits its last block without a copy, if there are enough free blocks for all other
        copies. A beam search then needs at most one free block for each further child of a replaced parent, and one
        for each child of a parent whose row stays.

        A row gets all of its blocks or none, in row order as in `append`. A refused row does not change.

        Args:
            parents: int32 `[seqs]`, row to copy. -1 or the row's own number leaves the row unchanged, with `ok` True.
            replace: whether rows that hold tokens may become children; their blocks are released (static).

        Returns:
            allocator: the new allocator.
            copies: (source_ids, destination_ids), int32 `[groups * seqs]` each, for `copy_blocks`. (0, 0): no copy.
            ok: bool `[seqs]`, False if the parent does not exist, the row is occupied, or there are too few free
                blocks.

        Raises:
            ValueError: `parents` is not int32 `[seqs]`.

        Example:
            >>> import jax.numpy as jnp, jaxpaged
            >>> allocator = jaxpaged.BlockAllocator.create(num_blocks=9, block_size=4, num_seqs=3, max_blocks_per_seq=3)
            >>> allocator, _, _ = allocator.append(jnp.array([6, 0, 0]), q_len=6)
            >>> allocator, (source_ids, destination_ids), ok = allocator.fork(jnp.array([0, 0, 0]))
            >>> allocator.block_tables.tolist(), source_ids.tolist(), destination_ids.tolist()
            ([[1, 2, 0], [1, 3, 0], [1, 4, 0]], [0, 2, 2], [0, 3, 4])
        """
        parents = self._rows("parents", parents)
        check_range("parents of fork", parents, -1, len(self.lengths) - 1)
        return sharing.fork(self, parents, replace)

    def rollback(self, lengths: ArrayLike) -> tuple[BlockAllocator, Copies, jax.Array]:
        """Shortens sequences to the given lengths, for example when speculative decoding rejects tokens.

        Blocks past the new end are released. A sequence that then ends inside a shared or cached block gets its own
        copy of that block. Copy the tokens with `cache = copy_blocks(cache, *copies)`, before any other write.

        No copy is needed if every dropped token was appended after the sequence's last `fork` and `insert`, as in
        speculative decoding after a prompt. All copies are then (0, 0), and `copy_blocks` can be left out.

        Blocks that a window has passed cannot be restored. A rollback to the length before the last `append` always
        works. A longer one works only if the sequence still holds all tokens that its windows show at the new end.

        A row is shortened as requested or not at all, in row order as in `append`.

        Args:
            lengths: int32 `[seqs]`, new lengths in tokens, at most the current ones. The current length leaves a row
                unchanged.

        Returns:
            allocator: the new allocator.
            copies: (source_ids, destination_ids), int32 `[groups * seqs]` each, for `copy_blocks`. (0, 0): no copy.
            ok: bool `[seqs]`, False if the length is negative or above the current one, the windows have passed tokens
                that they show at the new end, or there are too few free blocks.

        Raises:
            ValueError: `lengths` is not int32 `[seqs]`.
        """
        lengths = self._rows("lengths", lengths)
        check_range("lengths of rollback", lengths, 0, self.lengths, limit="the present ones")
        return sharing.rollback(self, lengths)

    def broken_invariants(self) -> tuple[str, ...]:
        """Names of the invariants that this state violates, empty if none. Runs on the host, for tests."""
        return inspection.broken_invariants(self)

    def __str__(self) -> str:
        return inspection.describe(self)

    def _rows(self, name: str, values: ArrayLike, dtype: DTypeLike = jnp.int32) -> jax.Array:
        return checked_array(name, values, len(self.lengths), dtype=dtype, which="one for each sequence")
