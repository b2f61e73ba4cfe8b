"""Into how many partitions sequences are cut: what a caller can ask for."""

from typing import Literal

import jax.numpy as jnp
import numpy as np

from jaxpaged._export import exportable
from pallas_kernels.partition_plan import PartitionPlan

StaticPartitions = int | Literal["balanced"] | None
NumPartitions = StaticPartitions | PartitionPlan

exportable(PartitionPlan)


def check_partitions(num_partitions: int | None, plan: PartitionPlan | None, *, seqs: int) -> NumPartitions:
    """Raises `ValueError` for what nobody can ask for."""
    if plan is not None:
        if num_partitions is not None:
            raise ValueError(f"pass num_partitions or a plan, not both; got {num_partitions=}.")
        _check_plan(plan, seqs=seqs)
        return plan
    if num_partitions is None:
        return None
    if (
        not isinstance(num_partitions, int | np.integer)
        or isinstance(num_partitions, bool)
        or not 1 <= num_partitions < 2**31
    ):
        raise ValueError(
            "num_partitions must be an int of at least 1, below 2^31 and static under jit; "
            f"got {num_partitions=}. None lets jaxpaged choose."
        )
    return int(num_partitions)


def _check_plan(plan: PartitionPlan, *, seqs: int) -> None:
    partitions, starts = plan.partitions, plan.partition_starts
    good = starts.shape == (seqs + 1,) and partitions.ndim == 2 and partitions.shape[1] == 3
    if not good or partitions.shape[0] <= seqs or {partitions.dtype, starts.dtype} != {jnp.dtype(jnp.int32)}:
        raise ValueError(
            f"plan must be one for seqs={seqs} as in q; got {partitions.shape=}, {starts.shape=}. Make it "
            "with plan_partitions of the lengths of this call, inside shard_map where the call is."
        )
