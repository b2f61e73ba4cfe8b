"""The tiles that a program of the decode kernel computes, and the tokens that its queries see in them.

All functions except `make_grid` are traced inside the kernel and compute scalars.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import sizes
from pallas_kernels.common.partition_plan import PartitionPlan
from pallas_kernels.common.sizes import div
from pallas_kernels.decode.config import TILE


@dataclasses.dataclass(frozen=True)
class Partition:
    """The partition and sequence of a program, and the place of its partial."""

    seq: jax.Array
    kv_head: jax.Array
    index: jax.Array  # index of this partition in the sequence
    count: int | jax.Array  # partitions of the sequence; an int if it does not depend on lengths
    length: jax.Array  # int32 [], tokens of the sequence; 0 for an unused entry of a plan
    first_partial: jax.Array  # index of the sequence's first partial

    @property
    def works(self) -> bool | jax.Array:
        """False for an unused entry of a plan and for a partition without tiles."""
        return True if isinstance(self.count, int) else self.index < self.count

    @classmethod
    def of(cls, refs: Any, *, num_partitions: int) -> "Partition":
        """The partition of this program. `refs` has the lengths, and the arrays of a plan or None."""
        if refs.partitions is not None:
            entry, kv_head = lax.axis_index("entry"), lax.axis_index("kv_head")
            seq, index, count = (refs.partitions[entry, i] for i in range(3))
            length = jnp.where(index < count, refs.lengths[seq], 0)
            return cls(seq, kv_head, index, count, length, entry - index)
        # In descending order: the longest runs of a prompt start first, and short ones fill the gaps at the end.
        # [prefill_h100 of benchmarks/results/decisions/]
        seq = refs.lengths.shape[0] - 1 - lax.axis_index("seq")
        partial, kv_head = lax.axis_index("partial"), lax.axis_index("kv_head")
        first_partial = seq * num_partitions
        return cls(seq, kv_head, partial, num_partitions, refs.lengths[seq], first_partial)


def make_grid(plan: PartitionPlan | None, *, seqs: int, num_partials: int, kv_heads: int) -> dict[str, Any]:
    """The grid of a kernel whose programs call `Partition.of`."""
    if plan is None:
        return dict(grid=(seqs, num_partials, kv_heads), grid_names=("seq", "partial", "kv_head"))
    return dict(grid=(plan.total_partitions, kv_heads), grid_names=("entry", "kv_head"))


@dataclasses.dataclass(frozen=True)
class Walk:
    """The tiles of a partition, computed from the sequence's true length."""

    partition: Partition
    window: jax.Array | None  # int32 []
    q_len: int
    num_read: int | jax.Array  # query tokens that are not padding: the last num_read of q_len
    block_size: int
    first_tile: jax.Array  # the first tile of the sequence with a token that some query sees
    num_tiles: jax.Array  # tiles of this partition

    @classmethod
    def of(cls, refs: Any, *, num_partitions: int) -> "Walk":
        partition = Partition.of(refs, num_partitions=num_partitions)
        window, q_len = refs.options.window, refs.q.shape[1]
        num_read = q_len if refs.num_read is None else refs.num_read[partition.seq]
        first_tile, end_tile = sizes.tile_range(partition.length, window, num_read, TILE)
        count = partition.count
        if isinstance(count, int) and count > 1:
            count = jnp.clip(end_tile - first_tile, 1, count)  # a partition without a tile would still write a partial
            partition = dataclasses.replace(partition, count=count)
            end_tile = jnp.where(partition.works, end_tile, first_tile)
        num_tiles = sizes.count_tiles(first_tile, end_tile, partition.count, partition.index)
        return cls(partition, window, q_len, num_read, refs.block_size, first_tile, num_tiles)

    @property
    def seq(self) -> jax.Array:
        return self.partition.seq

    @property
    def length(self) -> jax.Array:
        return self.partition.length

    @property
    def first_query(self) -> jax.Array:
        """The position of the first query; negative if there are more queries than tokens."""
        return self.length - self.q_len

    def tile_at(self, i: jax.Array) -> jax.Array:
        """The index in the sequence of this partition's i-th tile."""
        return self.first_tile + self.partition.index + i * self.partition.count

    def ours_before(self, end: jax.Array) -> jax.Array:
        """The number of this partition's tiles before tile `end` of the sequence."""
        return sizes.count_tiles(self.first_tile, end, self.partition.count, self.partition.index)

    def entries_to_follow(self) -> tuple[jax.Array, jax.Array]:
        """The range of table entries that may be followed: the first, and one past the last."""
        first = div(sizes.first_visible(self.length, self.window, self.num_read), self.block_size)
        return first, sizes.ceil_div(self.length, self.block_size)

    def whole_tiles(self) -> tuple[jax.Array, jax.Array]:
        """The range of this partition's tiles that need no mask, because every row sees all their tokens.

        They are between the start of the last query's window and the first query.
        """
        end = self.ours_before(div(jnp.maximum(self.first_query + 1, 0), TILE))
        if self.window is None:
            return jnp.int32(0), end
        start = self.ours_before(sizes.ceil_div(jnp.maximum(self.length - self.window, 0), TILE))
        start = jnp.minimum(start, self.num_tiles)
        return start, jnp.maximum(end, start)

    def seen(self, tile: jax.Array, shape: tuple[int, int], axis: int, layout: Any) -> jax.Array:
        """bool `shape`: whether some query may see a token of the tile; tokens are on `axis`."""
        tokens = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) + tile * TILE
        seen = tokens < self.length
        if self.window is not None:
            seen = jnp.logical_and(seen, tokens >= sizes.first_visible(self.length, self.window, self.num_read))
        return seen

    def runs(self) -> list[tuple[Any, jax.Array, bool]]:
        """The loops over this partition's tiles: first tile, one past the last, and whether they need a mask."""
        start, end = self.whole_tiles()
        before = [] if self.window is None else [(0, start, True)]
        return [*before, (start, end, False), (end, self.num_tiles, True)]
