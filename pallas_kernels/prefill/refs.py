"""The arrays of a program of the prefill kernels with their shapes, and the shared memory."""

import dataclasses
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.fetch import WARPS, rows_of_copy
from pallas_kernels.common.interface import Shapes
from pallas_kernels.common.interpret import two_views
from pallas_kernels.common.launch import OptionRefs
from pallas_kernels.common.scales import ring_types
from pallas_kernels.common.sizes import round_up
from pallas_kernels.prefill.config import WG_ROWS, Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrays:
    """The refs of both prefill kernels; None if the call does not have the array.

    `width` is head_dim rounded up to a multiple of 64; `items` is heads divided by the heads of an item.
    """

    # Inputs
    q: Any  # [tokens, heads, head_dim]
    k_cache: Any  # [blocks, block_size, kv_heads, head_dim]
    v_cache: Any  # as k_cache
    block_tables: Any  # int32 [seqs, max_blocks]
    entries: Any  # int32 [max_entries, fields], see `work_list`
    num_entries: Any  # int32 [1]
    options: OptionRefs  # per-row options: f32 [items, rows]
    # Outputs
    out: Any  # [parts * tokens, heads, head_dim]; float32 if there are several parts
    lse: Any  # f32 [parts * tokens, heads]
    # SMEM
    q_smem: Any  # [rows, width], see `query_views`; in the kernel for Hopper [2, 64, width]
    k_smem: Any  # [stages, tile, width]; in the kernel for Hopper always 16-bit
    v_smem: Any  # as k_smem
    k_scales_smem: Any = None  # f32 [stages, tile], per-token scales
    v_scales_smem: Any = None  # as k_scales_smem

    @property
    def query_views(self) -> tuple[Any, Any]:
        """Two views of Q in SMEM: as loaded, and as multiplied."""
        if Shapes.of(self.q, self.k_cache, self.k_cache).multiplied_dtype == self.q.dtype:
            return self.q_smem, self.q_smem
        q, q_float16 = self.q_smem
        return q, q_float16


def query_smem(shape: tuple[int, ...], shapes: Shapes, transforms: tuple[Any, ...]) -> Any:
    """The buffer that `Arrays.query_views` views."""
    q, multiplied = (plgpu.SMEM(shape, x, transforms=transforms) for x in (shapes.q_dtype, shapes.multiplied_dtype))
    return q if shapes.q_dtype == shapes.multiplied_dtype else two_views(q, multiplied)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refs(Arrays):
    # Barriers
    k_full: Any  # [stages]
    k_free: Any  # [stages]
    v_full: Any  # [stages]
    v_free: Any  # [stages]
    zeroed: Any  # []
    # SMEM and barriers of 8-bit caches: tiles that are not widened
    k_8bit_smem: Any = None  # [stages, tile, width]
    v_8bit_smem: Any = None  # as k_8bit_smem
    k_8bit_full: Any = None  # [stages]
    k_8bit_free: Any = None  # [stages]
    v_8bit_full: Any = None  # [stages]
    v_8bit_free: Any = None  # [stages]
    scales_full: Any = None  # [scale stages], with per-token scales only
    # Optional SMEM
    o_smem: Any = None  # [2, 64, columns], unless O is stored through Q's SMEM


def scratch(config: Config, shapes: Shapes, scales: tuple[Any, Any], transforms: tuple[Any, ...]) -> dict[str, Any]:
    """SMEM and barriers, by the names of `Refs`. `scales` are k_scale and v_scale; `transforms` apply to matrices."""
    width, eight_bit = round_up(shapes.head_dim, 64), shapes.is_8bit
    copies = config.tile_tokens // rows_of_copy(shapes.block_size, config.tile_tokens)

    def rings(kind: str, stages: int, numbers: Any, transforms: Any, arrivals: tuple[int, int]) -> dict[str, Any]:
        """Rings of K and V. `arrivals` are the arrival counts of their full and free barriers."""
        return {
            name: ref
            for x in "kv"
            for name, ref in (
                (f"{x}{kind}_smem", plgpu.SMEM((stages, config.tile_tokens, width), numbers, transforms=transforms)),
                (f"{x}{kind}_full", plgpu.Barrier(num_arrivals=arrivals[0], num_barriers=stages)),
                (f"{x}{kind}_free", plgpu.Barrier(num_arrivals=arrivals[1], num_barriers=stages)),
            )
        }

    fetched: dict[str, Any] = {}
    if eight_bit:
        stages = config.num_8bit_stages
        fetched = rings("_8bit", stages, shapes.cache_dtype, (), (copies, 1))
        if scale_rings := ring_types(
            dict(zip("kv", scales, strict=True)), stages=config.num_scale_stages, tile=config.tile_tokens
        ):
            barriers = plgpu.Barrier(num_arrivals=WARPS, num_barriers=config.num_scale_stages)
            fetched |= scale_rings | {"scales_full": barriers}
    output: dict[str, Any] = {}
    if config.output_columns and config.num_parts == 1:
        output["o_smem"] = plgpu.SMEM((2, WG_ROWS, config.output_columns), shapes.q_dtype, transforms=transforms)
    return dict(
        q_smem=query_smem((2, WG_ROWS, width), shapes, transforms),
        **output,
        **fetched,
        **rings("", config.num_stages, shapes.multiplied_dtype, transforms, (1 if eight_bit else copies, 2)),
        zeroed=plgpu.Barrier(num_arrivals=2),
    )
