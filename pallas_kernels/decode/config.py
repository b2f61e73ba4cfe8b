"""What the decode kernel takes, and how a call is cut into partitions and stages.

Pure functions of ints: nothing here is traced, and all of it is tested on a CPU.
"""

import dataclasses
import itertools
import math
from typing import Any, Literal

import jax.numpy as jnp

from pallas_kernels.common.sizes import LEAST_COMPUTE_CAPABILITY, filled_rows, is_8bit, round_up, smem_per_sm

TILE = 64  # tokens of a tile: 16 for each of four warps, the M dimension of their products
COLUMNS = 64  # of a head, that one product takes
DTYPES = (jnp.bfloat16, jnp.float16)
MAX_ROWS = 64  # q_len * group
MAX_SEQS = 65535  # the grid's slowest axis, for which CUDA allows no more
PROGRAM_OVERHEAD = 4 * 1024  # bytes of SMEM: 1024 that CUDA takes, 2048 for Mosaic's reductions, barriers


@dataclasses.dataclass(frozen=True)
class Config:
    num_partitions: int  # programs for each sequence and KV head
    num_stages: int  # tiles of K, and of V, in SMEM at a time
    copies: Literal["tma", "cp_async"]  # how tiles come to SMEM: see `copies`


def limit(
    *, head_dim: int, block_size: int, group: int, q_len: int, q_dtype: Any, cache_dtype: Any, compute_capability: float
) -> str | None:
    """What this kernel cannot take, with the limit and the value; None: it takes the call."""
    if compute_capability < LEAST_COMPUTE_CAPABILITY:
        return f"the decode kernel needs compute capability 8.0 (Ampere) or higher; got {compute_capability=}."
    if q_dtype not in DTYPES:
        return f"the decode kernel takes q in bfloat16 or float16; got {q_dtype=!s}."
    eight_bit = is_8bit(cache_dtype)
    if cache_dtype != q_dtype and not eight_bit:
        return (
            "the decode kernel takes a cache in q's dtype, in float8_e4m3fn, float8_e5m2 or int8; "
            f"got {cache_dtype=!s}, {q_dtype=!s}."
        )
    if cache_dtype == jnp.float8_e4m3fn and compute_capability < 8.9:
        return (
            "the decode kernel takes float8_e4m3fn from compute capability 8.9 on, float8_e5m2 and int8 "
            f"from 8.0; got {compute_capability=}."
        )
    multiple = 16 if eight_bit else 8  # 16 bytes, one asynchronous copy
    if head_dim % multiple or head_dim > 256:
        return (
            "the decode kernel takes a head_dim that is a multiple of 8 up to 256, of an 8-bit cache of 16; "
            f"got {head_dim=}, {cache_dtype=!s}."
        )
    if block_size not in (8, 16, 32) and block_size % TILE:
        return f"the decode kernel takes block sizes 8, 16, 32, or multiples of 64; got {block_size=}."
    if q_len * group > MAX_ROWS:
        return f"the decode kernel takes up to {MAX_ROWS} rows (q_len * group) a KV head; got {q_len=}, {group=}."
    needed = smem_bytes(1, q_len=q_len, group=group, head_dim=head_dim, itemsize=jnp.dtype(cache_dtype).itemsize)
    if needed > (room := program_smem(compute_capability)):
        return (
            f"the decode kernel has {room} bytes of shared memory on this GPU, and needs {needed} for "
            f"{head_dim=}, {q_len=}, {group=}. Pass fewer query tokens at a time."
        )
    return None


def default_config(
    *,
    seqs: int,
    kv_heads: int,
    group: int,
    q_len: int,
    head_dim: int,
    capacity: int,  # tokens that a table row can hold: it bounds the lengths
    num_sms: int,
    compute_capability: float,
    window: int | None = None,  # sliding, in tokens, if it is known: it bounds what is read
    num_partitions: int | None = None,  # fixed by the caller
    planned: bool = False,  # the partitions of a plan instead
    itemsize: int = 2,  # of the cache's numbers, in bytes
) -> Config:

    def fitting_stages(resident: int) -> int:
        room = program_smem(compute_capability, resident)
        sizes = dict(q_len=q_len, group=group, head_dim=head_dim, itemsize=itemsize)
        return next(n for n in itertools.count() if smem_bytes(n + 1, **sizes) > room)

    # One program computes while the others wait; more rows take the registers of two. The programs of a plan even out
    # the lengths: the more of them, the better. [one_kernel_h200, plans_h100 of benchmarks/results/decisions/]
    few_rows = filled_rows(q_len, group) <= 16
    resident = 2 if fitting_stages(2) >= 2 else 1
    if few_rows and fitting_stages(4) >= (1 if planned else 2):
        resident = 4
    num_stages = max(1, fitting_stages(resident))
    if planned:
        num_partitions = 1
    if num_partitions is None:
        # To merge n partials takes about as long as n tiles. [one_kernel_h200]
        seen = capacity if window is None else min(capacity, window + q_len - 1)
        num_partitions = max(1, min(resident * num_sms // (seqs * kv_heads), 2 * math.isqrt(seen // 128)))
    return Config(
        num_partitions=min(num_partitions, max(1, -(-capacity // TILE))),  # more would have no tile
        num_stages=num_stages,
        # [portable_stages_h100 of benchmarks/results/decisions/]
        copies="tma" if compute_capability >= 9.0 and head_dim % COLUMNS == 0 else "cp_async",
    )


def most_rows(*, head_dim: int, itemsize: int, compute_capability: float) -> int:
    """Rows, a multiple of 8, that a program has shared memory for."""
    room = program_smem(compute_capability)
    return max(
        rows
        for rows in range(8, MAX_ROWS + 1, 8)
        if smem_bytes(1, q_len=1, group=rows, head_dim=head_dim, itemsize=itemsize) <= room
    )


def program_smem(compute_capability: float, resident: int = 1) -> int:
    """Bytes for the arrays of one of the `resident` programs that share a SM."""
    return smem_per_sm(compute_capability) // resident - PROGRAM_OVERHEAD


def partial_size(*, q_len: int, group: int, head_dim: int) -> int:
    """Float32 numbers of the sums that a partition of one KV head writes to memory."""
    return filled_rows(q_len, group) * round_up(head_dim, COLUMNS)


def smem_bytes(num_stages: int, *, q_len: int, group: int, head_dim: int, itemsize: int) -> int:
    """Of the arrays of `refs.scratch`, without barriers and what Mosaic adds."""
    rows, width = filled_rows(q_len, group), round_up(head_dim, COLUMNS)
    q, tile = rows * width * 2, TILE * width * itemsize
    sizes = [q, TILE * rows * 2] + [num_stages * tile] * 2
    if itemsize == 1:
        sizes += [q] + [num_stages * TILE * 4] * 2  # Q in float16, and scales of tokens
    return sum(round_up(size, 1024) for size in sizes)
