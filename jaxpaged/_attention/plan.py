"""Partitions by true lengths: when a call follows a plan, the plan that a caller makes, and what it can ask for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxpaged import _device
from jaxpaged._attention.call import Call, check_lengths_dtype
from jaxpaged._attention.options import optional
from jaxpaged._attention.runs import fewest_runs
from jaxpaged._integers import as_int32, checked_size
from jaxpaged._on_shards import check_whole
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


def check_plan(plan: PartitionPlan, call: Call, num_partitions: int | None) -> None:
    """Raises `ValueError` for a plan that is not of this call."""
    if call.query_starts is not None:
        raise ValueError("a plan is for calls without query_starts; leave it out.")
    if num_partitions is not None:
        raise ValueError(f"pass num_partitions or a plan, not both; got {num_partitions=}.")
    seqs, partitions, starts = call.q.shape[0], plan.partitions, plan.partition_starts
    good = starts.shape == (seqs + 1,) and partitions.ndim == 2 and partitions.shape[1] == 3
    if not good or partitions.shape[0] <= seqs or {partitions.dtype, starts.dtype} != {jnp.dtype(jnp.int32)}:
        raise ValueError(
            f"plan must be one for seqs={seqs} as in q; got {partitions.shape=}, {starts.shape=}. Make it "
            "with plan_partitions of the lengths of this call, inside shard_map where the call is."
        )


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
    # [one_kernel_h200, plan_kernels_h100, plans_h100 of benchmarks/results/decisions/]
    return pairs * seen > LONG * gpu.num_sms


def visible(call: Call, window: int | None) -> int:
    """The most tokens that a query can see, as far as is known beforehand."""
    return call.capacity if window is None else min(call.capacity, window)


def programs_at_once(gpu: _device.Gpu, num_kv_heads: int) -> int:
    """For how many partitions of a KV head at the same time a plan is made: four programs a SM for all KV heads."""
    return 4 * gpu.num_sms // num_kv_heads  # [plans_h100 of benchmarks/results/decisions/]


def plan_step(lengths: jax.Array, *, num_kv_heads: int, capacity: int) -> PartitionPlan | None:
    """The plan that a call of one token a sequence makes by default without a window; None: it makes none."""
    try:
        gpu = _device.gpu()
    except NotImplementedError:
        return None
    if not plan_pays(gpu, pairs=lengths.shape[0] * num_kv_heads, seen=capacity):
        return None
    return partition_plan.default(lengths, None, q_len=1, at_once=programs_at_once(gpu, num_kv_heads))


def plan_partitions(
    lengths: ArrayLike,
    *,
    num_kv_heads: int,
    q_len: int = 1,
    sliding_window: ArrayLike | None = None,
) -> PartitionPlan:
    """Partitions shared out by the true lengths, for the `plan` of `paged_attention`.

    Make it once a step, before the layers. It is a pytree of two small arrays, made inside jit with no host sync. It
    only decides which program computes what: a plan from other lengths gives the same results up to rounding, more
    slowly.

    Args:
        lengths: int32 `[seqs]`, tokens in each sequence, those being decoded included.
        num_kv_heads: of the caches that the calls read; inside `shard_map`, of one device's.
        q_len: query tokens of a call.
        sliding_window: int or int32 `[]`, in tokens. Leave it out if layers have different ones.

    Returns:
        The plan, for calls on the same number of sequences.

    Raises:
        ValueError: lengths that are not int32 `[seqs]`; a window that is not positive; sizes below 1.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpaged
        >>> cache = jaxpaged.KVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=64)
        >>> q = jax.random.normal(jax.random.key(0), (2, 4, 64), jnp.bfloat16)
        >>> tables, lengths = jnp.array([[3, 5], [4, 0]]), jnp.array([20, 9])
        >>> plan = jaxpaged.plan_partitions(lengths, num_kv_heads=2)
        >>> jaxpaged.paged_attention(q, cache.k, cache.v, tables, lengths, plan=plan).shape
        (2, 4, 64)
    """
    lengths = as_int32(lengths)
    if lengths.ndim != 1 or lengths.shape[0] == 0:
        raise ValueError(f"lengths must be [seqs], of one sequence at least; got {lengths.shape=}.")
    check_lengths_dtype(lengths)
    check_whole("lengths", lengths)
    num_kv_heads, q_len = checked_size("num_kv_heads", num_kv_heads), checked_size("q_len", q_len)
    window = optional("sliding_window", sliding_window, (), jnp.int32, positive=True)
    try:
        gpu = _device.gpu()
    except NotImplementedError:
        at_once = 0  # no kernel will use the plan
    else:
        at_once = programs_at_once(gpu, num_kv_heads)
    return partition_plan.default(lengths, window, q_len=q_len, at_once=at_once)
