"""A step of the warpgroup that computes, for an 8-bit cache: its tiles pass through registers to the products
(`_widen`), and their SMEM is free as soon as they are read.

The carry is that of `_few_rows`, without scores. Everything here is traced inside the decode kernel.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _scales, _widen
from pallas_kernels._fetch import Ring
from pallas_kernels._logits import Logits
from pallas_kernels._merge import Sums
from pallas_kernels._rows import ROWS_LAST
from pallas_kernels._softmax import softmax
from pallas_kernels._walk import Order
from pallas_kernels.paged_decode._few_rows import Carry, nothing


@dataclasses.dataclass(frozen=True)
class NarrowCache:
    order: Order
    logits_of: Logits
    scales: _scales.Scales
    tables: Any  # GMEM, int32 [seqs, max_blocks]
    rings: tuple[Ring, Ring]  # of K and V
    tiles: tuple[_widen.Tiles, _widen.Tiles]  # likewise
    q: Any  # SMEM [rows, width]
    p: Any  # SMEM [rows, tile]
    unit: jax.Array | None  # f32 [rows], the factor of the products of a row
    chunk: int  # rows of O^T

    def start(self) -> Carry:
        return *nothing(self.q, self.p, self.chunk), None

    def step(self, j: jax.Array, carry: Carry, *, masked: bool) -> Carry:
        acc, m, l, _ = carry
        tile, stage = self.order.tile_and_stage(j)
        (k_ring, v_ring), (k_tiles, v_tiles) = self.rings, self.tiles
        (rows, width), tile_tokens = self.q.shape, self.p.shape[1]
        one_chunk = len(acc) == 1
        # If the registers allow it, V is read from SMEM while the tensor cores work on K.
        early = width * rows <= 128 * 8

        def load_values(c: int = 0) -> jax.Array:
            if c == 0:
                plgpu.barrier_wait(v_ring.full.at[stage])
            return v_tiles.load_values(stage, c * self.chunk, self.chunk)

        # a. S^T = K Q^T
        plgpu.barrier_wait(k_ring.full.at[stage])
        k_scales, v_scales = self.scales.of_tile(self.order.walk, self.tables, tile, stage)
        meanwhile = load_values if early else None
        shape = tile_tokens, rows
        scores, values = _widen.product(shape, k_tiles.keys(stage), self.q.T, meanwhile)
        if self.unit is not None:
            scores *= ROWS_LAST.over(self.unit, shape)
        if k_scales is not None:
            scores *= _scales.over_tokens(k_scales, shape, ROWS_LAST)

        # b. Online softmax.
        logits, visible = self.logits_of(scores, tile, masked)
        highest = logits if v_scales is None else _scales.peaks(logits, v_scales, ROWS_LAST, visible)
        m, l, alpha, p = softmax(logits, highest, visible, m, l, headroom=_widen.HEADROOM)
        if v_scales is not None:
            p *= _scales.over_tokens(v_scales, p.shape, ROWS_LAST)
            p = p if visible is None else jnp.where(visible, p, jnp.zeros_like(p))
        if one_chunk and not early:
            values = load_values()
        self.p.T[...] = p.astype(self.p.dtype)

        # c. O^T += V^T P^T
        plgpu.commit_smem()  # also orders our reads before the copy engine's writes
        plgpu.barrier_arrive(k_ring.free.at[stage])
        if one_chunk:
            plgpu.barrier_arrive(v_ring.free.at[stage])
        acc_new = []
        for c, part in enumerate(acc):
            v = values if one_chunk else load_values(c)
            if masked:
                v = v_tiles.zero_unseen(v, functools.partial(self.order.walk.seen, tile))
            o, _ = _widen.product((self.chunk, rows), v_tiles.values(v), self.p.T)
            acc_new.append(part * ROWS_LAST.over(alpha, part.shape) + o)
        if not one_chunk:
            plgpu.commit_smem()
            plgpu.barrier_arrive(v_ring.free.at[stage])
        return tuple(acc_new), m, l, None

    def sums(self, carry: Carry) -> Sums:
        acc, m, l, _ = carry
        return Sums(tuple(_widen.ordered(part) for part in acc), m, l.sum(axis=0))
