"""Partitions by true lengths: when a call follows a plan, and the plan of a step."""

from __future__ import annotations

import jax
import numpy as np

from jaxpaged import _device
from jaxpaged._attention.call import Call
from jaxpaged._attention.runs import fewest_runs
from jaxpaged._public_state import public_state
from pallas_kernels.decode import config as decode_config
from pallas_kernels.decode import partition_plan
from pallas_kernels.decode.partition_plan import PartitionPlan

public_state(PartitionPlan)


LONG = 3072  # tokens of a KV head for each SM
PARTIAL_BYTES = 128 * 1024 * 1024  # the most memory for the partials of a plan


def check_partitions(num_partitions: int | None) -> int | None:
    """A number as a Python int. Raises `ValueError` for a number that no call can take."""
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


def follows(call: Call, total_partitions: int) -> bool:
    """Whether a kernel follows a plan of that many partitions for this call: not for one sequence, queries that are not
    causal, a latent, prompts in several runs, more partitions than the grid takes, nor if the partials need too much
    memory."""
    q_len, group = call.tokens_per_seq, call.group
    if (
        call.v_cache is None
        or q_len is None
        or not call.causal
        or call.q.shape[0] == 1
        or fewest_runs(q_len, group)[0] > 1
    ):
        return False
    num_bytes = total_partitions * call.kv_heads * decode_config.partial_size(call.shapes(q_len)) * 4
    return total_partitions <= decode_config.MAX_SEQS and num_bytes <= PARTIAL_BYTES


def plan_pays(gpu: _device.Gpu, *, pairs: int, seen: int) -> bool:
    """Whether a call may take so long that some sequences can be much longer than the others, and that XLA makes the
    plan while the layer before still runs. `pairs` of a sequence and a KV head may see `seen` tokens each."""
    # [one_kernel_h200, plan_kernel_h100, plan_kernels_h100, plans_h100 of benchmarks/results/decisions/]
    return pairs * seen > LONG * gpu.num_sms


def visible(call: Call, window: int | None) -> int:
    """The most tokens that a query can see, as far as is known beforehand."""
    return call.capacity if window is None else min(call.capacity, window)


def programs_at_once(gpu: _device.Gpu, num_kv_heads: int) -> int:
    """For how many partitions of a KV head at the same time a plan is made: four programs a SM for all KV heads."""
    return 4 * gpu.num_sms // num_kv_heads  # [plans_h100 of benchmarks/results/decisions/]


def plan_step(lengths: jax.Array, *, num_kv_heads: int, q_len: int, capacity: int) -> PartitionPlan | None:
    """The plan that the calls of a step make by default without a window; None: they make none."""
    try:
        gpu = _device.gpu()
    except NotImplementedError:
        return None
    if not plan_pays(gpu, pairs=lengths.shape[0] * num_kv_heads, seen=capacity):
        return None
    return make_plan(lengths, num_kv_heads=num_kv_heads, q_len=q_len)


def make_plan(lengths: jax.Array, *, num_kv_heads: int, q_len: int = 1) -> PartitionPlan:
    """Partitions shared out by the true lengths, int32 `[seqs]`, whether it pays or not.

    A plan only decides which program computes what: one of other lengths gives the same results up to rounding, more
    slowly.
    """
    try:
        at_once = programs_at_once(_device.gpu(), num_kv_heads)
    except NotImplementedError:
        at_once = 0  # no kernel will use the plan
    return partition_plan.default(lengths, None, q_len=q_len, at_once=at_once)
