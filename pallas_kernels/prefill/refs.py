"""The arrays of a program of the prefill kernel, each with its shape, and its shared memory."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.fetch import WARPS, copy_rows
from pallas_kernels.common.interpret import two_views
from pallas_kernels.common.scales import ring_types
from pallas_kernels.common.sizes import is_8bit
from pallas_kernels.prefill.config import WG_ROWS, Config


@dataclasses.dataclass(frozen=True)
class Refs:
    """`width` is head_dim, rounded up to a multiple of 64; `items` are heads / heads of an item. None: not of this
    call."""

    # Inputs, GMEM
    q: Any  # [tokens, heads, head_dim]
    k_cache: Any  # [blocks, block_size, kv_heads, head_dim]
    v_cache: Any  # as k_cache
    block_tables: Any  # int32 [seqs, max_blocks]
    entries: Any  # int32 [max_entries, fields], see `work_list`
    num_entries: Any  # int32 [1]
    scale: Any  # f32 [1]
    # Outputs, GMEM
    out: Any  # [parts * tokens, heads, head_dim]; float32 of several parts
    lse: Any  # f32 [parts * tokens, heads]
    # SMEM
    q_smem: Any  # [2, 64, width]; for an 8-bit cache also as float16, see `_q_views`
    k_smem: Any  # [stages, tile, width], of 16 bits
    v_smem: Any  # as k_smem
    # Barriers
    k_full: Any  # [stages]
    k_free: Any  # [stages]
    v_full: Any  # [stages]
    v_free: Any  # [stages]
    zeroed: Any  # []
    # Options, GMEM
    sliding_window: Any = None  # int32 [1]
    logits_soft_cap: Any = None  # f32 [1]
    alibi_slopes: Any = None  # f32 [items, 128], of the rows of an item
    sinks: Any = None  # as alibi_slopes; of several parts left to the merge
    k_scale: Any = None  # f32 [1], [kv_heads] or [blocks, block_size, kv_heads]
    v_scale: Any = None  # as k_scale
    # SMEM and barriers of 8-bit caches: tiles as they are fetched
    k_8bit_smem: Any = None  # [stages, tile, width]
    v_8bit_smem: Any = None  # as k_8bit_smem
    k_8bit_full: Any = None  # [stages]
    k_8bit_free: Any = None  # [stages]
    v_8bit_full: Any = None  # [stages]
    v_8bit_free: Any = None  # [stages]
    k_scales_smem: Any = None  # f32 [scale stages, tile], scales of tokens
    v_scales_smem: Any = None  # as k_scales_smem
    scales_full: Any = None  # [scale stages], if there are any
    # SMEM of some calls
    o_smem: Any = None  # [2, 64, columns], where O does not leave through Q's


def scratch(
    config: Config,
    *,
    width: int,
    block_size: int,
    dtype: Any,  # of q
    cache_dtype: Any,
    scales: tuple[Any, Any],  # k_scale and v_scale
    matrix: tuple[Any, ...],  # transforms of a matrix in SMEM
) -> dict[str, Any]:
    """SMEM and barriers, by the names of `Refs`."""
    eight_bit = is_8bit(cache_dtype)
    copies = config.tile_tokens // copy_rows(block_size, config.tile_tokens)
    multiplied = jnp.float16 if eight_bit else dtype

    def rings(kind: str, stages: int, numbers: Any, transforms: Any, arrivals: tuple[int, int]) -> dict[str, Any]:
        """Of K and V, with `arrivals` at their barriers: tiles that are full, and free."""
        return {
            name: ref
            for x in "kv"
            for name, ref in (
                (f"{x}{kind}_smem", plgpu.SMEM((stages, config.tile_tokens, width), numbers, transforms=transforms)),
                (f"{x}{kind}_full", plgpu.Barrier(num_arrivals=arrivals[0], num_barriers=stages)),
                (f"{x}{kind}_free", plgpu.Barrier(num_arrivals=arrivals[1], num_barriers=stages)),
            )
        }

    q_smem: Any = plgpu.SMEM((2, WG_ROWS, width), dtype, transforms=matrix)
    if multiplied != dtype:
        q_smem = two_views(q_smem, plgpu.SMEM((2, WG_ROWS, width), multiplied, transforms=matrix))
    fetched: dict[str, Any] = {}
    if eight_bit:
        stages = config.num_8bit_stages
        fetched = rings("_8bit", stages, cache_dtype, (), (copies, 1))
        if scale_rings := ring_types(
            dict(zip("kv", scales, strict=True)), stages=config.num_scale_stages, tile=config.tile_tokens
        ):
            barriers = plgpu.Barrier(num_arrivals=WARPS, num_barriers=config.num_scale_stages)
            fetched |= scale_rings | {"scales_full": barriers}
    output: dict[str, Any] = {}
    if config.output_columns and config.num_parts == 1:
        output["o_smem"] = plgpu.SMEM((2, WG_ROWS, config.output_columns), dtype, transforms=matrix)
    return dict(
        q_smem=q_smem,
        **output,
        **fetched,
        **rings("", config.num_stages, multiplied, matrix, (1 if eight_bit else copies, 2)),
        zeroed=plgpu.Barrier(num_arrivals=2),
    )
