"""The arrays of a program of the decode kernel with their shapes, and its shared memory."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import widen
from pallas_kernels.common.fetch import rows_of_copy
from pallas_kernels.common.interface import Shapes
from pallas_kernels.common.launch import OptionRefs
from pallas_kernels.common.rows import matrix
from pallas_kernels.common.scales import ring_types
from pallas_kernels.common.sizes import COLUMNS, div, round_up
from pallas_kernels.decode.config import TILE, Config


@dataclasses.dataclass(frozen=True)
class Refs:
    """The refs of a program; None if the call does not have the array.

    `rows` is q_len * group rounded up to 8; `width` and `value_width` are head_dim and value_dim rounded up to 64. The
    values of a latent are the first numbers of its keys, so it has no v_cache and no v_smem.
    """

    # Inputs, GMEM
    q: Any  # [seqs, q_len, heads, head_dim]
    k_cache: Any  # [blocks, block_size, kv_heads, head_dim]
    block_tables: Any  # int32 [seqs, max_blocks]
    lengths: Any  # int32 [seqs]
    options: OptionRefs  # per-row options: f32 [kv_heads, rows]
    # Outputs, GMEM
    out: Any  # [seqs, q_len, heads, value_dim], in q's dtype; [partitions * seqs, ...] if XLA merges them
    lse: Any  # f32 [seqs, q_len, heads]
    # SMEM
    q_smem: Any  # [rows, width], in q's dtype
    k_smem: Any  # [stages, 64, width], in the cache's dtype; 8-bit caches also have a view of words, see `widen.Tiles`
    p_smem: Any  # [64, rows], in the dtype of the products
    # V, unless the values are part of the keys
    v_cache: Any = None  # GMEM [blocks, block_size, kv_heads, value_dim]
    v_smem: Any = None  # SMEM [stages, 64, value_width], as k_smem
    # Runs with padding and a window, GMEM
    num_read: Any = None  # int32 [seqs], number of query tokens that are not padding
    # A plan, GMEM
    partitions: Any = None  # int32 [total_partitions, 3]
    # Several partitions, GMEM: see `results.partial_types`
    partial_acc: Any = None  # f32 [partitions of all sequences, kv_heads, value_width, rows]
    partial_ml: Any = None  # f32 [partitions of all sequences, kv_heads, 1, 2, rows]
    arrivals: Any = None  # int32 [seqs, kv_heads, 1], number of partials stored so far
    # SMEM of 8-bit caches
    wide_q_smem: Any = None  # float16 [width, rows]
    k_scales_smem: Any = None  # f32 [stages, 64], per-token scales
    v_scales_smem: Any = None  # as k_scales_smem
    # Barriers of TMA
    k_full: Any = None  # [stages]
    v_full: Any = None  # [stages]
    # From the configuration. If it is above 1, the "kv_heads" axis of partials and options counts parts of KV heads.
    head_parts: int = 1

    @property
    def block_size(self) -> int:
        return self.k_cache.shape[1]

    @property
    def group(self) -> int:
        return self.q.shape[2] // (self.k_cache.shape[2] * self.head_parts)

    def cache_head(self, kv_head: jax.Array) -> jax.Array:
        return kv_head if self.head_parts == 1 else div(kv_head, self.head_parts)

    @property
    def value_ring(self) -> Any:
        return self.k_smem if self.v_smem is None else self.v_smem


def scratch(config: Config, shapes: Shapes, scales: tuple[Any, Any]) -> dict[str, Any]:
    """SMEM and barriers, by the names of `Refs`. `scales` are k_scale and v_scale."""
    rows, width = shapes.rows, round_up(shapes.head_dim, COLUMNS)
    of_rows = next(columns for columns in (64, 32, 16, 8) if rows % columns == 0)
    stages = config.num_stages
    names = "kv"[: len(shapes.widths)]  # a latent has one ring
    arrays: dict[str, Any] = {}
    for name, its_width in zip(names, shapes.widths, strict=True):
        shape = (stages, TILE, round_up(its_width, COLUMNS))
        ring = plgpu.SMEM(shape, shapes.cache_dtype, transforms=matrix(COLUMNS, 2))
        arrays[f"{name}_smem"] = widen.scratch(shape, shapes.cache_dtype) if shapes.is_8bit else ring
    if shapes.is_8bit:
        arrays["wide_q_smem"] = plgpu.SMEM((width, rows), jnp.float16, transforms=matrix(of_rows, 2))
        arrays |= ring_types(dict(zip(names, scales, strict=False)), stages=stages, tile=TILE)
    if config.copies == "tma":
        for name in names:
            num_copies = TILE // rows_of_copy(shapes.block_size, TILE)
            arrays[f"{name}_full"] = plgpu.Barrier(num_arrivals=num_copies, num_barriers=stages)
    return dict(
        q_smem=plgpu.SMEM((rows, width), shapes.q_dtype, transforms=matrix(COLUMNS, 2)),
        p_smem=plgpu.SMEM((TILE, rows), shapes.multiplied_dtype, transforms=matrix(of_rows, 2)),
        **arrays,
    )
