"""From the products of queries and keys to the weights: scale, soft cap, ALiBi, mask, and the online softmax.

All functions are traced inside the kernels.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.rows import LOG2E, ROWS, ROWS_FIRST
from pallas_kernels.common.scales import over_tokens, peaks
from pallas_kernels.common.softmax import raised, soft_capped
from pallas_kernels.prefill.item import Item, row_tokens


@dataclasses.dataclass(frozen=True)
class Logits:
    """The logits of a warpgroup's rows of an item."""

    item: Item
    item_tokens: int
    first_row: jax.Array | int  # first row in the item
    scale: jax.Array  # f32 [], or one per row, not negative
    cap: jax.Array | None  # f32 []
    slopes: jax.Array | None  # f32 [64]

    def __call__(self, products: jax.Array, tile: jax.Array, masked: bool) -> tuple[jax.Array, jax.Array]:
        """Products f32 [64, tile] -> logits, -inf where masked, and their factor to units of log2.

        With a soft cap or slopes the logits are already in units of log2. Otherwise the scale is left to the factor,
        because a single instruction multiplies a number and subtracts the maximum.
        """
        shape = products.shape
        one = jnp.ones((), jnp.float32)
        logits, to_log2 = products, jnp.maximum(self.scale * LOG2E, 1e-30)  # not 0, because 0 x inf is NaN
        if self.cap is not None:
            logits, to_log2 = soft_capped(products, self.scale, self.cap, ROWS_FIRST), one
        elif self.slopes is not None:
            logits, to_log2 = ROWS_FIRST.times(products, self.scale * LOG2E), one
        if not masked and self.slopes is None:
            return logits, to_log2
        columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=ROWS)
        last = self.item.position - tile * self.item.tile_tokens  # column of the last token that a row sees
        if self.item.causal:
            tokens = row_tokens(shape[:1], self.first_row, self.item_tokens, ROWS_FIRST.vector)
            last = ROWS_FIRST.over(tokens + last, shape)
        if self.slopes is not None:
            logits -= ROWS_FIRST.over(self.slopes * LOG2E, shape) * (last - columns).astype(jnp.float32)
        if not masked:
            return logits, to_log2
        visible = columns <= last
        if self.item.window is not None:
            visible = jnp.logical_and(visible, columns > last - self.item.window)
        return jnp.where(visible, logits, jnp.full(shape, -jnp.inf, jnp.float32)), to_log2


def softmax(
    scores: jax.Array,  # f32 [rows, tile], the products of Q and K
    logits_of: Logits,
    tile: jax.Array,
    scales: tuple[jax.Array | None, jax.Array | None],  # K and V, f32 [tile], one per token
    m: jax.Array,
    l: jax.Array,
    *,
    masked: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the new m and l, alpha (the factor for the sums so far, f32 [rows]), and the weights, f32 [rows,
    tile]."""
    k_scales, v_scales = (_of_seen(x, logits_of, tile) if masked else x for x in scales)
    if k_scales is not None:
        scores *= over_tokens(k_scales, scores.shape, ROWS_FIRST)
    logits, to_log2 = logits_of(scores, tile, masked)
    if v_scales is None:
        highest = logits.max(axis=1) * to_log2
    else:
        highest = peaks(ROWS_FIRST.times(logits, to_log2), v_scales, ROWS_FIRST).max(axis=1)
    m_new, alpha = raised(m, highest)
    p = jnp.exp2(ROWS_FIRST.times(logits, to_log2) - ROWS_FIRST.over(m_new, logits.shape))
    l_new = l * alpha + p.sum(axis=1)
    if v_scales is not None:
        p *= over_tokens(v_scales, p.shape, ROWS_FIRST)
    return m_new, l_new, alpha, p


def _of_seen(scales: jax.Array | None, logits_of: Logits, tile: jax.Array) -> jax.Array | None:
    """The scales, with 1 for tokens that no query sees."""
    if scales is None:
        return None
    seen = logits_of.item.seen(tile, scales.shape, ROWS.reduce(0))
    return jnp.where(seen, scales, jnp.ones_like(scales))
