"""The block allocator: which block belongs to whom, as a pytree, inside jit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._export import exportable


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockAllocator:
    """Block tables, lengths and free blocks of a fixed set of sequences. Immutable: every operation returns a new one.

    Attributes:
        block_tables: int32 `[seqs, max_blocks]`; row i's first `ceil(lengths[i] / block_size)` entries are its blocks,
            in order; the others are 0.
        lengths: int32 `[seqs]`, in tokens. A sequence of length 0 is a free seat.
        free_list: int32 `[blocks]`, a stack: its first `num_free` entries are the free blocks, the last of them next.
        num_free: int32 `[]`.
        block_size: tokens in a block (static).

    Invariants: block 0, the null block, is never handed out; every other block is in exactly one place, the free
    stack or one table row. Keeping an old allocator and returning to it is a rollback. It is sound while no block that
    the old one holds was freed since, handed to another sequence, and written by it.

    All operations work on all sequences at once with prefix sums: no loop, no sort, no host. They run inside jit,
    scan, while_loop and vmap.
    """

    block_tables: jax.Array
    lengths: jax.Array
    free_list: jax.Array
    num_free: jax.Array
    block_size: int = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def create(cls, num_blocks: int, block_size: int, num_seqs: int, max_blocks: int) -> "BlockAllocator":
        """An allocator with all blocks free, to be handed out in the order 1, 2, 3, ...

        Args:
            num_blocks: blocks in the pool, the null block included: `num_blocks - 1` can be handed out.
            block_size: tokens in a block.
            num_seqs: sequences, that is, rows.
            max_blocks: the most blocks that one sequence may hold, the width of its table row.

        Raises:
            ValueError: a size below 1, `num_blocks` below 2, or 2^31 slots and more.

        Example:
            >>> import jax.numpy as jnp, jaxpaged
            >>> allocator = jaxpaged.BlockAllocator.create(num_blocks=8, block_size=16, num_seqs=2, max_blocks=3)
            >>> allocator, slots, ok = allocator.append(jnp.array([3, 1]), max_tokens=3)
            >>> slots.tolist()  # row 1 has one token: it stands last, behind two places of padding
            [[16, 17, 18], [128, 128, 32]]
        """
        for name, size, least in (
            ("num_blocks", num_blocks, 2),
            ("block_size", block_size, 1),
            ("num_seqs", num_seqs, 1),
            ("max_blocks", max_blocks, 1),
        ):
            if size < least:
                raise ValueError(f"{name} must be at least {least}; got {name}={size}.")
        if num_blocks * block_size >= 2**31:
            raise ValueError(f"slots are int32: a pool holds less than 2^31 tokens; got {num_blocks=}, {block_size=}.")
        return cls(
            block_tables=jnp.zeros((num_seqs, max_blocks), jnp.int32),
            lengths=jnp.zeros(num_seqs, jnp.int32),
            free_list=jnp.arange(num_blocks - 1, -1, -1, dtype=jnp.int32),
            num_free=jnp.asarray(num_blocks - 1, jnp.int32),
            block_size=block_size,
        )

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return self.free_list.shape[-1]

    @property
    def num_held(self) -> jax.Array:
        """Blocks that sequences hold, int32 `[]`."""
        return self.num_blocks - 1 - self.num_free

    def positions(self, q_len: int) -> jax.Array:
        """Where the newest `q_len` tokens of each sequence stand, int32 `[seqs, q_len]`; negative: no such token."""
        return self.lengths[:, None] - q_len + jnp.arange(q_len, dtype=jnp.int32)[None]

    def append(self, num_tokens: ArrayLike, *, max_tokens: int = 1) -> tuple["BlockAllocator", jax.Array, jax.Array]:
        """Makes room for new tokens at the end of each sequence.

        All or nothing per sequence: one that is refused is exactly as it was. Blocks are granted in row order, and
        nobody overtakes: behind the first row that finds too few, every row that needs a new block is refused too
        (those whose last block still has room are not). A row is also refused where its table is too narrow, or its
        count is negative or above `max_tokens`.

        Args:
            num_tokens: int32 `[seqs]`; 0 leaves a sequence as it is.
            max_tokens: the most tokens that a sequence may get in this call (static).

        Returns:
            allocator: the new one.
            slots: int32 `[seqs, max_tokens]`, where each new token goes, for `write_kv`. The tokens stand at the end
                of the row, as `paged_attention` wants its queries; before them, and in refused rows, stands
                `num_blocks * block_size`, which `write_kv` drops.
            ok: bool `[seqs]`.

        Raises:
            ValueError: `num_tokens` is not int32 `[seqs]`, or `max_tokens` is below 1.
        """
        num_tokens = self._rows("num_tokens", num_tokens, jnp.int32)
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1; got {max_tokens=}.")
        num_seqs, max_blocks = self.block_tables.shape
        legal = (num_tokens >= 0) & (num_tokens <= max_tokens)
        lengths = self.lengths + jnp.where(legal, num_tokens, 0)
        legal &= lengths <= max_blocks * self.block_size

        # 1. Who gets blocks: a prefix of the rows that need some.
        held = self._blocks_of(self.lengths)
        needed = jnp.where(legal, self._blocks_of(lengths) - held, 0)
        ends = jnp.cumsum(needed, dtype=jnp.int32)
        ok = legal & ((needed == 0) | (ends <= self.num_free))
        granted = jnp.where(ok, needed, 0)
        lengths = jnp.where(ok, lengths, self.lengths)

        # 2. Their ids, from the top of the stack into the tables behind the blocks already held.
        rank = jnp.arange(-(-max_tokens // self.block_size), dtype=jnp.int32)[None]  # no row needs more new blocks
        from_top = (ends - needed)[:, None] + rank
        ids = self.free_list.at[self.num_free - 1 - from_top].get(mode="clip")
        entries = jnp.where(rank < granted[:, None], held[:, None] + rank, max_blocks + rank)
        rows = jnp.arange(num_seqs, dtype=jnp.int32)[:, None]
        block_tables = self.block_tables.at[rows, entries].set(ids, mode="drop", unique_indices=True)

        # 3. The slots of the new tokens, right-aligned.
        positions = dataclasses.replace(self, lengths=lengths).positions(max_tokens)
        is_new = ok[:, None] & (positions >= self.lengths[:, None])
        block_ids = block_tables.at[rows, positions // self.block_size].get(mode="clip")
        slots = block_ids * self.block_size + positions % self.block_size
        slots = jnp.where(is_new, slots, self.num_blocks * self.block_size)

        allocator = dataclasses.replace(
            self, block_tables=block_tables, lengths=lengths, num_free=self.num_free - granted.sum(dtype=jnp.int32)
        )
        return allocator, slots, ok

    def free(self, seqs: ArrayLike) -> "BlockAllocator":
        """Gives back all blocks of the marked sequences, which become empty. Freeing an empty one changes nothing.

        Blocks go back last first, so that a `free` right after an `append` restores the stack.

        Args:
            seqs: bool `[seqs]`.

        Raises:
            ValueError: `seqs` is not bool `[seqs]`.
        """
        seqs = self._rows("seqs", seqs, jnp.bool_)
        max_blocks = self.block_tables.shape[1]
        returned = jnp.where(seqs, self._blocks_of(self.lengths), 0)
        ends = jnp.cumsum(returned, dtype=jnp.int32)
        total = returned.sum(dtype=jnp.int32)
        rank = jnp.arange(max_blocks, dtype=jnp.int32)[None]
        place = self.num_free + total - 1 - ((ends - returned)[:, None] + rank)
        dropped = self.num_blocks + jnp.arange(self.block_tables.size, dtype=jnp.int32).reshape(place.shape)
        place = jnp.where(rank < returned[:, None], place, dropped)
        return dataclasses.replace(
            self,
            block_tables=jnp.where(seqs[:, None], 0, self.block_tables),
            lengths=jnp.where(seqs, 0, self.lengths),
            free_list=self.free_list.at[place].set(self.block_tables, mode="drop", unique_indices=True),
            num_free=self.num_free + total,
        )

    def _blocks_of(self, lengths: jax.Array) -> jax.Array:
        return -(-lengths // self.block_size)

    def _rows(self, name: str, values: ArrayLike, dtype: Any) -> jax.Array:
        array = jnp.asarray(values)
        if array.shape != self.lengths.shape or array.dtype != dtype:
            wanted = f"{jnp.dtype(dtype).name} {list(self.lengths.shape)}"
            raise ValueError(f"{name} must be {wanted}, one for each sequence; got {array.dtype} {list(array.shape)}.")
        return array
