"""Operands of the products: K and V of a tile, loaded from SMEM to registers.

    S^T [64, rows]          = K [64, head_dim]    Q^T [head_dim, rows]
    O^T [head_dim, rows]   += V^T [head_dim, 64]  P^T [64, rows]

Operands are loaded for 64 columns of the head at a time. All functions are traced inside the kernel.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import widen
from pallas_kernels.common.fetch import Ring
from pallas_kernels.common.interpret import interpreted_by
from pallas_kernels.common.rows import LEFT, RIGHT, ROWS_LAST
from pallas_kernels.common.scales import load_of_tile
from pallas_kernels.common.sizes import COLUMNS, is_8bit, zero_unless
from pallas_kernels.decode.refs import Refs

Seen = Callable[..., jax.Array]  # `Walk.seen` for one tile


def _dot(acc: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    return acc + jnp.dot(left, right, preferred_element_type=jnp.float32)


@interpreted_by(_dot)
def product(acc: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    """acc + left @ right, f32 [64, rows]."""
    return plgpu.mma(acc, left, right)


def column_slice(c: int) -> Any:
    return pl.ds(c * COLUMNS, COLUMNS)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of a cache that has q's dtype."""

    refs: Refs
    # The running maximum is lowered by this, in units of log2, so that weights use the whole range of their dtype.
    headroom: ClassVar[float] = 0.0

    @staticmethod
    def of(refs: Refs) -> "Tiles":
        return Tiles8Bit(refs) if is_8bit(refs.k_cache.dtype) else Tiles(refs)

    @property
    def is_latent(self) -> bool:
        """Whether the values are the first columns of the keys."""
        return self.refs.v_smem is None

    def rings(self) -> list[Ring]:
        """The rings that K and V are copied to; a latent has one ring for both."""
        refs = self.refs
        k = Ring(refs.k_cache, self.copied(refs.k_smem), refs.k_full)
        return [k] if self.is_latent else [k, Ring(refs.v_cache, self.copied(refs.v_smem), refs.v_full)]

    def copied(self, ring: Any) -> Any:
        return ring

    def prepare_query(self) -> jax.Array | None:
        """Prepares Q in SMEM. Returns the factor of each row's products, f32 [rows]; None if all are 1."""
        return None

    def query(self, c: int) -> jax.Array:
        return plgpu.load(self.refs.q_smem.at[:, column_slice(c)].T, layout=RIGHT)

    def keys(self, stage: jax.Array, c: int) -> jax.Array:
        return plgpu.load(self.refs.k_smem.at[stage, :, column_slice(c)], layout=LEFT)

    def values(self, stage: jax.Array, c: int, seen: Seen | None) -> jax.Array:
        v = plgpu.load(self.refs.value_ring.at[stage, :, column_slice(c)].T, layout=LEFT)
        # Values that no query may see must be zero, because 0 x NaN is NaN.
        return v if seen is None else zero_unless(seen(v.shape, 1, LEFT), v)

    def ordered(self, acc: jax.Array) -> jax.Array:
        """O^T, f32 [64, rows], with the columns of the head in their own order."""
        return acc

    def k_scales(self, stage: jax.Array) -> jax.Array | None:
        """The per-token scales of a tile of K, f32 [64]; None without them."""
        return load_of_tile(self.refs.k_scales_smem, stage, ROWS_LAST)

    def v_scales(self, stage: jax.Array) -> jax.Array | None:
        """The per-token scales of a tile of V, as `k_scales`."""
        refs = self.refs
        return load_of_tile(refs.k_scales_smem if self.is_latent else refs.v_scales_smem, stage, ROWS_LAST)


@dataclasses.dataclass(frozen=True)
class Tiles8Bit(Tiles):
    """Tiles of an 8-bit cache. `common.widen` explains the widening and the order of the columns."""

    headroom: ClassVar[float] = widen.HEADROOM

    def copied(self, ring: Any) -> Any:
        return ring[0]

    def prepare_query(self) -> jax.Array | None:
        return widen.load_q(self.refs.q_smem, self.refs.wide_q_smem)

    def query(self, c: int) -> jax.Array:
        return plgpu.load(self.refs.wide_q_smem.at[column_slice(c)], layout=RIGHT)

    def keys(self, stage: jax.Array, c: int) -> jax.Array:
        return self._columns(self.refs.k_smem, c).keys(stage)

    def values(self, stage: jax.Array, c: int, seen: Seen | None) -> jax.Array:
        tiles = self._columns(self.refs.value_ring, c)
        v = tiles.load_values(stage)
        if seen is not None:
            v = tiles.zero_unseen(v, seen)
        return tiles.values(v)

    def ordered(self, acc: jax.Array) -> jax.Array:
        return widen.ordered(acc)

    def _columns(self, ring: Any, c: int) -> widen.Tiles:
        """64 columns of a ring."""
        narrow, words = ring
        words = words.at[:, :, pl.ds(c * COLUMNS // 2, COLUMNS // 2)]
        return widen.Tiles(narrow.at[:, :, column_slice(c)], words)
