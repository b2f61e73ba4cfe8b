"""The arrays of a program of the decode kernel, each with its shape, and its shared memory."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._sizes import filled_rows, num_parts, padded_width, round_up

if TYPE_CHECKING:
    from pallas_kernels.decode_config import Config


@dataclasses.dataclass(frozen=True)
class Refs:
    """`rows` is q_len * group, padded to 64. `width` is head_dim, or the sum of its `parts`, each
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
    k_smem: Any  # [stages * parts, tile, width / parts]
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
    partial_acc: Any = None  # f32 [partials of all, kv_heads, width, rows], 64 x 64 of O below each other
    partial_ml: Any = None  # f32 [partials of all, kv_heads, 1, 2, rows]
    arrivals: Any = None  # int32 [seqs, kv_heads, 1], how many partials are stored
    # Options, GMEM
    sliding_window: Any = None  # int32 [1]
    logits_soft_cap: Any = None  # f32 [1]
    alibi_slopes: Any = None  # f32 [kv_heads, rows]
    sinks: Any = None  # f32 [kv_heads, rows]
    tree_bits: Any = None  # int32 [seqs, words, rows]
    # Of caches of 8 bits, which this kernel does not take
    k_scale: None = None
    v_scale: None = None


def scratch(
    config: "Config",
    *,
    q_len: int,
    group: int,
    head_dim: int,
    copies_of_tile: int,  # by which arrivals are counted
    dtype: Any,
) -> dict[str, Any]:
    """SMEM and barriers, by the names of `Refs`."""
    # The copy engine needs tiles that divide the head: 64 columns, or 32 for 96, 16 for 80 and 112. The operands of a
    # product must be tiled alike.
    parts, width = num_parts(head_dim), padded_width(head_dim)
    part = head_dim // parts
    columns = next(columns for columns in (64, 32, 16) if part % columns == 0 or part < columns)
    matrix = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns))  # type: ignore[abstract]
    rows, stages, tile = filled_rows(q_len, group, rows_first=True), config.num_stages, config.tile
    ring = plgpu.SMEM((stages * parts, tile, width // parts), dtype, transforms=matrix)
    return dict(
        # Untiled rows, for Q and then O. One extra row keeps Mosaic from tiling it: a copy of a narrow head cannot
        # write tiles.
        q_flat_smem=plgpu.SMEM((rows + 1, width), dtype),
        q_smem=plgpu.SMEM((rows, width), dtype, transforms=matrix),
        k_smem=ring,
        v_smem=ring,
        lse_smem=plgpu.SMEM((rows,), jnp.float32),
        q_full=plgpu.Barrier(num_arrivals=q_len),
        k_full=plgpu.Barrier(num_arrivals=copies_of_tile * parts, num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=copies_of_tile * parts, num_barriers=stages),
        k_free=plgpu.Barrier(num_barriers=stages),
        v_free=plgpu.Barrier(num_barriers=stages),
    )


def num_bytes(refs: dict[str, Any]) -> int:
    """Bytes of these, each array rounded up to where the next may begin."""
    return sum(map(_bytes_of, refs.values()))


def _bytes_of(ref: Any) -> int:
    if isinstance(ref, plgpu.Barrier):
        return 8 * int(np.prod(ref.num_barriers))
    return round_up(math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize, 1024)
