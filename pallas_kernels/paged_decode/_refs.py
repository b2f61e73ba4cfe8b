"""The arrays of a program of the decode kernel, each with its shape, and its shared memory."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _fetch, _scales, _widen
from pallas_kernels._sizes import filled_rows, is_narrow, num_parts, padded_width, round_up
from pallas_kernels.paged_decode._inbox import sharing_of

if TYPE_CHECKING:
    from pallas_kernels.decode_config import Config


@dataclasses.dataclass(frozen=True)
class Refs:
    """`rows` is q_len * group, padded (`_sizes.filled_rows`). `width` is head_dim, or the sum of its `parts`, each
    rounded up to a multiple of 64. None: not of this call."""

    # Inputs, GMEM
    q: Any  # [seqs, q_len, heads, head_dim], or of `width` where a head has several parts
    k_cache: Any  # [blocks, block_size, kv_heads * parts, head_dim / parts]
    v_cache: Any  # likewise
    block_tables: Any  # int32 [seqs, max_blocks]
    lengths: Any  # int32 [seqs]
    scale: Any  # f32 [1]
    # Outputs, GMEM
    out: Any  # [seqs, q_len, heads, width]
    lse: Any  # f32 [seqs, kv_heads, rows]
    # SMEM
    q_flat_smem: Any  # [rows + 1, width], Q as it comes, and later O
    q_smem: Any  # [rows, width]
    k_smem: Any  # [stages * parts, tile, width / parts]; of 8 bits also as words: see `_widen.Tiles`
    v_smem: Any  # likewise
    lse_smem: Any  # f32 [rows]
    # Barriers
    q_full: Any  # []
    k_full: Any  # [stages]
    v_full: Any  # [stages]
    k_free: Any  # [stages]
    v_free: Any  # [stages]
    # Of a plan, GMEM
    partitions: Any = None  # int32 [total_partitions, 3]
    partition_starts: Any = None  # int32 [seqs + 1]
    # Of several partials a sequence, GMEM: see `_merge.types_of`
    partial_acc: Any = None  # f32 [partials of all, kv_heads, width, rows]; of many rows 64 x 64 of O below each other
    partial_ml: Any = None  # f32 [partials of all, kv_heads, shares, 2, rows]
    arrivals: Any = None  # int32 [seqs, kv_heads, shares], how many partials are stored
    # Options, GMEM
    sliding_window: Any = None  # int32 [1]
    logits_soft_cap: Any = None  # f32 [1]
    alibi_slopes: Any = None  # f32 [kv_heads, rows]
    sinks: Any = None  # f32 [kv_heads, rows]
    tree_bits: Any = None  # int32 [seqs, words, rows]
    k_scale: Any = None  # f32 [1], [kv_heads] or [blocks, block_size, kv_heads]
    v_scale: Any = None  # likewise
    # SMEM of some calls
    p_smem: Any = None  # [rows, tile]; not of many rows
    scales_smem: Any = None  # of scales of tokens, see `_scales.scratch`
    scales_full: Any = None  # barriers [stages]
    # SMEM of a cluster, see `_inbox.Sharing.scratch`
    columns_smem: Any = None  # [rows, columns]
    acc_smem: Any = None
    ml_smem: Any = None
    arrived_smem: Any = None
    ready: Any = None
    # Of a cluster in interpret mode, see `_inbox.InterpretedInbox`
    m_smem: Any = None
    l_smem: Any = None
    partials_written: Any = None
    sent_acc: Any = None
    sent_m: Any = None
    sent_l: Any = None


def scratch(
    config: "Config",
    *,
    q_len: int,
    group: int,
    head_dim: int,
    copies_of_tile: int,  # by which arrivals are counted
    token_scales: int,
    dtype: Any,  # of q
    cache_dtype: Any,
) -> dict[str, Any]:
    """SMEM and barriers, by the names of `Refs`."""
    # The copy engine needs tiles that divide the head: 64 columns, or 32 for 96, 16 for 80 and 112. The operands of a
    # product must be tiled alike.
    parts, width = num_parts(head_dim), padded_width(head_dim)
    part = head_dim // parts
    columns = next(columns for columns in (64, 32, 16) if part % columns == 0 or part < columns)
    matrix = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns))  # type: ignore[abstract]
    rows, stages, tile = filled_rows(q_len, group, rows_first=config.rows_first), config.num_stages, config.tile
    tiles: dict[str, Any] = dict(
        q_smem=plgpu.SMEM((rows, width), dtype, transforms=matrix),
        k_smem=plgpu.SMEM((stages * parts, tile, width // parts), dtype, transforms=matrix),
        v_smem=plgpu.SMEM((stages * parts, tile, width // parts), dtype, transforms=matrix),
    )
    if not config.rows_first:
        tiles["p_smem"] = plgpu.SMEM((rows, tile), dtype, transforms=matrix)
    if is_narrow(cache_dtype):
        tiles = _widen.scratch(
            (stages, tile, width),
            rows=rows,
            chunk=config.chunk,
            dtype=cache_dtype,
            head_dim=head_dim,
        )
    sums: dict[str, Any] = {}
    if config.cluster > 1:
        sharing = sharing_of(rows=rows, width=width, cluster=config.cluster, q_len=q_len, group=group)
        sums = {"columns_smem": plgpu.SMEM((rows, sharing.columns), dtype), **sharing.scratch()}
    return dict(
        # Untiled rows, for Q and then O. One extra row keeps Mosaic from tiling it: a copy of a narrow head cannot
        # write tiles.
        q_flat_smem=plgpu.SMEM((rows + 1, width), dtype),
        **tiles,
        **_scales.scratch(token_scales, stages=stages, tile=tile, warps=_fetch.WARPS),
        lse_smem=plgpu.SMEM((rows,), jnp.float32),
        q_full=plgpu.Barrier(num_arrivals=q_len),
        k_full=plgpu.Barrier(num_arrivals=copies_of_tile * parts, num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=copies_of_tile * parts, num_barriers=stages),
        k_free=plgpu.Barrier(num_barriers=stages),
        v_free=plgpu.Barrier(num_barriers=stages),
        **sums,
    )


def num_bytes(refs: dict[str, Any]) -> int:
    """Bytes of these, each array rounded up to where the next may begin."""
    return sum(map(_bytes_of, refs.values()))


def _bytes_of(ref: Any) -> int:
    if isinstance(ref, plgpu.Barrier | plgpu.ClusterBarrier):
        return 8 * int(np.prod(ref.num_barriers))
    return round_up(math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize, 1024)
