"""The partitions of each sequence, if a batch's partitions are shared out by length.

XLA computes the plan on the device, before the kernels. `paged_decode` and `portable_decode` follow it, and merge what
it split.
Any plan gives the same result up to rounding: a sequence's tiles go to its partitions in turn, however many there are
of either.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import _sizes

TILE = 64  # tokens by which lengths are counted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartitionPlan:
    """Partitions of each sequence, side by side, at least one. Those left over follow as more of the last sequence's:
    their index is not below the number of its partitions."""

    partitions: jax.Array  # int32 [total_partitions, 3]: sequence, index in it, how many it has
    partition_starts: jax.Array  # int32 [seqs + 1], exclusive prefix sums, the last at most total_partitions

    @property
    def total_partitions(self) -> int:
        return self.partitions.shape[0]


def make(lengths: jax.Array, window: jax.Array | None, *, q_len: int, total_partitions: int) -> PartitionPlan:
    """Shares `total_partitions`, more than there are sequences, out over int32 lengths [seqs]; window is int32 [].

    Whatever the lengths and the window, each sequence gets one at least, and no partition more tiles than `most` =
    ceil(all tiles / (total_partitions - seqs)), for which there are enough: ceil(tiles / most) of each sequence add up
    to at most `total_partitions`.
    """
    seqs = lengths.shape[0]
    first, end = jax.vmap(lambda length: _sizes.tile_range(length, window, q_len, TILE))(lengths)
    tiles = jnp.clip(end - first, 0, 2**30 // seqs)  # so that their sum is an int32
    most = jnp.maximum(-(-tiles.sum(dtype=jnp.int32) // (total_partitions - seqs)), 1)
    return of_counts(jnp.maximum(-(-tiles // most), 1), total_partitions)


def of_counts(counts: jax.Array, total_partitions: int) -> PartitionPlan:
    """The plan with int32 [seqs] partitions of each sequence, at least one and together at most `total_partitions`."""
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    places = jnp.arange(total_partitions, dtype=jnp.int32)
    seq_ids = jnp.searchsorted(starts[1:], places, side="right", method="scan_unrolled").astype(jnp.int32)
    seq_ids = jnp.minimum(seq_ids, counts.shape[0] - 1)
    return PartitionPlan(jnp.stack([seq_ids, places - starts[seq_ids], counts[seq_ids]], axis=1), starts)
