"""What the kernel of `paged_decode` takes, and how a call is cut into partitions, tiles and stages.

Pure functions of ints: nothing here is traced, and all of it is tested on a CPU. A comment names in brackets the files
of `benchmarks/results/decisions/` with its figures, microseconds. U(1..n) are lengths drawn uniformly.
"""

import bisect
import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels import _sizes

DTYPES = (jnp.bfloat16, jnp.float16)
MAX_ROWS = 64  # q_len * group; with more, the accumulators of head_dim 256 do not fit the registers
MAX_STAGES = 8
MAX_SEQS = 65535  # the grid's slowest axis, where CUDA allows no more
SMEM_PER_SM = 228 * 1024  # bytes, Hopper
PROGRAM_OVERHEAD = 3 * 1024  # bytes of SMEM of a program: 1024, and 2048 for Mosaic's reductions
FEW_ROWS = 32  # rows of a KV head up to which the portable kernel is faster


@dataclasses.dataclass(frozen=True)
class Config:
    num_partitions: int  # programs for each sequence and KV head; several merge in memory: see `_merge`
    num_stages: int  # tiles of K and of V in SMEM at a time
    tile: int  # tokens, 64 or 128


def check_supported(
    *, head_dim: int, block_size: int, group: int, q_len: int, q_dtype: Any, cache_dtype: Any, compute_capability: float
) -> None:
    """Raises `NotImplementedError` for what this kernel cannot take, with the limit and the value."""
    if compute_capability != 9.0:
        raise NotImplementedError(
            f"the decode kernel needs compute capability 9.0 (Hopper); got {compute_capability=}."
        )
    if q_dtype not in DTYPES:
        raise NotImplementedError(f"the decode kernel takes q in bfloat16 or float16; got {q_dtype=!s}.")
    if cache_dtype != q_dtype:
        raise NotImplementedError(
            f"the decode kernel for Hopper takes a cache in q's dtype; got {cache_dtype=!s}, {q_dtype=!s}."
        )
    if head_dim % 8 or _sizes.padded_width(head_dim) > 256:
        raise NotImplementedError(
            f"the decode kernel takes a head_dim that is a multiple of 16 up to 256, a multiple of 8 below 64, "
            f"or 72, 120 or 168; got {head_dim=}."
        )
    if block_size not in (8, 16, 32) and block_size % 128 and block_size != 64:
        raise NotImplementedError(
            f"the decode kernel takes block sizes 8, 16, 32, 64, or multiples of 128; got {block_size=}."
        )
    if not FEW_ROWS < q_len * group <= MAX_ROWS:
        raise NotImplementedError(
            f"the decode kernel for Hopper takes {FEW_ROWS + 1} to {MAX_ROWS} rows (q_len * group) a KV head; "
            f"got {q_len=}, {group=}."
        )


def default_config(
    *,
    seqs: int,
    kv_heads: int,
    group: int,
    q_len: int,
    head_dim: int,
    capacity: int,  # tokens that a table row can hold: it bounds the lengths
    num_sms: int,
    window: int | None = None,  # sliding, in tokens, if it is known: it bounds what is read
    num_partitions: int | None = None,  # fixed by the caller
    planned: bool = False,  # the partitions of a plan instead
) -> Config:
    seen = most_seen(capacity, window=window, q_len=q_len)
    if planned:
        num_partitions = 1
    elif num_partitions is None:
        num_partitions = partitions_for(max(1, seqs * kv_heads), seen, num_sms)
    # H200, 64 rows, 128 tokens a step and 64: 64 x 8192 502, 521; 8 x 256 new tokens after 2048 221, 255. [rows_h200]
    tile = 128 if _sizes.padded_width(head_dim) <= 128 else 64
    # No more stages than tiles: each has barriers to set up. A window may begin within a tile.
    most_tokens = seen if window is None else min(capacity, seen + tile - 1)
    num_tiles = -(-most_tokens // (num_partitions * tile))  # of a partition
    most = max(1, min(MAX_STAGES, num_tiles))
    return Config(num_partitions, fitting_stages(tile, most, head_dim=head_dim, group=group, q_len=q_len), tile)


def fitting_stages(tile: int, most: int, *, head_dim: int, group: int, q_len: int) -> int:
    """The most stages, up to `most`, that fit a SM."""
    from pallas_kernels.paged_decode import _refs  # imports Mosaic, and this file is imported everywhere

    def num_bytes(num_stages: int) -> int:
        config = Config(1, num_stages, tile)
        sizes = dict(q_len=q_len, group=group, head_dim=head_dim)
        return _refs.num_bytes(_refs.scratch(config, **sizes, copies_of_tile=1, dtype=jnp.bfloat16))

    room = SMEM_PER_SM - PROGRAM_OVERHEAD
    return max(1, bisect.bisect_right(range(1, most + 1), room, key=num_bytes))


def rows_come_first(*, q_len: int, group: int, itemsize: int) -> bool:
    """Whether this kernel takes a call: the rows are the M dimension of its products."""
    # H200, rows first and tokens first, 64 rows: 64 x 8192 501, 591; 8 x 2048 28.8, 54.8; 8 x 256 new tokens after 2048
    # 221, 415. [rows_h200]
    # A tile of 8 bits passes through registers, from which the right operand of a product cannot be read.
    return itemsize > 1 and q_len * group > FEW_ROWS


def most_seen(capacity: int, *, window: int | None, q_len: int) -> int:
    """The most tokens of a sequence that its queries see together."""
    return capacity if window is None else min(capacity, window + q_len - 1)


def partitions_for(pairs: int, seen: int, num_sms: int) -> int:
    """Partitions, any number, of `pairs` sequences times KV heads, in each of which up to `seen` tokens are read."""
    # A program has a SM to itself, and its partials are large. H200, 8 KV heads, 64 rows:
    # 3 x 8192 in 5 37.3, in 4 37.5; 1 x 512 in 1 10.8, in 2 12.8; 8 x 8192 in 2 75, in 1 89; 12 x 8192 in 1 109, in 2
    # 129; 64 x 8192 501, 547; 64 x U(1..8192) 310, 330. 8-bit caches, 3 x 8192 in 5 52, in 2 120. [rows_h200]
    # To merge n partials takes about as long as n tiles of 128 tokens, and a partition has at least as many of these.
    # H100, 64 rows: 1 x 8192 in 8 25.7, in 12 27.7, in 16 28.4; 1 x 2048 in 4 16.4, in 8 17.2. [rows_h100]
    return max(1, min(num_sms // pairs, math.isqrt(seen // 128))) if seen >= 1024 else 1
