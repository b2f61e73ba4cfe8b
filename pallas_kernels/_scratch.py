"""What a program of the decode kernel has in shared memory: rings of tiles, Q, P, rows, and the barriers."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _cluster, _finish, _widen, decode_config
from pallas_kernels.decode_config import Config


def scratch(
    config: Config,
    q_len: int,
    group: int,
    rows: int,
    head_dim: int,
    copies_of_tile: int,
    dtype: Any,
    cache_dtype: Any,
    interpret: Any,
) -> dict[str, Any]:
    # The copy engine takes no tile that does not divide the head: 64 columns, or 32 for 96, 16 for 80 and 112. The
    # operands of a product must be tiled alike.
    num_parts, width = decode_config.num_parts(head_dim), decode_config.padded_width(head_dim)
    part = head_dim // num_parts
    columns = next(columns for columns in (64, 32, 16) if part % columns == 0 or part < columns)
    matrix = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns))  # type: ignore[abstract]
    stages = config.num_stages
    tiles: dict[str, Any] = dict(
        q_smem=plgpu.SMEM((rows, width), dtype, transforms=matrix),
        k_smem=plgpu.SMEM((stages * num_parts, config.tile, width // num_parts), dtype, transforms=matrix),
        v_smem=plgpu.SMEM((stages * num_parts, config.tile, width // num_parts), dtype, transforms=matrix),
        p_smem=plgpu.SMEM((rows, config.tile), dtype, transforms=matrix),
    )
    if _widen.is_narrow(cache_dtype):
        tiles = _widen.scratch(
            (stages, config.tile, width),
            rows=rows,
            chunk=config.chunk,
            dtype=cache_dtype,
            head_dim=head_dim,
            interpret=interpret,
        )
    return dict(
        # Row after row: in comes Q, out goes O. One row too many, or Mosaic may tile it, which a copy of a narrow head
        # cannot do.
        q_flat_smem=plgpu.SMEM((rows + 1, width), dtype),
        **tiles,
        row_smem=plgpu.SMEM((2, rows), jnp.float32),  # lse, or m and l
        q_full=plgpu.Barrier(num_arrivals=q_len),
        k_full=plgpu.Barrier(num_arrivals=copies_of_tile * num_parts, num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=copies_of_tile * num_parts, num_barriers=stages),
        k_free=plgpu.Barrier(num_barriers=stages),
        v_free=plgpu.Barrier(num_barriers=stages),
        **_finish.scratch(
            sharing=_cluster.sharing_of(width=width, cluster=config.cluster, q_len=q_len, group=group),
            num_partials=config.num_partials,
            chunk=config.chunk,
            dtype=dtype,
            interpret=interpret,
        ),
    )
