"""The left and right operands of the products, from SMEM to registers.

    S^T [64, rows]          = K [64, head_dim]    Q^T [head_dim, rows]
    O^T [head_dim, rows]   += V^T [head_dim, 64]  P^T [64, rows]

Both are made 64 columns of the head at a time. Everything here is traced inside the kernel.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import widen as _widen
from pallas_kernels.common.interpret import interpreted
from pallas_kernels.decode.config import COLUMNS
from pallas_kernels.decode.refs import Refs

Seen = Callable[..., jax.Array]  # as `Walk.seen`, of one tile

# The same for bfloat16 and float16. Accumulators are in `rows.ROWS`.
LEFT = plgpu.Layout.MMA_LHS(jnp.float16, m_warps=4)  # [64 or a multiple, k]
RIGHT = plgpu.Layout.MMA_RHS(jnp.float16, m_warps=4)  # [k, rows]


def product(acc: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    """acc + left @ right, f32 [64, rows]."""
    if interpreted():
        return acc + jnp.dot(left, right, preferred_element_type=jnp.float32)
    return plgpu.mma(acc, left, right)


def columns_of(c: int) -> Any:
    return pl.ds(c * COLUMNS, COLUMNS)


@dataclasses.dataclass(frozen=True)
class Wide:
    """Of a cache in q's dtype."""

    refs: Refs

    def prepare_query(self) -> None:
        """Returns the factor of the products with each row, f32 [rows]; None: ones."""

    def query(self, c: int) -> jax.Array:
        return plgpu.load(self.refs.q_smem.at[:, columns_of(c)].T, layout=RIGHT)

    def keys(self, slot: jax.Array, c: int) -> jax.Array:
        return plgpu.load(self.refs.k_smem.at[slot, :, columns_of(c)], layout=LEFT)

    def values(self, slot: jax.Array, c: int, seen: Seen | None) -> jax.Array:
        v = plgpu.load(self.refs.v_smem.at[slot, :, columns_of(c)].T, layout=LEFT)
        # Zero times NaN is NaN: what no query may see must be zero itself.
        return v if seen is None else jnp.where(seen(v.shape, 1, LEFT), v, jnp.zeros_like(v))

    def ordered(self, acc: jax.Array) -> jax.Array:
        return acc


@dataclasses.dataclass(frozen=True)
class Narrow:
    """Of an 8-bit cache: see `widen`, also for the order of the columns."""

    refs: Refs

    def prepare_query(self) -> jax.Array | None:
        wide = self.refs.wide_q_smem
        return _widen.load_q(self.refs.q_smem, lambda start: wide.at[pl.ds(start, COLUMNS)])

    def query(self, c: int) -> jax.Array:
        return plgpu.load(self.refs.wide_q_smem.at[columns_of(c)], layout=RIGHT)

    def keys(self, slot: jax.Array, c: int) -> jax.Array:
        return self._tiles(self.refs.k_smem, c).keys(slot)

    def values(self, slot: jax.Array, c: int, seen: Seen | None) -> jax.Array:
        tiles = self._tiles(self.refs.v_smem, c)
        v = tiles.load_values(slot, 0, COLUMNS)
        if seen is not None:
            v = tiles.zero_unseen(v, seen)
        return tiles.values(v)

    def ordered(self, acc: jax.Array) -> jax.Array:
        return _widen.ordered(acc)

    def _tiles(self, ring: Any, c: int) -> _widen.Tiles:
        """64 columns of a ring."""
        narrow, words = (ring, None) if interpreted() else ring
        if words is not None:
            words = words.at[:, :, pl.ds(c * COLUMNS // 2, COLUMNS // 2)]
        return _widen.Tiles(narrow.at[:, :, columns_of(c)], words, LEFT)
