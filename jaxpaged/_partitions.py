"""Into how many partitions sequences are cut: what a caller can ask for."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_kernels import decode_config, partition_plan
from pallas_kernels.partition_plan import PartitionPlan

NumPartitions = int | Literal["balanced"] | PartitionPlan | None


def plan_partitions(
    lengths: ArrayLike, *, num_kv_heads: int, q_len: int = 1, sliding_window: ArrayLike | None = None
) -> PartitionPlan:
    """What `paged_attention(..., num_partitions="balanced")` makes of the lengths, to be made once and passed to it.

    Layers in a row share a plan without that, since XLA computes equal expressions once; in a `lax.scan` over layers it
    would be made in each. A pytree of two small arrays, made inside jit, with no host sync. It decides only who works
    on what: a plan that was made from other lengths costs time, never a right result.

    Args:
        lengths: int32 `[seqs]`, tokens in each sequence, those being decoded included.
        num_kv_heads: of the cache.
        q_len: query tokens of a call.
        sliding_window: int or int32 `[]`, in tokens, where every layer has it.

    Returns:
        The plan, for `num_partitions` of calls on as many sequences.

    Raises:
        ValueError: lengths that are not one-dimensional; sizes below 1.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpaged
        >>> cache = jaxpaged.KVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=64)
        >>> q = jax.random.normal(jax.random.key(0), (2, 4, 64))
        >>> tables, lengths = jnp.array([[3, 5], [4, 0]]), jnp.array([20, 9])
        >>> plan = jaxpaged.plan_partitions(lengths, num_kv_heads=2)
        >>> jaxpaged.paged_attention(q, cache.k, cache.v, tables, lengths, num_partitions=plan).shape
        (2, 4, 64)
    """
    lengths = jnp.maximum(jnp.asarray(lengths, jnp.int32), 0)
    if lengths.ndim != 1 or lengths.shape[0] < 1:
        raise ValueError(f"lengths must be [seqs]; got {lengths.shape=}.")
    if num_kv_heads < 1 or q_len < 1:
        raise ValueError(f"num_kv_heads and q_len must be at least 1; got {num_kv_heads=}, {q_len=}.")
    seqs, device = lengths.shape[0], jax.devices()[0]
    # Without a GPU there is nobody to follow the plan.
    num_sms = int(device.core_count) if device.platform == "gpu" else 0
    total = decode_config.balanced_partitions(seqs, num_kv_heads, num_sms) or seqs + 1
    window = None if sliding_window is None else jnp.asarray(sliding_window, jnp.int32)
    return partition_plan.make(lengths, window, q_len=q_len, total_partitions=total)


def check_partitions(num_partitions: NumPartitions, *, seqs: int) -> NumPartitions:
    """Raises `ValueError` for what nobody can ask for."""
    if num_partitions is None or num_partitions == "balanced":
        return num_partitions
    if isinstance(num_partitions, PartitionPlan):
        planned = num_partitions.partition_starts.shape[0] - 1
        if planned != seqs:
            raise ValueError(f"num_partitions is a plan for {planned} sequences; got {seqs=}.")
        return num_partitions
    if isinstance(num_partitions, (int, np.integer)) and num_partitions >= 1:
        return int(num_partitions)
    raise ValueError(
        f'num_partitions must be at least 1, "balanced", or from plan_partitions; got {num_partitions=}. '
        "None lets jaxpaged choose."
    )
