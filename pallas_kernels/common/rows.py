"""Rows in registers: layouts, orientation, and stores to memory.

A row is one (query token, query head) pair of a KV head: row r is token `r // group` and head `r % group` of the group.
All functions are traced inside the kernels.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
# Replaces -inf in the running maximum: LOWEST - LOWEST is 0, but the difference of two infinities is NaN.
LOWEST = -1e30
# [m, rows] or [rows, n], see `Orientation`. The first axis, a multiple of 64, is distributed over the warps.
ROWS = plgpu.Layout.WGMMA
# Operands of products from registers (m16n8k16), the same for bfloat16 and float16. The sums are in ROWS.
LEFT = plgpu.Layout.MMA_LHS(jnp.float16, m_warps=4)  # [multiple of 64, k]
RIGHT = plgpu.Layout.MMA_RHS(jnp.float16, m_warps=4)  # [k, n]
SCALAR = plgpu.Layout.WG_SPLAT


def matrix(columns: int, itemsize: int) -> tuple[Any, ...]:
    """Transforms of a matrix in SMEM whose width is a multiple of `columns`: tiles of 8 rows, swizzled so that the same
    16 bytes of 8 rows are in different banks."""
    tiling = plgpu.TilingTransform((8, columns))  # type: ignore[abstract]
    if columns * itemsize == 16:
        return (tiling,)
    return tiling, plgpu.SwizzleTransform(columns * itemsize)  # type: ignore[abstract]


@dataclasses.dataclass(frozen=True)
class Orientation:
    """The axis of the rows in a matrix in layout ROWS, and operations with vectors that have one number per row."""

    axis: int

    @property
    def vector(self) -> Any:
        """The layout of [rows]."""
        return ROWS.reduce(1 - self.axis)

    def load(self, ref: Any) -> jax.Array:
        """Loads [rows] from GMEM or SMEM."""
        return plgpu.load(ref, layout=self.vector, optimized=False)

    def full(self, rows: int, value: float) -> jax.Array:
        """f32 [rows], filled with `value`."""
        return full((rows,), value, self.vector)

    def over(self, vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Broadcasts [rows] to a matrix of `shape`."""
        return lax.broadcast_in_dim(vector, shape, [self.axis])

    def times(self, x: jax.Array, factor: jax.Array) -> jax.Array:
        """A matrix times a scalar or one factor per row."""
        return x * (factor if factor.ndim == 0 else self.over(factor, x.shape))


ROWS_FIRST = Orientation(0)  # S [rows, tile], O [rows, head_dim]
ROWS_LAST = Orientation(1)  # their transposes


def full(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def zeros(shape: tuple[int, int]) -> jax.Array:
    return full(shape, 0.0, ROWS)


def store(ref: Any, value: jax.Array) -> None:
    """Stores into GMEM, or into SMEM that is neither tiled nor swizzled, with bank conflicts."""
    if hasattr(plgpu, "store"):
        # From jax 0.12 on, an assignment searches for a store without conflicts, which may never end.
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
