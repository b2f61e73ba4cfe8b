"""Which partitions each sequence gets where a batch's partitions are shared out by length.

Worked out from the true lengths by XLA, on the device, before the kernel: layers that attend over the same lengths, and
see as much of them, share one plan, since XLA computes equal expressions once.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import _rows


@dataclasses.dataclass(frozen=True)
class Plan:
    """A sequence's partitions stand side by side. Those left over follow the last sequence's, as more of the same."""

    partitions: jax.Array  # int32 [total_partitions, 3]: whose each is, which of its sequence's, and how many these are
    partition_starts: jax.Array  # int32 [seqs + 1], exclusive prefix sums


def make(lengths: jax.Array, window: jax.Array | None, *, q_len: int, tile: int, total_partitions: int) -> Plan:
    """Shares `total_partitions`, more than there are sequences, out over int32 lengths [seqs]; window is int32 [].

    Each sequence gets one at least, and no partition more than `most` = ceil(all tiles / (total_partitions - seqs)) of
    them, for which there are enough: ceil(tiles / most) of each sequence add up to at most `total_partitions`.
    """
    seqs = lengths.shape[0]
    first, end = jax.vmap(lambda length: _rows.tile_range(length, window, q_len, tile))(lengths)
    most = jnp.maximum(_ceil_div((end - first).sum(), total_partitions - seqs), 1)
    counts = jnp.maximum(_ceil_div(end - first, most), 1)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    places = jnp.arange(total_partitions, dtype=jnp.int32)
    seq_ids = jnp.searchsorted(starts[1:], places, side="right", method="scan_unrolled").astype(jnp.int32)
    seq_ids = jnp.minimum(seq_ids, seqs - 1)
    return Plan(jnp.stack([seq_ids, places - starts[seq_ids], counts[seq_ids]], axis=1), starts)


def _ceil_div(x: jax.Array, y: jax.Array | int) -> jax.Array:
    return (x + y - 1) // y
