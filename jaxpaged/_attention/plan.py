"""Partitions by true lengths: when a call follows a plan, the plan that a caller makes, and what it can ask for."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxpaged import _device
from jaxpaged._attention import query_runs
from jaxpaged._attention.arguments import AttentionArguments, PackedArguments, check_lengths_dtype
from jaxpaged._attention.options import optional
from jaxpaged._integers import as_int32, check_heads, checked_size
from jaxpaged._on_shards import check_whole
from jaxpaged._public_state import public_state
from pallas_kernels import decode_config, partition_plan
from pallas_kernels._sizes import filled_rows, padded_width
from pallas_kernels.partition_plan import PartitionPlan

public_state(PartitionPlan)


WIDE = 8192  # tokens; narrower tables hold no sequence that takes long by itself
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


def check_plan(plan: PartitionPlan, num_partitions: int | None, *, seqs: int) -> None:
    """Raises `ValueError` for a plan that is not of this call."""
    if num_partitions is not None:
        raise ValueError(f"pass num_partitions or a plan, not both; got {num_partitions=}.")
    partitions, starts = plan.partitions, plan.partition_starts
    good = starts.shape == (seqs + 1,) and partitions.ndim == 2 and partitions.shape[1] == 3
    if not good or partitions.shape[0] <= seqs or {partitions.dtype, starts.dtype} != {jnp.dtype(jnp.int32)}:
        raise ValueError(
            f"plan must be one for seqs={seqs} as in q; got {partitions.shape=}, {starts.shape=}. Make it "
            "with plan_partitions of the lengths of this call, inside shard_map where the call is."
        )


def follows(call: AttentionArguments | PackedArguments, total_partitions: int) -> bool:
    """Whether a kernel follows a plan of so many partitions for this call: not for one sequence, queries that are not
    causal, prompts in several runs, more partitions than the grid takes, nor if the partials need too much memory."""
    q_len, group = call.tokens_per_seq, call.group
    if q_len is None or not call.causal or call.q.shape[0] == 1 or query_runs.runs_of(q_len, group)[0] > 1:
        return False
    rows_first = decode_config.rows_come_first(q_len=q_len, group=group, itemsize=call.itemsize)
    rows = filled_rows(q_len, group, rows_first=rows_first)
    num_bytes = total_partitions * call.kv_heads * rows * padded_width(call.head_dim) * 4
    return total_partitions <= decode_config.MAX_SEQS and num_bytes <= PARTIAL_BYTES


def are_uneven(call: AttentionArguments | PackedArguments, *, num_sms: int, window: int | None = None) -> bool:
    """Whether some sequences may be much longer than the others: in wide tables, or if the pool can fill only a part of
    them."""
    seqs, seen = call.lengths.shape[0], visible(call, window)
    # H100, in tables for 131072, with a plan and without: 8 x 1024, one of 131072, 196, 515, of 8 bits 102, 411, of 64
    # rows 198, 646; 64 x U(1..8192) 366, 360, of 8 bits 198, 198. With none longer: 64 x 4096 353, 351; 24 x 4096 142,
    # 135; 8 x 8192 93, 94, of 8 bits 51, 48, of 64 rows 97, 95, of one KV head 19.3, 16.5. [plan_kernels_h100 of
    # benchmarks/results/decisions/]
    if seen > WIDE:
        return True
    most_of_mean = seqs * seen / (call.k_cache.shape[0] * call.block_size)
    # More programs even each other out. H100, with a plan and without: 8 x U(1..8192), 3 times the mean, 36.8, 38.8; 64
    # with one of 4096, 4 times the mean, 104.9, 98.7; 64 x 8192 / 1, / 2, ..., 14 times, 58.2, 61.3; 64 with one of
    # 32768, 22 times, 136.7, 161.9; 16 with one of 8192, 6 times, 38.7, 40.4; 64 with one, 7 times, 111.8, 104.3.
    # [plans_h100 of benchmarks/results/decisions/]
    return most_of_mean > 2 + 1.5 * seqs * call.kv_heads / num_sms


def visible(call: AttentionArguments | PackedArguments, window: int | None) -> int:
    """The most tokens that a query can see, as far as is known beforehand."""
    return call.capacity if window is None else min(call.capacity, window)


def portable_follows(gpu: _device.Gpu, *, rows: int, itemsize: int = 2, has_tree: bool = False) -> bool:
    """Whether the portable kernel follows a plan, not the one for Hopper, for `rows` (q_len * heads / kv_heads)."""
    # H100, the portable kernel and the one for Hopper, 4 rows: 64 x 128 in tables for 8192 14.0, 16.1; 64 x 8192 / 1,
    # / 2, ... 58.4, 60.2; 8 x U(1..8192) 35.3, 36.4. But 64 x 4096, one of 32768, 425, 393; the mean of 43 batches in
    # wide tables is equal. 16 rows: 8 x 8192 102, 95; 64 x 4096 377, 357. 8 bits: 64 x 4096 203, 194; 8 x 1024, one of
    # 131072, 117, 102. [plan_kernels_h100 of benchmarks/results/decisions/]
    return not gpu.is_hopper or (rows <= 8 and itemsize > 1 and not has_tree)


def programs_at_once(gpu: _device.Gpu, *, num_kv_heads: int, rows: int, by_portable: bool) -> int:
    """For how many partitions of a KV head at the same time a plan is made; all KV heads run together.

    For one program a SM, or two or four: the number that runs at the same time in most calls.
    """
    if by_portable:
        # H100, 8 KV heads, one of 131072 and seven of 1024: 193 us, with half a program a SM 319, with eight 202; 8 x
        # 8192 93, 157, 97. [plans_h100 of benchmarks/results/decisions/]
        return 4 * gpu.num_sms // num_kv_heads
    # H100, one program a SM, and two. 64 rows: 8 x 8192 102, 111; 8 x U(1..8192) 44.0, 47.9. 32 rows: 96.2, 102; 43.5,
    # 43.7. Two, and four, 4 rows: 4 x 1024, one of 32768, 54.1, 62.0; 8 x U(1..8192) 36.4, 37.2. [plan_kernels_h100 of
    # benchmarks/results/decisions/]
    return (2 if rows <= 16 else 1) * gpu.num_sms // num_kv_heads


def plan_partitions(
    lengths: ArrayLike,
    *,
    num_kv_heads: int,
    num_heads: int | None = None,
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
        num_heads: of the queries, likewise. Left out: one for each KV head; where there are more than 8 rows
            (`q_len * num_heads / num_kv_heads`) such a plan is slower, by up to a quarter.
        q_len: query tokens of a call.
        sliding_window: int or int32 `[]`, in tokens. Leave it out where layers have different ones.

    Returns:
        The plan, for calls on as many sequences.

    Raises:
        ValueError: lengths that are not int32 `[seqs]`; a window that is not positive; sizes below 1; num_heads that
            is no multiple of num_kv_heads.

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
    num_heads = num_kv_heads if num_heads is None else checked_size("num_heads", num_heads)
    check_heads(num_heads, num_kv_heads)
    window = optional("sliding_window", sliding_window, [()], jnp.int32, positive=True)
    rows = q_len * num_heads // num_kv_heads
    try:
        gpu = _device.gpu()
    except NotImplementedError:
        at_once = 0  # no kernel will use the plan
    else:
        by_portable = portable_follows(gpu, rows=rows)
        at_once = programs_at_once(gpu, num_kv_heads=num_kv_heads, rows=rows, by_portable=by_portable)
    return partition_plan.default(lengths, window, q_len=q_len, at_once=at_once)
