"""What the kernel of `paged_decode` takes, and how a call is cut into partitions, clusters, tiles and stages.

Pure functions of ints: nothing here is traced, and all of it is tested on a CPU. A comment names in brackets the
files of `benchmarks/results/decisions/` that decided its rule.
"""

import bisect
import dataclasses
import functools
from typing import Any, Literal

import jax.numpy as jnp

from pallas_kernels import _sizes
from pallas_kernels._sizes import filled_rows

DTYPES = (jnp.bfloat16, jnp.float16)
MAX_ROWS = 64  # q_len * group: with more, the accumulators of head_dim 256 no longer fit the registers
MAX_STAGES = 8
MAX_SEQS = 65535  # the grid's slowest axis, where CUDA allows no more
SMEM_PER_SM = 228 * 1024  # bytes, Hopper
PROGRAM_OVERHEAD = 3 * 1024  # bytes of SMEM that each resident program costs: 1024, and 2048 of Mosaic's reductions
MAX_CLUSTER = 8  # programs in a cluster that any Hopper GPU can start
FEW_ROWS = 32  # of a KV head; more are the M dimension of the products of a 16-bit cache
PARTIAL_BYTES = 128 * 1024 * 1024  # that partials shared out by length may take in memory


@dataclasses.dataclass(frozen=True)
class Config:
    num_partitions: int  # programs for each sequence and KV head; with `total_partitions`, the most that one can get
    cluster: int  # partitions that merge in shared memory, a divisor of num_partitions, at most 8
    num_stages: int  # tiles of K and of V in SMEM at a time
    tile: int  # tokens, 64 or 128
    chunk: int  # columns of O that one accumulator holds, or many rows leave in, of 64 that divide the padded head_dim
    rows_first: bool = False  # whether the rows are the M dimension of the products, filled up to 64, not the tokens
    last_first: bool = False  # whether a program starts with the tiles at the end that some query does not see whole
    keys_ahead: bool = False  # whether few rows' keys are multiplied beside the values of the tile before
    total_partitions: int | None = None  # of all sequences together, shared out by length; None: as many for each
    unsplit_tiles: int = 0  # a sequence with no more of them stays whole: the first program of the cluster works alone

    @property
    def num_partials(self) -> int:
        """What reaches memory for each sequence and KV head: 1 is the finished rows, more need the merge kernel.

        With a plan, at most."""
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
    capacity: int,  # what a table row can hold, in tokens: it bounds what there can be to do
    num_sms: int,
    fast_memory: bool = False,  # an H200's
    window: int | None = None,  # sliding, in tokens, where it is known: it bounds the same
    num_partitions: int | Literal["balanced"] | None = None,  # fixed by the caller
    itemsize: int = 2,  # of the cache's numbers, in bytes
    token_scales: int = 0,  # how many a token and KV head has: 2 where K and V have their own
) -> Config:
    rows_first = rows_come_first(q_len=q_len, group=group, itemsize=itemsize)
    width, rows = _sizes.padded_width(head_dim), filled_rows(q_len, group, rows_first=rows_first)
    pairs = max(1, seqs * kv_heads)
    # H100, tables of 8192 tokens: 64 x 8192 with a window of 128 15.7 us, 23.5 where nothing is known of it; with one
    # of 1024 92.9 and 95.6. [pairs_h100]
    seen = most_seen(capacity, window=window, q_len=q_len)
    chunk = chunk_of(head_dim=head_dim, rows=rows, itemsize=itemsize, rows_first=rows_first)
    resident = 2 if width <= 192 and rows <= 32 else 1
    # H200, 64 rows, us: 64 x 8192 502 with 128 tokens a step, 521 with 64; 8 x 256 new tokens after 2048 221, 255.
    # [rows_h200]
    tile = 128 if rows_first and width <= 128 else 64
    if width <= 128 and rows <= 32 and itemsize == 1:
        # 128 tokens are as many bytes as 64 of 16 bits: 64 x 8192 369 us against 381. [configs_h100]
        tile, resident = 128, 2 if width <= 64 else 1
    total_partitions, unsplit_tiles = None, 0
    if num_partitions == "balanced":
        num_partitions = None
        total_partitions = balanced_partitions(seqs, kv_heads, num_sms)
        if kv_heads * (total_partitions or 0) * width * rows * 4 > PARTIAL_BYTES:
            total_partitions = None
    if total_partitions is not None:
        cluster, num_partitions = 1, most_of_one(total_partitions, seqs=seqs)
    else:
        chosen_here = num_partitions is None
        if num_partitions is None and q_len * group > FEW_ROWS:
            num_partitions = partitions_of_many_rows(pairs, seen, num_sms)
        elif num_partitions is None:
            shared = itemsize > 1 and width <= 128 and rows <= 16
            num_partitions = partitions_for(pairs, seen, num_sms, shared=shared, fast_memory=fast_memory)
            # A tile of 8-bit numbers is half the bytes and as much work: half the SMs no longer reach the bandwidth.
            # Clusters of 8 on all SMs would wait for room, so up to 4 (H100, 8 x 4096: 27.8 us in 2, 31.0 in 1).
            # [configs_h100]
            if itemsize == 1 and num_partitions <= 2 and 2 * num_partitions * pairs <= num_sms and seen >= 1024:
                num_partitions *= 2
        cluster = cluster_of(num_partitions) if chunk == width and q_len * group <= FEW_ROWS else 1
        # Where every program has a SM to itself, what counts is how fast one is: 128 tokens a step take less than twice
        # as long as 64 (H100, 1 x 512 in 1 partition: 6.2 us against 7.7; 8 x 8192: 94.0 against 96.9), but for so long
        # that the start no longer counts (32 KV heads, 1 x 131072 in 2: 704 us with 64, 734 with 128). [configs_h100,
        # tiles_h100]
        # Not where the caller fixed the partitions: then a sequence's bits must not hang on how many others there are.
        # Nor for quarters on more than half the SMs (see `partitions_for`).
        alone = chosen_here and pairs * num_partitions <= (num_sms if num_partitions <= 2 else num_sms // 2)
        if width <= 128 and rows <= 32 and itemsize > 1 and alone:
            tile, resident = 128 if seen <= 32768 * num_partitions else 64, 1
        # A program costs its start, whatever there is for it to do (H100, tables of 8192 tokens: 64 x 128 23.5 us, with
        # all in quarters 30.7; 64 x 8192 / 1, / 2, / 3, ... 62.1, 64.2). Halves gain nothing (19.1, 18.3), nor do fewer
        # sequences (16 x 512 18.4, 16.0). [parts_h100]
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
        total_partitions=total_partitions,
        unsplit_tiles=unsplit_tiles,
    )
    config = complete(tile=tile, resident=resident)
    if config.num_stages == 1 and seen > num_partitions * tile > num_partitions * 64:
        return complete(tile=64, resident=resident)  # with one stage it would wait for each tile
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
    total_partitions: int | None = None,
    unsplit_tiles: int = 0,
) -> Config:
    """The config in which the rest follows from these: as many stages as fit and have a tile."""
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
        total_partitions=total_partitions,
        unsplit_tiles=unsplit_tiles,
    )

    from pallas_kernels import _scratch  # imports Mosaic, and this file is imported everywhere

    def num_bytes(num_stages: int) -> int:
        return _scratch.num_bytes(
            _scratch.scratch(
                dataclasses.replace(config, num_stages=num_stages),
                q_len=q_len,
                group=group,
                head_dim=head_dim,
                copies_of_tile=1,
                token_scales=token_scales,
                dtype=jnp.bfloat16,
                cache_dtype=jnp.int8 if itemsize == 1 else jnp.bfloat16,
                interpret=None,
            )
        )

    def fitting_stages(resident: int) -> int:
        room = SMEM_PER_SM // resident - PROGRAM_OVERHEAD
        return bisect.bisect_right(range(1, MAX_STAGES + 1), room, key=num_bytes)

    fitting = fitting_stages(resident)
    if fitting < 2 and resident > 1:
        resident, fitting = 1, fitting_stages(1)
    # Each stage has barriers to set up: 1 x 512 4.4 us with 1, 4.7 with 3 (H100).
    most_tokens = most_seen(capacity, window=window, q_len=q_len)
    if window is not None:
        most_tokens = min(capacity, most_tokens + tile - 1)  # it may begin within a tile
    if total_partitions is None:
        most_tokens = -(-most_tokens // num_partitions)  # of a partition
    num_stages = max(1, min(fitting, -(-most_tokens // tile)))
    return dataclasses.replace(
        config,
        num_stages=num_stages,
        # Worth it where programs follow each other: 64 x 2080 126.2 us instead of 128.0 (H200). Where each starts
        # together with all others, to begin with what hangs on the length costs more: 1 x 8200 14.2 instead of 13.7.
        # [last_first_h200]
        last_first=resident == 2,
        # One wait for both: 8 x 8192 92.8 us instead of 93.6, 64 x U(1..8192) 364.7 instead of 366.6 (H100). With 32
        # rows two programs of a SM would not have the registers; keys of 8 bits pass through registers themselves.
        # [ahead_h100]
        keys_ahead=num_stages > 1 and chunk == width and rows <= 16 and itemsize > 1,
    )


def rows_come_first(*, q_len: int, group: int, itemsize: int) -> bool:
    # H200, us: 64 rows of 64 x 8192 501, 591 the other way round in the same tiles, of 8 x 2048 28.8 and 54.8, of a
    # prompt, 8 x 256 new tokens after 2048, 221 and 415. But 32 rows of 8 x 2048 27.7 and 26.2, of 1 x 8192 22.0 and,
    # in a cluster, 16.9 (of 64 x 8192 493 and 563). [rows_h200]
    # A tile of 8 bits passes through registers, which the right operand of a product may not.
    return itemsize > 1 and q_len * group > FEW_ROWS


def chunk_of(*, head_dim: int, rows: int, itemsize: int, rows_first: bool) -> int:
    width = _sizes.padded_width(head_dim)
    if rows_first:
        return 64
    if itemsize == 1 and head_dim % 32:
        return width  # the copy engine takes such a head whole alone
    # Wide accumulators are worked on 64 rows of O^T at a time and still take more than 128 registers.
    return width if width * rows <= 128 * 32 and _sizes.num_parts(head_dim) == 1 else 64


def most_seen(capacity: int, *, window: int | None, q_len: int) -> int:
    """How many tokens of a sequence its queries see together, at most."""
    return capacity if window is None else min(capacity, window + q_len - 1)


def partitions_for(pairs: int, seen: int, num_sms: int, *, shared: bool, fast_memory: bool) -> int:
    """A power of two, for `pairs` sequences times KV heads, of each of which up to `seen` tokens are read.

    `shared`: whether two programs, of 64 tokens a step, can share a SM.
    """
    # Half the SMs reach the bandwidth; clusters on more of them wait for room. H100, 8 KV heads, head_dim 128, us:
    # 1 x 512 5.0 in 4 partitions, 6.3 in 1; 1 x 8192 16.5 in 8, 17.6 in 4, 23 in 16; 1 x 32768 49.4 in 8, 61 in 16;
    # 2 x 8192 27.6 in 4, 33 in 8; 8 x 2048 26.8 in 1, 27.4 in 2. 1 KV head, 1 x 32768: 13.5 in 64, 17.7 in 128.
    # [curve_h100, configs_h100]
    wanted = min(num_sms // 2 // pairs, seen // 128)
    if wanted >= 4 or (wanted >= 2 and seen >= 1024):
        partitions = 1 << (wanted.bit_length() - 1)
        # Long sequences of which that makes fewer than two fifths of the SMs' programs: 5 x 131072 of 4 KV heads 450 in
        # 4, 517 in 2; of 10 KV heads 1 x 32768 59.7 in 8, 61.1 in 4; head_dim 256, 5 x 32768 of 4 KV heads 224, 244.
        # Not 8 that do not share SMs (62.7), nor more than merge in a cluster (6 KV heads 40.7 in 12, 38.2 in 8).
        # [pairs_h100, few_seqs_h100]
        few = 5 * partitions * pairs < 2 * num_sms and (shared or wanted == 3)
        # 4 x 8192 48.2 in 4, 49.1 in 2; 4 x U(1..8192) 30.9, 33.6. 32 KV heads, 1 x 131072 736, 708; on an H200 483 to
        # 491, 524 (in 2 with 128 tokens a step 484, for which an H100 takes 723 to 735). [parts_h100, pairs_h100,
        # pairs_h200]
        even = shared and partitions == 2 and (seen <= 32768 or fast_memory)
        return 2 * partitions if (few or even) and partitions < MAX_CLUSTER and seen >= 8192 else partitions
    # Parts of long sequences even out what the last programs have left, or who has the longest: 8 x U(1..8192) 38.8 in
    # 2, 50.7 in 1; 16 x U(1..8192) 94.1 in 4, 96.5 in 2; 64 x U(1..8192) 362 in 4, 368 in 2, 377 in 1; 64 x 1024 beside
    # one x 32768 159, 221. Equal ones do not mind: 16 x 8192 180 in 4, 181 in 2; 64 x 8192 704, 704, 705 in 1. Short
    # ones pay more than that brings: 64 x 1024 96 in 4, 92 in 1. [parts_h100]
    if pairs > 8 * num_sms or seen < 4096:
        return 1
    if shared and num_sms // 2 < pairs <= 4 * num_sms:
        return 4
    # Eighths of 8 sequences would serve one that is longer than all others (131072 beside 1024: 199, 520 in 2), and
    # make all short ones in such a table pay for it (8 x 512: 11.8, 9.2).
    return 2


def partitions_of_many_rows(pairs: int, seen: int, num_sms: int) -> int:
    """Any number, for more than FEW_ROWS, of which a program has its SM to itself and does not wait for the memory."""
    # They merge in memory, and are much. H200, 8 KV heads, 64 rows, us: 3 x 8192 37.3 in 5, 37.5 in 4; 1 x 2048 14.2 in
    # 8, 16.1 in 4, 18.8 in 2; 1 x 512 10.8 in 1, 12.8 in 2; 8 x 8192 75 in 2, 89 in 1; 12 x 8192 109 in 1, 129 in 2;
    # 64 x 8192 501 in 1, 547 in 2; 64 x U(1..8192) 310, 330. 8-bit caches 3 x 8192 52 in 5, 120 in 2. [rows_h200]
    return max(1, min(num_sms // pairs, seen // 256)) if seen >= 1024 else 1


def balanced_partitions(seqs: int, kv_heads: int, num_sms: int) -> int | None:
    """How many partitions to share out by length, for a KV head; None where there is nobody to share them with."""
    # As many again as there are sequences: one that is no longer than the mean stays whole, and needs no merge.
    # And no fewer than half the SMs can work on, which reach the bandwidth.
    total = seqs + max(seqs, num_sms // 2 // kv_heads)
    return total if seqs > 1 and total <= MAX_SEQS else None


def most_of_one(total_partitions: int, *, seqs: int) -> int:
    """The most partitions that one sequence can get of what is shared out."""
    return total_partitions - seqs + 1


def cluster_of(num_partitions: int) -> int:
    """The most partitions, up to 8, that can merge in shared memory with none left over."""
    return next(cluster for cluster in range(MAX_CLUSTER, 0, -1) if num_partitions % cluster == 0)
