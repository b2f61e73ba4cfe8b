"""The shared memory of a program of the decode kernel: rings of tiles and scales, Q, P, sums, and the barriers."""

import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _cluster, _fetch, _finish, _scales, _widen
from pallas_kernels._sizes import filled_rows, is_narrow, num_parts, padded_width, round_up

if TYPE_CHECKING:
    from pallas_kernels.decode_config import Config


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
    interpret: Any,
) -> dict[str, Any]:
    """The arrays and barriers of a program, by the names that the kernel has for them."""
    # The copy engine needs tiles that divide the head: 64 columns, or 32 for 96, 16 for 80 and 112. The operands of a
    # product must be tiled alike.
    parts, width = num_parts(head_dim), padded_width(head_dim)
    part = head_dim // parts
    columns = next(columns for columns in (64, 32, 16) if part % columns == 0 or part < columns)
    matrix = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns))  # type: ignore[abstract]
    rows, stages, tile = filled_rows(q_len, group, rows_first=config.rows_first), config.num_stages, config.tile
    sharing = _cluster.sharing_of(rows=rows, width=width, cluster=config.cluster, q_len=q_len, group=group)
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
            interpret=interpret,
        )
    return dict(
        # Untiled rows, for Q and then O. One extra row keeps Mosaic from tiling it: a copy of a narrow head cannot
        # write tiles.
        q_flat_smem=plgpu.SMEM((rows + 1, width), dtype),
        **tiles,
        **_scales.scratch(token_scales, stages=stages, tile=tile, warps=_fetch.WARPS),
        row_smem=plgpu.SMEM((2, rows), jnp.float32),  # lse, or m and l
        q_full=plgpu.Barrier(num_arrivals=q_len),
        k_full=plgpu.Barrier(num_arrivals=copies_of_tile * parts, num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=copies_of_tile * parts, num_barriers=stages),
        k_free=plgpu.Barrier(num_barriers=stages),
        v_free=plgpu.Barrier(num_barriers=stages),
        **_finish.scratch(
            sharing=sharing, num_partials=config.num_partials, chunk=config.chunk, dtype=dtype, interpret=interpret
        ),
    )


def num_bytes(refs: dict[str, Any]) -> int:
    """Bytes of these, each array rounded up to where the next may begin."""
    return sum(map(_bytes_of, refs.values()))


def _bytes_of(ref: Any) -> int:
    if isinstance(ref, plgpu.Barrier | plgpu.ClusterBarrier):
        return 8 * int(np.prod(ref.num_barriers))
    return round_up(math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize, 1024)
