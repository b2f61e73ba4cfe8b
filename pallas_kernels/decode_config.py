"""What the kernel of `paged_decode` takes, and how a call is cut into partitions, clusters, tiles and stages.

Pure functions of ints: nothing here is traced, and all of it is tested on a CPU. A comment names in brackets the files
of `benchmarks/results/decisions/` with its figures, microseconds. U(1..n) are lengths drawn uniformly.
"""

import bisect
import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels import _sizes
from pallas_kernels._sizes import filled_rows

DTYPES = (jnp.bfloat16, jnp.float16)
MAX_ROWS = 64  # q_len * group; with more, the accumulators of head_dim 256 do not fit the registers
MAX_STAGES = 8
MAX_SEQS = 65535  # the grid's slowest axis, where CUDA allows no more
SMEM_PER_SM = 228 * 1024  # bytes, Hopper
PROGRAM_OVERHEAD = 3 * 1024  # bytes of SMEM for each resident program: 1024, and 2048 for Mosaic's reductions
MAX_CLUSTER = 8  # programs in a cluster that any Hopper GPU can start
FEW_ROWS = 32  # rows of a KV head; more are the M dimension of the products of a 16-bit cache


@dataclasses.dataclass(frozen=True)
class Config:
    num_partitions: int  # programs for each sequence and KV head
    cluster: int  # partitions that merge in shared memory, a divisor of num_partitions, at most 8
    num_stages: int  # tiles of K and of V in SMEM at a time
    tile: int  # tokens, 64 or 128
    chunk: int  # columns of O in one accumulator; a multiple of 64 that divides the padded head_dim
    rows_first: bool = False  # whether the rows, padded to 64, are the M dimension of the products, not the tokens
    last_first: bool = False  # whether a program starts with the tiles at the end that some query sees only in part
    keys_ahead: bool = False  # whether a tile's keys are multiplied beside the values of the tile before it (few rows)
    unsplit_tiles: int = 0  # a sequence of at most so many tiles stays whole: one program of its cluster computes it

    @property
    def num_partials(self) -> int:
        """Of each sequence and KV head; if there are several, `_merge` merges them in memory."""
        return self.num_partitions // self.cluster


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
    narrow = _sizes.is_narrow(cache_dtype)
    if cache_dtype != q_dtype and not narrow:
        raise NotImplementedError(
            "the decode kernel takes a cache in q's dtype, in float8_e4m3fn, float8_e5m2 or int8; "
            f"got {cache_dtype=!s}, {q_dtype=!s}."
        )
    if narrow and (head_dim % 16 or (head_dim > 128 and head_dim % 32)):
        raise NotImplementedError(
            "the decode kernel takes a head_dim of an 8-bit cache in multiples of 16, above 128 in multiples of 32; "
            f"got {head_dim=}."
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
    if q_len * group > MAX_ROWS:
        raise NotImplementedError(
            f"the decode kernel takes up to {MAX_ROWS} rows (q_len * group) a KV head; got {q_len=}, {group=}."
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
    fast_memory: bool = False,  # an H200's
    window: int | None = None,  # sliding, in tokens, if it is known: it bounds what is read
    num_partitions: int | None = None,  # fixed by the caller
    planned: bool = False,  # the partitions of a plan instead
    itemsize: int = 2,  # of the cache's numbers, in bytes
    token_scales: int = 0,  # scales of each token and KV head: 2 if K and V have their own
) -> Config:
    rows_first = rows_come_first(q_len=q_len, group=group, itemsize=itemsize)
    width, rows = _sizes.padded_width(head_dim), filled_rows(q_len, group, rows_first=rows_first)
    pairs = max(1, seqs * kv_heads)
    # H100, 64 x 8192: with a window of 128 15.7, if it is not known 23.5; of 1024 92.9 and 95.6. [pairs_h100]
    seen = most_seen(capacity, window=window, q_len=q_len)
    chunk = chunk_of(head_dim=head_dim, rows=rows, itemsize=itemsize, rows_first=rows_first)
    resident = 2 if width <= 192 and rows <= 32 else 1
    # H200, 64 rows, 128 tokens a step and 64: 64 x 8192 502, 521; 8 x 256 new tokens after 2048 221, 255. [rows_h200]
    tile = 128 if rows_first and width <= 128 else 64
    if width <= 128 and rows <= 32 and itemsize == 1 and not planned:
        # 128 tokens have the bytes of 64 of 16 bits. H100, 64 x 8192: 371, with 64 tokens 377. [configs_h100]
        # Not for a plan's partitions, many of which are short: 64 x 256, one of 8192, 32.6, with 64 tokens 25.9; 64 x
        # 1024 53.2, 52.5; 64 x U(1..8192) 192, 200. [plan_kernels_h100]
        tile, resident = 128, 2 if width <= 64 else 1
    if planned:
        num_partitions = 1
    unsplit_tiles = 0
    chosen_here = num_partitions is None
    if num_partitions is None and q_len * group > FEW_ROWS:
        num_partitions = partitions_of_many_rows(pairs, seen, num_sms)
    elif num_partitions is None:
        shared = itemsize > 1 and width <= 128 and rows <= 16
        num_partitions = partitions_for(pairs, seen, num_sms, shared=shared, fast_memory=fast_memory)
        # A tile of 8-bit numbers has half the bytes and as much work: half the SMs do not reach the bandwidth.
        # H100, 8 x 4096: 27.9 in 2, 31.0 in 1. At most 4: clusters of 8 on all SMs wait for room. [configs_h100]
        if itemsize == 1 and num_partitions <= 2 and 2 * num_partitions * pairs <= num_sms and seen >= 1024:
            num_partitions *= 2
    cluster = cluster_of(num_partitions) if chunk == width and q_len * group <= FEW_ROWS else 1
    # If every program has a SM to itself, the speed of one program counts: 128 tokens a step take less than twice
    # as long as 64. H100: 8 x U(1..8192) in 2 38.8, with 64 42.6; 5 x 32768 of 4 KV heads in 3 118, with 64 121.
    # Very long sequences do not gain: 32 KV heads, 1 x 131072 in 2 723 to 735, with 64 695 to 713. [configs_h100,
    # pairs_h100, tiles_h100]
    # Not if the caller fixed the partitions: a sequence's bits must not depend on the number of others.
    # Nor for quarters on more than half the SMs (see `partitions_for`).
    alone = chosen_here and pairs * num_partitions <= (num_sms if num_partitions <= 2 else num_sms // 2)
    if width <= 128 and rows <= 32 and itemsize > 1 and alone:
        tile, resident = 128 if seen <= 32768 * num_partitions else 64, 1
    # Each program costs its start, even with nothing to do. H100, short sequences whole, and all in quarters: 64 x
    # 128 in tables of 8192 23.5, 30.7; 64 x 8192 / 1, / 2, / 3, ... 62.1, 64.2. Halves do not gain (64 x 128: 19.1,
    # 18.3), nor do fewer sequences (16 x 512: 18.4, 15.9). [parts_h100]
    if chosen_here and pairs > 2 * num_sms and cluster == 4:
        unsplit_tiles = 512 // tile
    complete = functools.partial(
        completed,
        num_partitions=num_partitions,
        cluster=cluster,
        head_dim=head_dim,
        q_len=q_len,
        group=group,
        capacity=capacity,
        window=window,
        itemsize=itemsize,
        token_scales=token_scales,
        unsplit_tiles=unsplit_tiles,
    )
    config = complete(tile=tile, resident=resident)
    if config.num_stages == 1 and seen > num_partitions * tile > num_partitions * 64:
        return complete(tile=64, resident=resident)  # with one stage a program waits for each tile
    return config


def completed(
    *,
    num_partitions: int,
    cluster: int,
    tile: int,
    resident: int,  # programs that share a SM
    head_dim: int,
    q_len: int,
    group: int,
    capacity: int,
    window: int | None,
    itemsize: int,
    token_scales: int,
    unsplit_tiles: int = 0,
) -> Config:
    """The config with these sizes, and with as many stages as fit and have a tile."""
    rows_first = rows_come_first(q_len=q_len, group=group, itemsize=itemsize)
    width, rows = _sizes.padded_width(head_dim), filled_rows(q_len, group, rows_first=rows_first)
    chunk = chunk_of(head_dim=head_dim, rows=rows, itemsize=itemsize, rows_first=rows_first)
    config = Config(
        num_partitions=num_partitions,
        cluster=cluster,
        num_stages=1,
        tile=tile,
        chunk=chunk,
        rows_first=rows_first,
        unsplit_tiles=unsplit_tiles,
    )

    from pallas_kernels.paged_decode import _refs  # imports Mosaic, and this file is imported everywhere

    def num_bytes(num_stages: int) -> int:
        return _refs.num_bytes(
            _refs.scratch(
                dataclasses.replace(config, num_stages=num_stages),
                q_len=q_len,
                group=group,
                head_dim=head_dim,
                copies_of_tile=1,
                token_scales=token_scales,
                dtype=jnp.bfloat16,
                cache_dtype=jnp.int8 if itemsize == 1 else jnp.bfloat16,
            )
        )

    def fitting_stages(resident: int) -> int:
        room = SMEM_PER_SM // resident - PROGRAM_OVERHEAD
        return bisect.bisect_right(range(1, MAX_STAGES + 1), room, key=num_bytes)

    fitting = fitting_stages(resident)
    if fitting < 2 and resident > 1:
        resident, fitting = 1, fitting_stages(1)
    # No more stages than tiles: each has barriers to set up.
    most_tokens = most_seen(capacity, window=window, q_len=q_len)
    if window is not None:
        most_tokens = min(capacity, most_tokens + tile - 1)  # it may begin within a tile
    most_tokens = -(-most_tokens // num_partitions)  # of a partition
    num_stages = max(1, min(fitting, -(-most_tokens // tile)))
    return dataclasses.replace(
        config,
        num_stages=num_stages,
        # It pays if programs follow each other. H200: 64 x 2080 126.2, last tiles last 128.0. If all programs start
        # together, it costs more to start with tiles that depend on the length: 1 x 8200 14.2, last tiles last 13.7.
        # [last_first_h200]
        last_first=resident == 2,
        # One wait serves both products. H100, with and without: 8 x 8192 92.8, 93.6; 64 x U(1..8192) 364.7, 366.6. With
        # 32 rows two programs of a SM do not have the registers; keys of 8 bits pass through registers themselves.
        # [ahead_h100]
        keys_ahead=num_stages > 1 and chunk == width and rows <= 16 and itemsize > 1,
    )


def rows_come_first(*, q_len: int, group: int, itemsize: int) -> bool:
    # H200, rows first and tokens first. 64 rows: 64 x 8192 501, 591; 8 x 2048 28.8, 54.8; 8 x 256 new tokens after 2048
    # 221, 415. 32 rows: 8 x 2048 27.7, 26.1; 1 x 8192 22.0, in a cluster 16.9; but 64 x 8192 493, 563. [rows_h200]
    # A tile of 8 bits passes through registers, from which the right operand of a product cannot be read.
    return itemsize > 1 and q_len * group > FEW_ROWS


def chunk_of(*, head_dim: int, rows: int, itemsize: int, rows_first: bool) -> int:
    width = _sizes.padded_width(head_dim)
    if rows_first:
        return 64
    if itemsize == 1 and head_dim % 32:
        return width  # the copy engine can only copy such a head whole
    # Wide accumulators take more than 128 registers, even in chunks of 64 rows of O^T.
    return width if width * rows <= 128 * 32 and _sizes.num_parts(head_dim) == 1 else 64


def most_seen(capacity: int, *, window: int | None, q_len: int) -> int:
    """The most tokens of a sequence that its queries see together."""
    return capacity if window is None else min(capacity, window + q_len - 1)


def partitions_for(pairs: int, seen: int, num_sms: int, *, shared: bool, fast_memory: bool) -> int:
    """Partitions, a power of two, for `pairs` sequences times KV heads, in each of which up to `seen` tokens are read.

    `shared`: whether two programs, of 64 tokens a step, can share a SM.
    """
    # All figures here: 8 KV heads, head_dim 128 and an H100, unless they say otherwise.
    # Half the SMs reach the bandwidth; clusters on more of them wait for room. 1 x 512 in 4 partitions 6.1, in 1 7.6;
    # 1 x 8192 in 8 16.5, in 4 21.5, in 16 24.1; 1 x 32768 in 8 49.1, in 16 60 to 65; 8 x 2048 in 1 26.5, in 2 27.3.
    # [curve_h100, configs_h100]
    wanted = min(num_sms // 2 // pairs, seen // 128)
    if wanted >= 4 or (wanted >= 2 and seen >= 1024):
        partitions = 1 << (wanted.bit_length() - 1)
        # Twice as many for long sequences, if the programs are fewer than two fifths of the SMs. 4 KV heads, 5 x 131072
        # in 4 450, in 2 517; 10 KV heads, 1 x 32768 in 8 59.7, in 4 61.1; 4 KV heads of 256, 5 x 32768 224, 244. Not 8
        # that do not share SMs (62.7), nor more than a cluster merges (6 KV heads in 12 40.7, in 8 38.2).
        # [pairs_h100, few_seqs_h100]
        few = 5 * partitions * pairs < 2 * num_sms and (shared or wanted == 3)
        # Twice as many to even out the load. 4 x 8192 in 4 48.1, in 2 49.1; 4 x U(1..8192) 30.9, 33.6. Not for very
        # long sequences on an H100: 32 KV heads, 1 x 131072 in 4 736, in 2 708; on an H200 483 to 493, 524.
        # [parts_h100, pairs_h100, pairs_h200]
        even = shared and partitions == 2 and (seen <= 32768 or fast_memory)
        return 2 * partitions if (few or even) and partitions < MAX_CLUSTER and seen >= 8192 else partitions
    # Parts of long sequences even out the ends of the programs, and unequal lengths. 8 x U(1..8192) in 2 38.8, in 1
    # 50.7; 16 x U(1..8192) in 4 94.1, in 2 96.5; 64 x U(1..8192) in 4 362, in 2 368, in 1 377; 64, one of 32768, the
    # others of 1024, 159, 221 in 2. Equal lengths do not lose: 16 x 8192 in 4 180, in 2 181; 64 x 8192 704 in 4, 2 and
    # 1. Short ones do: 64 x 1024 in 4 96, in 1 92. [parts_h100, configs_h100]
    if pairs > 8 * num_sms or seen < 4096:
        return 1
    if shared and num_sms // 2 < pairs <= 4 * num_sms:
        return 4
    # Not 8: it helps one sequence that is much longer than the others (8, one of 131072: in 8 198, in 2 518), but costs
    # short ones in a wide table (8 x 512: 11.3, 8.9). [parts_h100]
    return 2


def partitions_of_many_rows(pairs: int, seen: int, num_sms: int) -> int:
    """Partitions, any number, for more than FEW_ROWS rows: each program has a SM to itself."""
    # Such programs compute more than they read, and their large partials merge in memory. H200, 8 KV heads, 64 rows:
    # 3 x 8192 in 5 37.3, in 4 37.5; 1 x 512 in 1 10.8, in 2 12.8; 8 x 8192 in 2 75, in 1 89; 12 x 8192 in 1 109, in 2
    # 129; 64 x 8192 501, 547; 64 x U(1..8192) 310, 330. 8-bit caches, 3 x 8192 in 5 52, in 2 120. [rows_h200]
    # To merge n partials takes about as long as n tiles of 128 tokens, and a partition has at least as many of these.
    # H100, 64 rows: 1 x 8192 in 8 25.7, in 12 27.7, in 16 28.4; 1 x 2048 in 4 16.4, in 8 17.2. [rows_h100]
    return max(1, min(num_sms // pairs, math.isqrt(seen // 128))) if seen >= 1024 else 1


def cluster_of(num_partitions: int) -> int:
    """The largest divisor of num_partitions up to 8."""
    # H100, in a cluster, and by the last program: 1 x 8192 15.1, 16.6; 8 x 2048 26.1, 26.9; 1 x 32768 47.6, 50.1. The
    # kernel alone: 1 x 512 3.9, 5.0; of one KV head, 1 x 8192 in 64 partitions of 8 clusters, whose partials the last
    # program merges, 5.8, in 32 without clusters 9.1. [merge_h100]
    return next(cluster for cluster in range(MAX_CLUSTER, 0, -1) if num_partitions % cluster == 0)
