"""The partitions of each sequence, if a batch's partitions are shared out by length.

XLA computes the plan on the device, before the kernel. The decode kernel follows it, and merges the partitions.
Any plan gives the same result up to rounding: a sequence's tiles go to its partitions in turn, whatever the number of
either.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common import sizes

TILE = 64  # tokens by which lengths are counted
LEAST_TILES = 8  # a sequence of no more stays whole: shorter partitions cost more to merge than they even out

LONG = 3072  # tokens of a KV head for each SM


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartitionPlan:
    """Partitions of each sequence, at least one, the longest first. Those left over come last, as more of the last
    sequence's: their index is not below the number of its partitions."""

    partitions: jax.Array  # int32 [total_partitions, 3]: sequence, index in it, how many it has
    partition_starts: jax.Array  # int32 [seqs + 1], exclusive prefix sums, the last at most total_partitions

    @property
    def total_partitions(self) -> int:
        return self.partitions.shape[0]


def plan_pays(num_sms: int, *, pairs: int, seen: int) -> bool:
    """Whether a call may last so long that some sequences can be much longer than the others, and that XLA makes the
    plan while the layer before still runs. `pairs` of a sequence and a KV head may see `seen` tokens each."""
    # [one_kernel_h200, plan_kernel_h100, plan_kernels_h100, plans_h100 of benchmarks/results/decisions/]
    return pairs * seen > LONG * num_sms


def programs_at_once(num_sms: int, kv_heads: int) -> int:
    """Partitions of a KV head that run at the same time: four programs a SM for all KV heads."""
    return 4 * num_sms // kv_heads  # [plans_h100 of benchmarks/results/decisions/]


def default_total(seqs: int, at_once: int) -> int:
    """Partitions of a KV head to share out by length, where `at_once` run at the same time."""
    # Twice the number of sequences: one no longer than the mean stays whole, and needs no merge.
    return seqs + max(seqs, at_once)


def default(lengths: jax.Array, window: jax.Array | None, *, q_len: int, at_once: int) -> PartitionPlan:
    """The plan of a call: int32 lengths [seqs], window int32 []."""
    total = default_total(lengths.shape[0], at_once)
    return make(lengths, window, q_len=q_len, total_partitions=total, at_once=at_once)


@functools.partial(jax.jit, static_argnames=("q_len", "total_partitions", "at_once"), inline=True)
def make(
    lengths: jax.Array, window: jax.Array | None, *, q_len: int, total_partitions: int, at_once: int = 0
) -> PartitionPlan:
    """Shares `total_partitions`, more than there are sequences, out over int32 lengths [seqs]; window is int32 [].

    Whatever the lengths and the window, each sequence gets one at least, and no partition more tiles than `most` =
    ceil(all tiles / (total_partitions - seqs)), or LEAST_TILES. The partitions suffice: ceil(tiles / most), added up
    over the sequences, is at most `total_partitions`. A partition gets up to half more tiles than `most` if then all
    run at the same time, `at_once` per KV head.
    """
    seqs = lengths.shape[0]
    first, end = jax.vmap(lambda length: sizes.tile_range(length, window, q_len, TILE))(lengths)
    tiles = jnp.clip(end - first, 0, 2**30 // seqs)  # so that their sum is an int32
    most = jnp.maximum(-(-tiles.sum(dtype=jnp.int32) // (total_partitions - seqs)), LEAST_TILES)
    # A few programs that start when the others end leave the GPU idle, unless partitions are short.
    # [outliers_h100 of benchmarks/results/decisions/]
    longer = most + jnp.arange(33, dtype=jnp.int32) * -(-most // 64)
    fits = (_counts(tiles[None], longer[:, None]).sum(axis=1) <= at_once) & (longer <= most + most // 2)
    most = jnp.where(fits.any() & (most > LEAST_TILES), longer[jnp.argmax(fits)], most)
    counts = _counts(tiles, most)

    # The longest begin, and the short ones fill the gaps at the end. [plan_order_h200, plans_h100]
    order = jnp.argsort(-(tiles // counts)).astype(jnp.int32)
    ends = jnp.cumsum(counts[order], dtype=jnp.int32)
    entries = jnp.arange(total_partitions, dtype=jnp.int32)
    ranks = jnp.searchsorted(ends, entries, side="right", method="scan_unrolled").astype(jnp.int32)
    ranks = jnp.minimum(ranks, seqs - 1)
    seq_ids = order[ranks]
    indices = entries - (ends[ranks] - counts[seq_ids])
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    return PartitionPlan(jnp.stack([seq_ids, indices, counts[seq_ids]], axis=1), starts)


def _counts(tiles: jax.Array, most: jax.Array) -> jax.Array:
    """Partitions of sequences of `tiles` tiles, at most `most` tiles in each."""
    return jnp.maximum(-(-tiles // most), 1)
