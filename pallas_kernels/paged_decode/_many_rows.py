"""What the warpgroup that computes does with one tile: logits, softmax, sums.

    S [64, tile]      = Q [64, head_dim]  K^T [head_dim, tile]
    O [64, head_dim] += P [64, tile]      V [tile, head_dim]

The rows are the M dimension of both products, padded to 64. Sums over the tokens stay within four lanes, P stays in
registers, and no warp waits for another. Few rows would cost as much as 64. The tensor cores read the tiles where they
were fetched to. The keys of the next tile are multiplied during the softmax of this one.

A step is a loop's body: it takes and returns the sums so far, (acc, m, l, scores):

| | |
|---|---|
| acc | O, one array for each part of a head, f32 [rows, columns] |
| m | the highest logit so far, in units of log2, f32 [rows] |
| l | the sum of the weights, f32 [rows] |
| scores | S of the tile of this step, f32 [rows, tile] |

Everything here is traced inside the decode kernel.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._fetch import Ring
from pallas_kernels._interpret import interpreted
from pallas_kernels._logits import Logits
from pallas_kernels._merge import Sums
from pallas_kernels._rows import COLUMNS, LOWEST, ROWS, ROWS_FIRST, zeros
from pallas_kernels._softmax import weights
from pallas_kernels._walk import Order

Carry = tuple[tuple[jax.Array, ...], jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class ManyRows:
    order: Order
    logits_of: Logits
    keys: Ring
    values: Ring
    q: Any  # SMEM [rows, width]
    parts_of: Callable[[Any], list[Any]]  # of a stage

    def start(self) -> Carry:
        rows, width = self.q.shape
        _, stage = self.order.tile_and_stage(jnp.int32(0))
        is_there, num_parts = self.order.walk.num_tiles > 0, len(self.parts_of(stage))

        def product(ref: Any) -> jax.Array:
            self._start_keys(ref, is_there, stage)
            return ref[...]

        scores = pl.run_scoped(product, self._scores)
        self.keys.free_if(is_there, stage)
        acc = tuple(zeros((rows, width // num_parts)) for _ in range(num_parts))
        return acc, ROWS_FIRST.full(rows, LOWEST), ROWS_FIRST.full(rows, 0.0), scores

    def step(self, j: jax.Array, carry: Carry, *, masked: bool) -> Carry:
        acc, m, l, scores = carry
        tile, stage = self.order.tile_and_stage(j)
        _, next_stage = self.order.tile_and_stage(j + 1)  # after the last tile: any stage, unused
        is_next = j + 1 < self.order.walk.num_tiles

        def work(next_scores: Any) -> Carry:
            # a. S = Q K^T, of the next tile
            self._start_keys(next_scores, is_next, next_stage)

            # b. Online softmax.
            logits, visible = self.logits_of(scores, tile, masked)
            m_new = jnp.maximum(m, logits.max(axis=1))
            alpha = jnp.exp2(m - m_new)
            p = weights(logits, visible, m_new, ROWS_FIRST)
            l_new = l * alpha + p.sum(axis=1)

            # c. O += P V
            plgpu.barrier_wait(self.values.full.at[stage])
            if masked:
                zero_unseen(self.values, self.parts_of(stage), functools.partial(self.order.walk.seen, tile))
                plgpu.commit_smem()
            scaled = [part * ROWS_FIRST.over(alpha, part.shape) for part in acc]
            acc_new = self._plus_values(scaled, p.astype(self.q.dtype), stage)
            plgpu.barrier_arrive(self.values.free.at[stage])
            return acc_new, m_new, l_new, next_scores[...]

        carry = pl.run_scoped(work, self._scores)
        self.keys.free_if(is_next, next_stage)
        return carry

    def sums(self, carry: Carry) -> Sums:
        acc, m, l, _ = carry
        rows, columns = acc[0].shape
        starts = range(0, columns, COLUMNS)  # few columns are written at a time
        parts = [lax.slice(x, (0, start), (rows, start + COLUMNS)) for x in acc for start in starts]
        return Sums(tuple(parts), m, l)

    @property
    def _scores(self) -> Any:
        return plgpu.ACC((self.q.shape[0], self.order.walk.tile), jnp.float32)

    def _start_keys(self, ref: Any, is_there: jax.Array, stage: jax.Array) -> None:
        self.keys.wait_if(is_there, stage)
        places = self.parts_of(stage)
        for part, place in enumerate(places):
            q = self.q if len(places) == 1 else self.q.at[:, pl.ds(part * COLUMNS, COLUMNS)]
            plgpu.wgmma(ref, q, self.keys.target.at[place].T)

    def _plus_values(self, acc: list[jax.Array], p: jax.Array, stage: jax.Array) -> tuple[jax.Array, ...]:
        """f32 [rows, columns of a part] each, with the product of p [rows, tile] and the values added to them."""
        values = [self.values.target.at[place] for place in self.parts_of(stage)]
        if interpreted():  # which has no products with an operand in registers
            added = [jnp.dot(p, v[...], preferred_element_type=jnp.float32) for v in values]
            plgpu.commit_smem()  # orders these reads, unlike those of a product, before the copy engine's writes
            return tuple(map(jnp.add, acc, added))

        def add_products(refs: list[Any]) -> None:
            for ref, v in zip(refs, values, strict=True):
                plgpu.wgmma(ref, p, v)

        return tuple(pl.run_state(add_products)([plgpu.ACC.init(part) for part in acc]))


def zero_unseen(ring: Ring, places: list[Any], seen: Callable[..., jax.Array]) -> None:
    """Makes the values at `places` of the ring zero in the slots that no query may see; `seen` as `Walk.seen`."""
    for place in places:
        values = ring.target.at[place]
        for c in range(values.shape[-1] // COLUMNS):
            part = values.at[:, pl.ds(c * COLUMNS, COLUMNS)]
            visible = seen(part.shape, 0, ROWS)
            v = plgpu.load(part, layout=ROWS)
            part[...] = jnp.where(visible, v, jnp.zeros_like(v))
