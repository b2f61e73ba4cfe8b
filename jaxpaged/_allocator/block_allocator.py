"""The block allocator: which block belongs to whom, as a pytree, inside jit."""

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

MORE_PASSED = 3  # in an `append` a sequence gives back blocks of a group: the number that it may get, and these


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockAllocator(AllocatorState):
    """Block tables, lengths and free blocks of a fixed set of sequences. Immutable: every operation returns a new one.

    Attributes:
        block_tables: int32 `[seqs, max_blocks]`, or with several groups of layers `[groups, seqs, max_blocks]`; row
            i's first `ceil(lengths[i] / block_size)` entries are its blocks, in order; the others are 0.
        lengths: int32 `[seqs]`, in tokens. A row of length 0 is free.
        pool: the free blocks, and how many hold each of the others.
        block_size: tokens in a block (static).
        windows: the window of each group of layers, in tokens, or None (static). All layers of a group have one
            table; all groups have blocks of one pool.
        num_passed: int32 `[groups, seqs]`, the entries at the start of each row that the group's window has passed:
            their blocks were given back, and they may be any number. None if no group has a window.

    Invariants, which `broken_invariants` tests:

    - Block 0, the null block, is never handed out. Every other block is either free or held, never both.
    - A block is held by the table entries that name it, and free if there are none.
    - Sequences share full blocks only. A partly filled last block is in one table row, so writing to a sequence's
      slots past its length changes no other sequence.
    - A block's tokens do not change while it is held. `fork` and `rollback` return the copies that this needs.
    - A refused row stays exactly as it was.

    All operations work on all sequences at once with prefix sums: no loop, no sort, no host. They run inside jit,
    scan, while_loop and vmap. `docs/allocator.md` says what each costs.
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
        """An allocator with all blocks free, to be handed out in the order 1, 2, 3, ...

        Args:
            num_blocks: blocks in the pool, the null block included: `num_blocks - 1` can be handed out.
            block_size: tokens in a block.
            num_seqs: sequences, that is, rows.
            max_blocks_per_seq: the most blocks that one sequence may hold in a group, the width of its table row.
            windows: for each group of layers the `sliding_window` that they attend with, or None. Groups without a
                window come first.

        Raises:
            ValueError: a size or window that is no int or below 1, `num_blocks` below 2, 2^31 slots and more, in the
                pool or in a table row, no group, or one without a window after one with a window.

        Example:
            >>> import jax.numpy as jnp
            >>> from jaxpaged import BlockAllocator
            >>> allocator = BlockAllocator.create(num_blocks=8, block_size=16, num_seqs=2, max_blocks_per_seq=3)
            >>> allocator, slots, ok = allocator.append(jnp.array([3, 1]), q_len=3)
            >>> slots.tolist()  # row 1 has one token: it is last, after two entries of padding
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
        """An allocator with one group's table only, for reading: the layers of the group attend with it.

        Raises:
            ValueError: there is no such group.
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
        """Positions of the newest `q_len` tokens of each sequence, int32 `[seqs, q_len]`; negative: no such token."""
        return self.lengths[:, None] - q_len + jnp.arange(q_len, dtype=jnp.int32)[None]

    def prefix_groups(self, q_len: int = 1, *, query_starts: ArrayLike | None = None) -> PrefixGroups:
        """Sequences that begin with the same blocks, for `prefix_groups` of `paged_attention`.

        It compares the block ids of neighbouring rows, and only full blocks without new tokens are shared. Rows that
        can share blocks should be neighbours; a row without tokens between them does no harm. If m sequences begin with
        the same n blocks, each skips reading n - n / m of them; a sequence joins the group that saves it the most.

        Call it in each step, after the `append`: the groups hold for that step only.

        Args:
            q_len: query tokens of each sequence.
            query_starts: of packed query tokens, int32 `[seqs + 1]`, as in `paged_attention`; `q_len` is then unused.

        Returns:
            The groups. If the allocator's group of layers has a window, they are empty.

        Raises:
            ValueError: several groups of layers: call it on `allocator.group(i)`. `query_starts` of another shape.

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
        if self.windows[0] is not None:  # passed entries may be any number, and attention with a window shares nothing
            num_full = jnp.zeros_like(num_full)
        return prefix_groups.find(self.block_tables, num_full, is_empty, starts)

    def slots(self, seqs: ArrayLike, positions: ArrayLike) -> jax.Array:
        """Slots of packed tokens of several sequences.

        Args:
            seqs: int32, any shape: the row of each token.
            positions: int32, the same shape: its position in that sequence.

        Returns:
            int32, the same shape, or with several groups `[groups, ...]`. For a token that does not exist or whose
            block was given back, `num_blocks * block_size`, which `write_kv` drops.

        Raises:
            ValueError: the two are not int32 of one shape.
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
        """Makes room for new tokens at the end of each sequence.

        A sequence that gets tokens first gives back blocks that the windows of their groups have passed: no new token
        sees them, nor any that may follow. A call gives back as many of each group as its tokens may need, and a few
        more; the others wait for the next call.

        A sequence gets all of its tokens or none; a refused one keeps its tokens. Blocks are granted in row
        order. After the first row that finds too few, every row that needs a new block is refused; rows whose last
        block has room are not. A row is also refused if its table is too narrow, or its count is negative or above
        `q_len`.

        Args:
            num_tokens: int32 `[seqs]`; 0 leaves a sequence as it is. Or bool: which sequences get one token.
            q_len: the most tokens that a sequence may get in this call (static): the width of `slots`. A count above
                it that is known while tracing is an error. None: one token, and `slots` without that axis.
            order: int32 `[seqs]`: the row with the smallest number gets blocks first, equal ones in row order. None:
                row order.

        Returns:
            allocator: the new one.
            slots: int32 `[seqs, q_len]`, or `[seqs]` without `q_len`; with several groups, an axis of groups before
                these: the slots of the new tokens, for `write_kv`. They are at the end of the row, as the queries of
                `paged_attention` do. The rest of the row, or all of a refused one, is `num_blocks * block_size`, which
                `write_kv` drops.
            ok: bool `[seqs]`.

        Raises:
            ValueError: `num_tokens` is not int32 or bool `[seqs]`, `order` is not int32 `[seqs]`, `q_len` is no
                int or below 1, or a known count is above it.
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

        # 1. Who gets blocks: a prefix of the sequences that need some.
        most_new = -(-most // self.block_size)  # in a row
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
        """Gives back all blocks of the marked sequences, which become empty. Freeing an empty one changes nothing.

        A block that another sequence also holds stays held. Blocks go back last first, so that with one group a `free`
        right after an `append` restores the free list.

        Args:
            seqs: bool `[seqs]`.

        Raises:
            ValueError: `seqs` is not bool `[seqs]`.
        """
        return self.let_go(self._rows("seqs", seqs, jnp.bool_))

    def fork(self, parents: ArrayLike, *, replace: bool = False) -> tuple[BlockAllocator, Copies, jax.Array]:
        """Makes rows into copies of others: parallel sampling, beam search.

        Row i becomes what row `parents[i]` was before the call. Full blocks are shared. A partly filled last block has
        one owner: each child gets a block of its own. Copy the tokens in the same jit, before anything else is written:
        `cache = copy_blocks(cache, *copies)`.

        With `replace`, a parent may itself be replaced. Its first child then inherits its last block without a copy,
        if the free blocks suffice for the other copies. A beam search needs at most one free block for each further
        child of such a parent, and for each child of a parent whose row stays.

        A row gets all of its blocks or none, in row order as in `append`. A refused row stays as it was.

        Args:
            parents: int32 `[seqs]`; -1, or a row's own number, leaves the row as it is, and is ok.
            replace: whether a row that holds tokens may become a child: its blocks are given back (static).

        Returns:
            allocator: the new one.
            copies: (source_ids, destination_ids), int32 `[groups * seqs]` each, for `copy_blocks`; 0, 0: no copy.
            ok: bool `[seqs]`; false for a parent that does not exist, an occupied row, or too few free
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
        """Shortens sequences to the given lengths, as when speculative decoding rejects tokens.

        Blocks past the new end are given back. If a sequence then ends inside a block that is shared or cached, it
        gets a block of its own instead. Copy the tokens before anything else is written:
        `cache = copy_blocks(cache, *copies)`.

        No copy is needed if every dropped token was appended after the sequence's last `fork` and `insert`, as in
        speculative decoding after a prompt. The copies are then all 0 and need no `copy_blocks`.

        Blocks that a window has passed are gone: a row goes back as far as to its last `append`, and farther only if
        all that the windows show there is still held.

        A row is shortened as asked or not at all, in row order as in `append`.

        Args:
            lengths: int32 `[seqs]`, at most the present ones. A row's present length leaves it as it is.

        Returns:
            allocator: the new one.
            copies: (source_ids, destination_ids), int32 `[groups * seqs]` each, for `copy_blocks`; 0, 0: no copy.
            ok: bool `[seqs]`; false for a length that is negative, beyond the present one, or back where a window has
                passed, or too few free blocks.

        Raises:
            ValueError: `lengths` is not int32 `[seqs]`.
        """
        lengths = self._rows("lengths", lengths)
        check_range("lengths of rollback", lengths, 0, self.lengths, limit="the present ones")
        return sharing.rollback(self, lengths)

    def broken_invariants(self) -> tuple[str, ...]:
        """The names of the invariants that this state breaks; empty if all is well. On the host, for tests."""
        return inspection.broken_invariants(self)

    def __str__(self) -> str:
        return inspection.describe(self)

    def _rows(self, name: str, values: ArrayLike, dtype: DTypeLike = jnp.int32) -> jax.Array:
        return checked_array(name, values, len(self.lengths), dtype=dtype, which="one for each sequence")
