"""The steps of a warpgroup for its 64 rows of an item, tile by tile.

    S [64, tile]      = Q [64, head_dim]  K^T [head_dim, tile]
    O [64, head_dim] += P [64, tile]      V [tile, head_dim]

A step starts two products, with the keys of a tile and with the values of the previous tile. It computes the softmax of
the first while the second runs. The two warpgroups are not synchronised: making them alternate with hardware barriers
is not faster on an H100.

All functions are traced inside the kernel.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.fetch import Ring
from pallas_kernels.common.rows import LOWEST, ROWS, ROWS_FIRST, zeros
from pallas_kernels.common.sizes import COLUMNS, rem, zero_unless
from pallas_kernels.common.softmax import rescale
from pallas_kernels.prefill import products
from pallas_kernels.prefill.config import Config
from pallas_kernels.prefill.item import Item
from pallas_kernels.prefill.logits import Logits, softmax
from pallas_kernels.prefill.scales import Scales

Carry = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # O, m, l, and P of the last tile


@dataclasses.dataclass(frozen=True)
class Steps:
    item: Item
    logits: Logits
    keys: Ring
    values: Ring
    first_turn: jax.Array  # index of the item's first tile among all tiles that the program fetches
    q: Any  # SMEM [64, width]
    zeroed: Any  # barrier for both warpgroups
    warpgroup: jax.Array
    config: Config
    scales: Scales
    products: products.Products

    def run(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns O f32 [64, width], not yet divided by l, and m (in units of log2) and l, f32 [64]."""
        item = self.item
        carry = self._first()
        masked = functools.partial(self._step, masked=True)
        begin = item.begin + 1
        if item.window is not None:
            carry = lax.fori_loop(begin, item.whole_begin, masked, carry)
            begin = jnp.maximum(begin, item.whole_begin)
        middle = jnp.maximum(item.whole_end, begin)
        carry = lax.fori_loop(begin, middle, functools.partial(self._step, masked=False), carry)
        carry = lax.fori_loop(middle, item.end, masked, carry)
        return self._last(carry)

    def _first(self) -> Carry:
        """The first step: only the keys of the first tile."""
        item, rows = self.item, self.q.shape[0]
        stage = self._stage(item.begin)
        plgpu.barrier_wait(self.keys.full.at[stage])
        scores = self.products.scores(self.q, self.keys.target.at[stage])
        plgpu.barrier_arrive(self.keys.free.at[stage])
        m, l, _, p = self._softmax(
            scores, item.begin, ROWS_FIRST.full(rows, LOWEST), ROWS_FIRST.full(rows, 0.0), masked=True
        )
        if item.window is not None:
            plgpu.barrier_wait(self.values.full.at[stage])
            self._zero_unseen(item.begin, stage)
        return zeros(self.q.shape), m, l, p.astype(self.q.dtype)

    def _step(self, tile: jax.Array, carry: Carry, *, masked: bool) -> Carry:
        """A step with the keys of a tile and the values of the previous one."""
        acc, m, l, p = carry
        before, stage = self._stage(tile - 1), self._stage(tile)
        plgpu.barrier_wait(self.keys.full.at[stage])
        self._await_values(tile - 1, before)
        keys, values = self.keys.target.at[stage], self.values.target.at[before]
        acc, scores = self.products.start(acc, p, self.q, keys, values)
        scores = self.products.wait(1, scores)
        plgpu.barrier_arrive(self.keys.free.at[stage])
        m, l, alpha, p = self._softmax(scores, tile, m, l, masked=masked)
        acc, p = self.products.wait(0, (acc, p))
        plgpu.barrier_arrive(self.values.free.at[before])
        return rescale(acc, alpha), m, l, p.astype(self.q.dtype)

    def _last(self, carry: Carry) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The last step: only the values of the last tile."""
        acc, m, l, p = carry
        tile = self.item.end - 1
        stage = self._stage(tile)
        self._await_values(tile, stage)
        pl.when(self.item.end * self.item.tile_tokens > self.item.length)(lambda: self._zero_unseen(tile, stage))
        acc = self.products.add(acc, p, self.values.target.at[stage])
        plgpu.barrier_arrive(self.values.free.at[stage])
        return acc, m, l

    def _stage(self, tile: jax.Array) -> jax.Array:
        return rem(self.first_turn + tile - self.item.begin, self.config.num_stages)

    def _await_values(self, tile: jax.Array, stage: jax.Array) -> None:
        if self.item.window is None:
            plgpu.barrier_wait(self.values.full.at[stage])
        else:  # the values of the first tile have arrived
            pl.when(tile > self.item.begin)(lambda: plgpu.barrier_wait(self.values.full.at[stage]))

    def _softmax(
        self, scores: jax.Array, tile: jax.Array, m: jax.Array, l: jax.Array, *, masked: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """`softmax` with the per-token scales of the tile."""
        scales = self.scales.of_tile(self.first_turn + tile - self.item.begin)
        return softmax(scores, self.logits, tile, scales, m, l, masked=masked)

    def _zero_unseen(self, tile: jax.Array, stage: jax.Array) -> None:
        """Zeroes the values that no query may see; each warpgroup zeroes some of the columns."""
        values = self.values.target.at[stage]
        for c in range(values.shape[-1] // COLUMNS):

            @pl.when(self.warpgroup == c % 2)
            def _zero(c: int = c) -> None:
                part = values.at[:, pl.ds(c * COLUMNS, COLUMNS)]
                v = plgpu.load(part, layout=ROWS)
                part[...] = zero_unless(self.item.seen(tile, part.shape), v)

        plgpu.commit_smem()
        plgpu.barrier_arrive(self.zeroed)
        plgpu.barrier_wait(self.zeroed)
