"""The partition plan of a step, by true lengths."""

from __future__ import annotations

import jax

from jaxpaged import _device
from jaxpaged._public_state import public_state
from pallas_kernels.common import partition_plan
from pallas_kernels.common.partition_plan import PartitionPlan

public_state(PartitionPlan)


def plan_step(lengths: jax.Array, *, num_kv_heads: int, q_len: int, capacity: int) -> PartitionPlan | None:
    """The plan that calls of a step without a window would make by default; None if they would make none."""
    try:
        gpu = _device.gpu()
    except NotImplementedError:
        return None
    if not partition_plan.plan_pays(gpu.num_sms, pairs=lengths.shape[0] * num_kv_heads, seen=capacity):
        return None
    return make_plan(lengths, num_kv_heads=num_kv_heads, q_len=q_len)


def make_plan(lengths: jax.Array, *, num_kv_heads: int, q_len: int = 1) -> PartitionPlan:
    """A plan for true lengths, int32 `[seqs]`, whether it pays or not.

    A plan only assigns work to programs: with a plan for other lengths the results are the same up to rounding, but
    slower.
    """
    try:
        at_once = partition_plan.programs_at_once(_device.gpu().num_sms, num_kv_heads)
    except NotImplementedError:
        at_once = 0  # no kernel will use the plan
    return partition_plan.default(lengths, None, q_len=q_len, at_once=at_once)
