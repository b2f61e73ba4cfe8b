"""What the decode kernel takes, and how a call is cut into partitions and stages.

Pure functions of ints: nothing here is traced, and all of it is tested on a CPU.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Literal

import jax.numpy as jnp

from pallas_kernels.common.shapes import Shapes
from pallas_kernels.common.sizes import (
    COLUMNS,
    DTYPES_16BIT,
    LEAST_COMPUTE_CAPABILITY,
    divides_tiles,
    round_up,
    smem_per_sm,
)

TILE = 64  # tokens of a tile: 16 for each of four warps, the M dimension of their products
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


def limits(shapes: Shapes, compute_capability: float) -> Iterator[tuple[str, bool]]:
    """What this kernel cannot take, with the limit and the value, and whether the call is beyond it. A limit may be
    looked at only if the call is within those before."""
    yield (
        f"the decode kernel needs compute capability 8.0 (Ampere) or higher; got {compute_capability=}.",
        compute_capability < LEAST_COMPUTE_CAPABILITY,
    )
    q_dtype, cache_dtype = shapes.q_dtype, shapes.cache_dtype
    yield f"the decode kernel takes q in bfloat16 or float16; got {q_dtype=!s}.", q_dtype not in DTYPES_16BIT
    yield (
        "the decode kernel takes a cache in q's dtype, in float8_e4m3fn, float8_e5m2 or int8; "
        f"got {cache_dtype=!s}, {q_dtype=!s}.",
        cache_dtype != q_dtype and not shapes.is_8bit,
    )
    yield (
        "the decode kernel takes float8_e4m3fn from compute capability 8.9 on, float8_e5m2 and int8 "
        f"from 8.0; got {compute_capability=}.",
        cache_dtype == jnp.float8_e4m3fn and compute_capability < 8.9,
    )
    multiple = 16 // shapes.itemsize  # 16 bytes, one asynchronous copy
    most = MAX_LATENT if shapes.is_latent else MAX_HEAD_DIM
    head_dim, value_dim, block_size = shapes.head_dim, shapes.value_dim, shapes.block_size
    yield (
        f"the decode kernel takes a head_dim that is a multiple of 8 up to {most}, of an 8-bit cache of 16; "
        f"got {head_dim=}, {value_dim=}, {cache_dtype=!s}.",
        any(width > most or width % multiple for width in shapes.widths),
    )
    yield (
        f"the decode kernel takes block sizes 8, 16, 32, or multiples of 64; got {block_size=}.",
        not divides_tiles(block_size),
    )
    shapes = of_program(shapes, compute_capability)
    q_len, group = shapes.q_len, shapes.group
    yield (
        f"the decode kernel takes up to {MAX_ROWS} rows (q_len * group) a KV head; got {q_len=}, {group=}.",
        q_len * group > MAX_ROWS,
    )
    needed, room = smem_bytes(shapes, 1), program_smem(compute_capability)
    yield (
        f"the decode kernel has {room} bytes of shared memory on this GPU, and needs {needed} for "
        f"{head_dim=}, {q_len=}, {group=}. Pass fewer query tokens at a time.",
        needed > room,
    )


def default_config(
    shapes: Shapes,
    *,
    pairs: int,  # of a sequence and a KV head
    capacity: int,  # tokens that a table row can hold: it bounds the lengths
    num_sms: int,
    compute_capability: float,
    window: int | None = None,  # sliding, in tokens, if it is known: it bounds what is read
    num_partitions: int | None = None,  # fixed by the caller
    planned: bool = False,  # the partitions of a plan instead
) -> Config:
    one = of_program(shapes, compute_capability)
    parts = shapes.group // one.group

    def fitting_stages(resident: int) -> int:
        room = program_smem(compute_capability, resident)
        return next(n for n in itertools.count() if smem_bytes(one, n + 1) > room)

    # One program computes while the others wait; more rows take the registers of two. The programs of a plan even out
    # the lengths: the more of them, the better. [one_kernel_h200, plans_h100 of benchmarks/results/decisions/]
    resident = 2 if fitting_stages(2) >= 2 else 1
    if one.rows <= 16 and fitting_stages(4) >= (1 if planned else 2):
        resident = 4
    num_stages = max(1, fitting_stages(resident))
    if planned:
        num_partitions = 1
    if num_partitions is None:
        # For the program that is last, to merge n partials takes about as long as n tiles. [one_kernel_h200]
        seen = capacity if window is None else min(capacity, window + shapes.q_len - 1)
        most = seen // (2 * TILE) if shapes.is_latent else 2 * math.isqrt(seen // 128)
        num_partitions = max(1, min(resident * num_sms // (pairs * parts), most))
    is_whole = not any(width % COLUMNS for width in shapes.widths)
    return Config(
        num_partitions=min(num_partitions, max(1, -(-capacity // TILE))),  # more would have no tile
        num_stages=num_stages,
        # [portable_stages_h100 of benchmarks/results/decisions/]
        copies="tma" if compute_capability >= 9.0 and is_whole else "cp_async",
        head_parts=parts,
        # The sums of a latent are as large as half a tile. One program would take too long to read many of them.
        # [latents_h100 of benchmarks/results/decisions/]
        merged_by="xla" if shapes.is_latent and num_partitions > 1 else "last",
    )


def most_rows(shapes: Shapes, compute_capability: float) -> int:
    """Rows, a multiple of 8, that a program has shared memory and registers for."""
    room, width = program_smem(compute_capability), round_up(shapes.value_dim, COLUMNS)
    # The addresses of cp.async take registers too.
    most_sums = MAX_SUMS // 2 if shapes.is_latent and compute_capability < 9.0 else MAX_SUMS
    fitting = (
        rows
        for rows in range(8, MAX_ROWS + 1, 8)
        if rows * width <= most_sums and smem_bytes(dataclasses.replace(shapes, q_len=1, group=rows), 1) <= room
    )
    return max(fitting, default=8)  # which is too much: see `limits`


def of_program(shapes: Shapes, compute_capability: float) -> Shapes:
    """With the query heads of one program: of a latent the fewest programs share them."""
    group = shapes.group
    if shapes.is_latent:
        most = most_rows(shapes, compute_capability)
        group = next(heads for heads in range(group, 0, -1) if group % heads == 0 and heads <= most)
    return dataclasses.replace(shapes, group=group)


def program_smem(compute_capability: float, resident: int = 1) -> int:
    """Bytes for the arrays of one of the `resident` programs that share a SM."""
    return smem_per_sm(compute_capability) // resident - PROGRAM_OVERHEAD


def partial_size(shapes: Shapes) -> int:
    """Float32 numbers of the sums that a partition of one KV head writes to memory."""
    return shapes.rows * round_up(shapes.value_dim, COLUMNS)


def smem_bytes(shapes: Shapes, num_stages: int) -> int:
    """Of the arrays of `refs.scratch`, without barriers and what Mosaic adds."""
    q = shapes.rows * round_up(shapes.head_dim, COLUMNS) * 2
    rings = [round_up(width, COLUMNS) * shapes.itemsize for width in shapes.widths]
    sizes = [q, TILE * shapes.rows * 2]
    if shapes.itemsize == 1:
        sizes.append(q)  # in float16
        rings += [4] * len(rings)  # scales of tokens
    return sum(round_up(size, 1024) for size in [*sizes, *(num_stages * TILE * ring for ring in rings)])
