"""What the warpgroup that computes does with one tile of a 16-bit cache, for up to 32 rows: logits, softmax, sums.

    S^T [tile, rows]  = K [tile, head_dim]  Q^T [head_dim, rows]
    O^T [chunk, rows] = V^T [chunk, tile]   P^T [tile, rows]

The tensor cores read the tiles where they were fetched to. A step is a loop's body: it takes and returns the sums so
far, (acc, m, l, scores):

| | |
|---|---|
| acc | the chunks of O^T, each f32 [chunk, rows] |
| m | the highest logit so far, in units of log2, f32 [rows] |
| l | the sum of the weights, f32 [tile, rows], added up over the tokens at the end |
| scores | S^T of the tile of this step, f32 [tile, rows], if the step before has computed it; otherwise None |

`_narrow_cache` and `_many_rows` have the other steps. Everything here is traced inside the decode kernel.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._fetch import Ring
from pallas_kernels._logits import Logits
from pallas_kernels._merge import Sums
from pallas_kernels._rows import COLUMNS, LOWEST, ROWS, ROWS_LAST, zeros
from pallas_kernels._softmax import softmax
from pallas_kernels._walk import Order

Chunks = tuple[jax.Array, ...]
Carry = tuple[Chunks, jax.Array, jax.Array, jax.Array | None]


@dataclasses.dataclass(frozen=True)
class FewRows:
    order: Order
    logits_of: Logits
    keys: Ring
    values: Ring
    q: Any  # SMEM [rows, width]
    p: Any  # SMEM [rows, tile]
    parts_of: Callable[[Any], list[Any]]  # of a stage
    chunk: int  # rows of O^T
    keys_ahead: bool

    def start(self) -> Carry:
        scores = None
        if self.keys_ahead:
            _, stage = self.order.tile_and_stage(jnp.int32(0))
            is_there = self.order.walk.num_tiles > 0
            self.keys.wait_if(is_there, stage)
            scores = self._keys(stage)
            self.keys.free_if(is_there, stage)
        return *nothing(self.q, self.p, self.chunk), scores

    def step(self, j: jax.Array, carry: Carry, *, masked: bool) -> Carry:
        acc, m, l, scores = carry
        tile, stage = self.order.tile_and_stage(j)
        keys, values, walk = self.keys, self.values, self.order.walk

        # a. S^T = K Q^T
        if not self.keys_ahead:
            plgpu.barrier_wait(keys.full.at[stage])
            scores = self._keys(stage)
            plgpu.barrier_arrive(keys.free.at[stage])

        # b. Online softmax.
        assert scores is not None
        logits, visible = self.logits_of(scores, tile, masked)
        m, l, alpha, p = softmax(logits, logits, visible, m, l)
        self.p.T[...] = p.astype(self.p.dtype)

        # c. O^T += V^T P^T
        plgpu.barrier_wait(values.full.at[stage])
        if masked:
            zero_unseen(values, self.parts_of(stage), functools.partial(walk.seen, tile))
        plgpu.commit_smem()
        acc_new, next_scores = [], None
        for c, part in enumerate(acc):
            if self.keys_ahead:
                _, next_stage = self.order.tile_and_stage(j + 1)  # after the last tile: any stage, unused
                o, next_scores = self._values_and_next_keys(stage, j + 1 < walk.num_tiles, next_stage)
            else:
                o = self._values(stage, c)
            acc_new.append(part * ROWS_LAST.over(alpha, part.shape) + o)
        if not self.keys_ahead:
            plgpu.barrier_arrive(values.free.at[stage])
        return tuple(acc_new), m, l, next_scores

    def sums(self, carry: Carry) -> Sums:
        acc, m, l, _ = carry
        return Sums(acc, m, l.sum(axis=0))

    def _keys(self, stage: jax.Array) -> jax.Array:
        """S^T, f32 [tile, rows]."""

        def product(ref: Any) -> jax.Array:
            self._start_keys(ref, stage)
            return ref[...]

        return pl.run_scoped(product, self._scores)

    def _values(self, stage: jax.Array, c: int) -> jax.Array:
        """The c-th chunk of O^T, f32 [chunk, rows]."""

        def product(ref: Any) -> jax.Array:
            self._start_values(ref, stage, c)
            return ref[...]

        return pl.run_scoped(product, self._output)

    def _values_and_next_keys(
        self, stage: jax.Array, is_next: jax.Array, next_stage: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """O^T, of one chunk, and side by side S^T of the next tile, numbers without meaning if there is none. Frees the
        stages of both."""

        def products(output_ref: Any, scores_ref: Any) -> tuple[jax.Array, jax.Array]:
            self._start_values(output_ref, stage, 0)
            self.keys.wait_if(is_next, next_stage)
            self._start_keys(scores_ref, next_stage)
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(self.values.free.at[stage])
            scores = scores_ref[...]
            self.keys.free_if(is_next, next_stage)
            return output_ref[...], scores

        return pl.run_scoped(products, self._output, self._scores)

    @property
    def _scores(self) -> Any:
        rows, tile = self.p.shape
        return plgpu.ACC((tile, rows), jnp.float32)

    @property
    def _output(self) -> Any:
        return plgpu.ACC((self.chunk, self.p.shape[0]), jnp.float32)

    def _start_keys(self, ref: Any, stage: jax.Array) -> None:
        places = self.parts_of(stage)
        for part, place in enumerate(places):
            q = self.q if len(places) == 1 else self.q.at[:, pl.ds(part * COLUMNS, COLUMNS)]
            plgpu.wgmma(ref, self.keys.target.at[place], q.T)

    def _start_values(self, ref: Any, stage: jax.Array, c: int) -> None:
        places = self.parts_of(stage)
        if len(places) > 1 or self.chunk == self.q.shape[1]:  # of several parts each is a chunk
            values = self.values.target.at[places[c]]
        else:
            values = self.values.target.at[stage, :, pl.ds(c * self.chunk, self.chunk)]
        plgpu.wgmma(ref, values.T, self.p.T)


def nothing(q: Any, p: Any, chunk: int) -> tuple[Chunks, jax.Array, jax.Array]:
    """acc, m and l before the first tile."""
    (rows, width), tile = q.shape, p.shape[1]
    acc = tuple(zeros((chunk, rows)) for _ in range(width // chunk))
    return acc, ROWS_LAST.full(rows, LOWEST), zeros((tile, rows))


def zero_unseen(ring: Ring, places: list[Any], seen: Callable[..., jax.Array]) -> None:
    """Makes the values at `places` of the ring zero in the slots that no query may see; `seen` as `Walk.seen`."""
    for place in places:
        values = ring.target.at[place]
        for c in range(values.shape[-1] // COLUMNS):
            part = values.at[:, pl.ds(c * COLUMNS, COLUMNS)]
            visible = seen(part.shape, 0, ROWS)
            v = plgpu.load(part, layout=ROWS)
            part[...] = jnp.where(visible, v, jnp.zeros_like(v))
