"""What the decode kernel takes, and how a call is cut into partitions and stages.

Pure functions of ints: nothing here is traced, and all of it is tested on a CPU.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, Literal

import jax.numpy as jnp

from pallas_kernels.common.sizes import LEAST_COMPUTE_CAPABILITY, filled_rows, is_8bit, round_up, smem_per_sm

TILE = 64  # tokens of a tile: 16 for each of four warps, the M dimension of their products
COLUMNS = 64  # of a head, that one product takes
DTYPES = (jnp.bfloat16, jnp.float16)
MAX_ROWS = 64  # q_len * group
MAX_SUMS = 128 * 128  # numbers of O, which the registers of a program hold
MAX_HEAD_DIM, MAX_LATENT = 256, 640
MAX_SEQS = 65535  # the grid's slowest axis, for which CUDA allows no more
PROGRAM_OVERHEAD = 4 * 1024  # bytes of SMEM: 1024 that CUDA takes, 2048 for Mosaic's reductions, barriers


@dataclasses.dataclass(frozen=True)
class Config:
    num_partitions: int  # programs for each sequence and KV head
    num_stages: int  # tiles of K, and of V, in SMEM at a time
    copies: Literal["tma", "cp_async"]  # how tiles come to SMEM: see `copies`
    head_parts: int = 1  # programs that share the query heads of a KV head
    merged_by: Literal["last", "xla"] = "last"  # partitions of a sequence: by the program that is last, or by XLA


def limits(
    *,
    head_dim: int,
    value_dim: int | None = None,  # None: head_dim
    is_latent: bool = False,
    block_size: int,
    group: int,
    q_len: int,
    q_dtype: Any,
    cache_dtype: Any,
    compute_capability: float,
) -> Iterator[tuple[str, bool]]:
    """What this kernel cannot take, with the limit and the value, and whether the call is beyond it. A limit may be
    looked at only if the call is within those before."""
    yield (
        f"the decode kernel needs compute capability 8.0 (Ampere) or higher; got {compute_capability=}.",
        compute_capability < LEAST_COMPUTE_CAPABILITY,
    )
    yield f"the decode kernel takes q in bfloat16 or float16; got {q_dtype=!s}.", q_dtype not in DTYPES
    eight_bit, itemsize = is_8bit(cache_dtype), jnp.dtype(cache_dtype).itemsize
    yield (
        "the decode kernel takes a cache in q's dtype, in float8_e4m3fn, float8_e5m2 or int8; "
        f"got {cache_dtype=!s}, {q_dtype=!s}.",
        cache_dtype != q_dtype and not eight_bit,
    )
    yield (
        "the decode kernel takes float8_e4m3fn from compute capability 8.9 on, float8_e5m2 and int8 "
        f"from 8.0; got {compute_capability=}.",
        cache_dtype == jnp.float8_e4m3fn and compute_capability < 8.9,
    )
    multiple = 16 // itemsize  # 16 bytes, one asynchronous copy
    most = MAX_LATENT if is_latent else MAX_HEAD_DIM
    widths = (head_dim,) if is_latent else (head_dim, value_dim or head_dim)
    yield (
        f"the decode kernel takes a head_dim that is a multiple of 8 up to {most}, of an 8-bit cache of 16; "
        f"got {head_dim=}, {value_dim=}, {cache_dtype=!s}.",
        max(widths) > most or any(width % multiple for width in widths),
    )
    yield (
        f"the decode kernel takes block sizes 8, 16, 32, or multiples of 64; got {block_size=}.",
        block_size not in (8, 16, 32) and block_size % TILE != 0,
    )
    sizes: Any = dict(head_dim=head_dim, value_dim=value_dim, itemsize=itemsize)
    if is_latent:
        group //= head_parts(group=group, compute_capability=compute_capability, **sizes)
    yield (
        f"the decode kernel takes up to {MAX_ROWS} rows (q_len * group) a KV head; got {q_len=}, {group=}.",
        q_len * group > MAX_ROWS,
    )
    needed = smem_bytes(1, q_len=q_len, group=group, is_latent=is_latent, **sizes)
    room = program_smem(compute_capability)
    yield (
        f"the decode kernel has {room} bytes of shared memory on this GPU, and needs {needed} for "
        f"{head_dim=}, {q_len=}, {group=}. Pass fewer query tokens at a time.",
        needed > room,
    )


def default_config(
    *,
    seqs: int,
    kv_heads: int,
    group: int,
    q_len: int,
    head_dim: int,
    value_dim: int | None = None,  # None: head_dim
    is_latent: bool = False,
    capacity: int,  # tokens that a table row can hold: it bounds the lengths
    num_sms: int,
    compute_capability: float,
    window: int | None = None,  # sliding, in tokens, if it is known: it bounds what is read
    num_partitions: int | None = None,  # fixed by the caller
    planned: bool = False,  # the partitions of a plan instead
    itemsize: int = 2,  # of the cache's numbers, in bytes
) -> Config:
    sizes: Any = dict(head_dim=head_dim, value_dim=value_dim, itemsize=itemsize)
    parts = head_parts(group=group, compute_capability=compute_capability, **sizes) if is_latent else 1
    group //= parts

    def fitting_stages(resident: int) -> int:
        room = program_smem(compute_capability, resident)
        rows: Any = dict(q_len=q_len, group=group, is_latent=is_latent)
        return next(n for n in itertools.count() if smem_bytes(n + 1, **rows, **sizes) > room)

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
        # For the program that is last, to merge n partials takes about as long as n tiles. [one_kernel_h200]
        seen = capacity if window is None else min(capacity, window + q_len - 1)
        most = seen // (2 * TILE) if is_latent else 2 * math.isqrt(seen // 128)
        num_partitions = max(1, min(resident * num_sms // (seqs * kv_heads * parts), most))
    is_whole = head_dim % COLUMNS == 0 and (is_latent or (value_dim or head_dim) % COLUMNS == 0)
    return Config(
        num_partitions=min(num_partitions, max(1, -(-capacity // TILE))),  # more would have no tile
        num_stages=num_stages,
        # [portable_stages_h100 of benchmarks/results/decisions/]
        copies="tma" if compute_capability >= 9.0 and is_whole else "cp_async",
        head_parts=parts,
        # The sums of a latent are as large as half a tile. One program would take too long to read many of them.
        # [latents_h100 of benchmarks/results/decisions/]
        merged_by="xla" if is_latent and num_partitions > 1 and not planned else "last",
    )


def most_rows(
    *, head_dim: int, value_dim: int | None = None, is_latent: bool = False, itemsize: int, compute_capability: float
) -> int:
    """Rows, a multiple of 8, that a program has shared memory and registers for."""
    room, width = program_smem(compute_capability), round_up(value_dim or head_dim, COLUMNS)
    # The addresses of cp.async take registers too.
    most_sums = MAX_SUMS // 2 if is_latent and compute_capability < 9.0 else MAX_SUMS
    sizes: Any = dict(head_dim=head_dim, value_dim=value_dim, is_latent=is_latent, itemsize=itemsize)
    fitting = (
        rows
        for rows in range(8, MAX_ROWS + 1, 8)
        if rows * width <= most_sums and smem_bytes(1, q_len=1, group=rows, **sizes) <= room
    )
    return max(fitting, default=8)  # which is too much: see `limits`


def head_parts(*, group: int, compute_capability: float, **sizes: Any) -> int:
    """The fewest programs for the query heads of a latent."""
    most = most_rows(is_latent=True, compute_capability=compute_capability, **sizes)
    return next(parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= most)


def program_smem(compute_capability: float, resident: int = 1) -> int:
    """Bytes for the arrays of one of the `resident` programs that share a SM."""
    return smem_per_sm(compute_capability) // resident - PROGRAM_OVERHEAD


def partial_size(*, q_len: int, group: int, head_dim: int) -> int:
    """Float32 numbers of the sums that a partition of one KV head writes to memory."""
    return filled_rows(q_len, group) * round_up(head_dim, COLUMNS)


def smem_bytes(
    num_stages: int,
    *,
    q_len: int,
    group: int,
    head_dim: int,
    value_dim: int | None = None,
    is_latent: bool = False,
    itemsize: int,
) -> int:
    """Of the arrays of `refs.scratch`, without barriers and what Mosaic adds."""
    rows, width = filled_rows(q_len, group), round_up(head_dim, COLUMNS)
    rings = [width] if is_latent else [width, round_up(value_dim or head_dim, COLUMNS)]
    q = rows * width * 2
    sizes = [q, TILE * rows * 2, *(num_stages * TILE * ring * itemsize for ring in rings)]
    if itemsize == 1:
        sizes += [q] + [num_stages * TILE * 4] * len(rings)  # Q in float16, and scales of tokens
    return sum(round_up(size, 1024) for size in sizes)
