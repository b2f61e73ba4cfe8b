"""From the products of queries and keys to the logits: scale, soft cap, ALiBi, mask."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.rows import LOG2E, ROWS, ROWS_FIRST
from pallas_kernels.common.softmax import soft_capped
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
