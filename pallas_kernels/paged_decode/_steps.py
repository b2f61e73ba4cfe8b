"""What the warpgroup that computes does with one tile: logits, softmax, sums.

A step is a loop's body: it takes and returns the sums so far, (acc, m, l, products):

| | |
|---|---|
| acc | the chunks of O^T, each f32 [chunk, rows] |
| m | the highest logit so far, in units of log2, f32 [rows] |
| l | the sum of the weights, f32 [tile, rows], added up over the tokens at the end |
| products | S^T of the tile of this step, f32 [tile, rows], if the step before has computed it; otherwise None |

`_many_rows` has the steps for many rows, with rows first. Everything here is traced inside the decode kernel.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _scales, _widen
from pallas_kernels._fetch import Ring
from pallas_kernels._logits import Logits
from pallas_kernels._merge import Sums
from pallas_kernels._rows import LOWEST, ROWS_LAST, zeros
from pallas_kernels._softmax import softmax
from pallas_kernels._walk import Walk
from pallas_kernels.paged_decode._products import Products, zero_unseen

Carry = tuple[tuple[jax.Array, ...], jax.Array, jax.Array, jax.Array | None]
# Of the j-th tile to be computed: its index in the sequence, and its stage in the rings.
TileAndStage = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class FewRows:
    """Of a 16-bit cache and up to 32 rows: the tensor cores read the tiles where they were fetched to."""

    walk: Walk
    logits_of: Logits
    tile_and_stage: TileAndStage
    products: Products
    keys_ahead: bool

    def start(self) -> Carry:
        products = None
        if self.keys_ahead:
            _, stage = self.tile_and_stage(jnp.int32(0))
            products = self.products.of_keys_if(self.walk.num_tiles > 0, stage)
        return *_nothing(self.products.q, self.products.p, self.products.chunk), products

    def step(self, j: jax.Array, carry: Carry, *, masked: bool) -> Carry:
        acc, m, l, scores = carry
        tile, stage = self.tile_and_stage(j)
        products, keys, values = self.products, self.products.keys, self.products.values

        # a. S^T = K Q^T
        if not self.keys_ahead:
            plgpu.barrier_wait(keys.full.at[stage])
            scores = products.of_keys(stage)
            plgpu.barrier_arrive(keys.free.at[stage])

        # b. Online softmax.
        assert scores is not None
        logits, visible = self.logits_of(scores, tile, masked)
        m, l, alpha, p = softmax(logits, logits, visible, m, l)
        products.p.T[...] = p.astype(products.p.dtype)

        # c. O^T += V^T P^T
        plgpu.barrier_wait(values.full.at[stage])
        if masked:
            zero_unseen(values, products.parts_of(stage), functools.partial(self.walk.seen, tile))
        plgpu.commit_smem()
        acc_new, next_scores = [], None
        for c, part in enumerate(acc):
            if self.keys_ahead:
                _, next_stage = self.tile_and_stage(j + 1)  # after the last tile: any stage, unused
                o, next_scores = products.of_values_and_next_keys(stage, j + 1 < self.walk.num_tiles, next_stage)
            else:
                o = products.of_values(stage, c)
            acc_new.append(part * ROWS_LAST.over(alpha, part.shape) + o)
        if not self.keys_ahead:
            plgpu.barrier_arrive(values.free.at[stage])
        return tuple(acc_new), m, l, next_scores

    def sums(self, carry: Carry) -> Sums:
        acc, m, l, _ = carry
        return Sums(acc, m, l.sum(axis=0))


@dataclasses.dataclass(frozen=True)
class NarrowCache:
    """Of an 8-bit cache: its tiles pass through registers, and their SMEM is free as soon as they are read."""

    walk: Walk
    logits_of: Logits
    tile_and_stage: TileAndStage
    scales: _scales.Scales
    tables: Any  # GMEM, int32 [seqs, max_blocks]
    rings: tuple[Ring, Ring]  # of K and V
    tiles: tuple[_widen.Tiles, _widen.Tiles]  # likewise
    q: Any  # SMEM [rows, width]
    p: Any  # SMEM [rows, tile]
    unit: jax.Array | None  # f32 [rows], the factor of the products of a row
    chunk: int  # rows of O^T

    def start(self) -> Carry:
        return *_nothing(self.q, self.p, self.chunk), None

    def step(self, j: jax.Array, carry: Carry, *, masked: bool) -> Carry:
        acc, m, l, _ = carry
        tile, stage = self.tile_and_stage(j)
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
        k_scales, v_scales = self.scales.of_tile(self.walk, self.tables, tile, stage)
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
                v = v_tiles.zero_unseen(v, functools.partial(self.walk.seen, tile))
            o, _ = _widen.product((self.chunk, rows), v_tiles.values(v), self.p.T)
            acc_new.append(part * ROWS_LAST.over(alpha, part.shape) + o)
        if not one_chunk:
            plgpu.commit_smem()
            plgpu.barrier_arrive(v_ring.free.at[stage])
        return tuple(acc_new), m, l, None

    def sums(self, carry: Carry) -> Sums:
        acc, m, l, _ = carry
        return Sums(tuple(_widen.ordered(part) for part in acc), m, l.sum(axis=0))


def _nothing(q: Any, p: Any, chunk: int) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    """acc, m and l before the first tile."""
    (rows, width), tile = q.shape, p.shape[1]
    acc = tuple(zeros((chunk, rows)) for _ in range(width // chunk))
    return acc, ROWS_LAST.full(rows, LOWEST), zeros((tile, rows))
