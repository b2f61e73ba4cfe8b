"""Partition plans: how many partitions each sequence of a batch gets, by its length.

XLA computes the plan on the device, before the kernel. The decode kernel follows it and merges the partitions. Every
plan gives the same result up to rounding, because a sequence's tiles are dealt to its partitions in turn, whatever
their number.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import sizes
from pallas_kernels.common.sizes import ceil_div

TILE = 64  # tokens; lengths are counted in tiles
LEAST_TILES = 8  # a sequence up to this length stays whole: merging shorter partitions costs more than it saves

LONG = 3072  # tokens per KV head and SM


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartitionPlan:
    """The partitions of all sequences, the longest sequence first; each has at least one, and its partitions are
    adjacent. Unused entries come last, with the last sequence and an index that is not below its number of
    partitions."""

    partitions: jax.Array  # int32 [total_partitions, 3]: sequence, index in the sequence, partitions of the sequence

    @property
    def total_partitions(self) -> int:
        return self.partitions.shape[0]


def plan_pays(num_sms: int, *, pairs: int, seen: int) -> bool:
    """Whether a plan is worth making: the call is long enough for some sequences to be much longer than others, and for
    XLA to make the plan while the previous layer still runs. There are `pairs` pairs of a sequence and a KV head; each
    sees up to `seen` tokens."""
    # [one_kernel_h200, plan_kernel_h100, plan_kernels_h100, plans_h100 of benchmarks/results/decisions/]
    return pairs * seen > LONG * num_sms


def programs_at_once(num_sms: int, kv_heads: int) -> int:
    """Partitions per KV head that run at the same time: an SM runs four programs."""
    return 4 * num_sms // kv_heads  # [plans_h100 of benchmarks/results/decisions/]


def default_total(seqs: int, at_once: int) -> int:
    """Partitions per KV head of a plan, if `at_once` run at the same time."""
    # At least twice the number of sequences: then a sequence up to the mean length stays whole and needs no merge.
    return seqs + max(seqs, at_once)


def default(lengths: jax.Array, window: jax.Array | None, *, q_len: int, at_once: int) -> PartitionPlan:
    """The plan of a call. Arguments: lengths int32 [seqs], window int32 []."""
    total = default_total(lengths.shape[0], at_once)
    return make(lengths, window, q_len=q_len, total_partitions=total, at_once=at_once)


@functools.partial(jax.jit, static_argnames=("q_len", "total_partitions", "at_once"), inline=True)
def make(
    lengths: jax.Array, window: jax.Array | None, *, q_len: int, total_partitions: int, at_once: int = 0
) -> PartitionPlan:
    """Distributes `total_partitions`, more than there are sequences, over int32 lengths [seqs]; window is int32 [].

    For all lengths and windows, each sequence gets at least one partition, and no partition has more tiles than `most`
    = ceil(all tiles / (total_partitions - seqs)), or LEAST_TILES. There are enough partitions for this: the sum of
    ceil(tiles / most) over the sequences is at most `total_partitions`. A partition may get up to half more tiles than
    `most` if all partitions then run at the same time, `at_once` per KV head.
    """
    seqs = lengths.shape[0]
    first, end = jax.vmap(lambda length: sizes.tile_range(length, window, q_len, TILE))(lengths)
    tiles = jnp.clip(end - first, 0, 2**30 // seqs)  # so that their sum is an int32
    most = jnp.maximum(ceil_div(tiles.sum(dtype=jnp.int32), total_partitions - seqs), LEAST_TILES)
    # A second wave of only a few programs leaves the GPU mostly idle, unless partitions are short.
    # [outliers_h100 of benchmarks/results/decisions/]
    longer = most + jnp.arange(33, dtype=jnp.int32) * ceil_div(most, 64)
    fits = jax.vmap(_counts, in_axes=(None, 0))(tiles, longer).sum(axis=1, dtype=jnp.int32) <= at_once
    longer = jnp.where(fits, longer, jnp.iinfo(jnp.int32).max).min()
    most = jnp.where((most > LEAST_TILES) & (longer <= most + most // 2), longer, most)
    counts = _counts(tiles, most)

    # The longest start first, so that short ones fill the gaps at the end. [plan_order_h200, plans_h100]
    # XLA makes one kernel of each comparison of all pairs, but several of a sort or a prefix sum.
    shortest, seq_ids = lax.div(tiles, counts), jnp.arange(seqs, dtype=jnp.int32)
    is_first = shortest[None] > shortest[:, None]
    is_first |= (shortest[None] == shortest[:, None]) & (seq_ids[None] < seq_ids[:, None])
    starts = jnp.where(is_first, counts[None], 0).sum(axis=1, dtype=jnp.int32)
    entries = jnp.arange(total_partitions, dtype=jnp.int32)
    seq_ids = jnp.argmax(jnp.where(starts[None] <= entries[:, None], starts[None], -1), axis=1).astype(jnp.int32)
    return PartitionPlan(jnp.stack([seq_ids, entries - starts[seq_ids], counts[seq_ids]], axis=1))


def _counts(tiles: jax.Array, most: jax.Array) -> jax.Array:
    """Number of partitions of sequences with `tiles` tiles, if a partition has at most `most` tiles."""
    return jnp.maximum(ceil_div(tiles, most), 1)
