"""From the products of queries and keys to the weights: scale, soft cap, ALiBi, mask, and the online softmax.

All functions are traced inside the kernel.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.interface import given
from pallas_kernels.common.rows import LOG2E, LOWEST, ROWS, ROWS_LAST
from pallas_kernels.common.scales import of_head, over_tokens, peaks, scaled
from pallas_kernels.common.sizes import zero_unless
from pallas_kernels.common.softmax import soft_capped
from pallas_kernels.decode.config import TILE
from pallas_kernels.decode.refs import Refs
from pallas_kernels.decode.walk import Walk


@dataclasses.dataclass(frozen=True)
class Logits:
    """The logits of a program's sequence and KV head."""

    walk: Walk
    first_query: jax.Array  # int32 [], position of the first query
    scale: jax.Array  # f32 []
    cap: jax.Array | None  # f32 []
    slopes: jax.Array | None  # f32 [rows]
    group: int
    tree_bits: list[jax.Array] | None = None  # int32 [rows] each: 32 of the newest tokens, a set bit for those seen

    @classmethod
    def of(cls, refs: Refs, walk: Walk) -> "Logits":
        kv_head, options = walk.partition.kv_head, refs.options
        scale, cap = options.scale[0], options.cap
        slopes = given(options.alibi_slopes, lambda slopes: ROWS_LAST.load(slopes.at[kv_head]))
        scale = scaled(scale, of_head(options.k_scale, refs.cache_head(kv_head)))

        def load_bits(bits: Any) -> list[jax.Array]:
            return [ROWS_LAST.load(bits.at[walk.seq, word]) for word in range(bits.shape[1])]

        return cls(walk, walk.first_query, scale, cap, slopes, refs.group, given(options.tree_bits, load_bits))

    def __call__(self, products: jax.Array, tile: jax.Array, masked: bool) -> tuple[jax.Array, jax.Array | None]:
        """Products f32 [tile, rows] -> logits in units of log2, and a mask of the visible ones; None: all visible."""
        walk, shape = self.walk, products.shape
        if self.cap is None:
            logits = products * (self.scale * LOG2E)
        else:
            logits = soft_capped(products, self.scale, self.cap, ROWS_LAST)
        if not masked and self.slopes is None:
            return logits, None
        tokens = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=ROWS) + tile * TILE
        in_call = row_tokens(shape, self.group) if walk.q_len > 1 else jnp.int32(0)
        distance = self.first_query + in_call - tokens
        if self.slopes is not None:
            logits -= ROWS_LAST.over(self.slopes * LOG2E, shape) * distance.astype(jnp.float32)
        if not masked:
            return logits, None
        visible = distance >= 0
        if walk.window is not None:
            visible = jnp.logical_and(visible, distance < walk.window)
        if self.tree_bits is not None:
            index = tokens - self.first_query  # index among the newest tokens; negative for older ones
            bit_of = jnp.bitwise_and(index, 31)
            word_of = lax.shift_right_arithmetic(index, jnp.full(shape, 5, jnp.int32))
            for word, bits in enumerate(self.tree_bits):
                bit = jnp.bitwise_and(lax.shift_right_logical(ROWS_LAST.over(bits, shape), bit_of), 1)
                visible = jnp.logical_and(visible, jnp.logical_or(word_of != word, bit == 1))
        return jnp.where(visible, logits, jnp.full(shape, LOWEST, jnp.float32)), visible


def row_tokens(shape: tuple[int, ...], group: int) -> jax.Array:
    """The query token of each row, int32 `shape`, the rows on axis 1."""
    rows = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=ROWS)
    return rows if group == 1 else lax.div(rows, jnp.full(shape, group, jnp.int32))


def softmax(
    logits: jax.Array,  # f32 [tile, rows], in units of log2
    visible: jax.Array | None,  # bool [tile, rows]; None: all
    v_scales: jax.Array | None,  # f32 [tile]
    m: jax.Array,
    l: jax.Array,
    headroom: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the new m and l, alpha (the factor for the sums so far, f32 [rows]), and the weights times `v_scales`."""
    highest = (logits if v_scales is None else peaks(logits, v_scales, ROWS_LAST, visible)).max(axis=0)
    m_new = jnp.maximum(m, highest - headroom if headroom else highest)
    alpha = jnp.exp2(m - m_new)

    def masked(p: jax.Array) -> jax.Array:
        return p if visible is None else zero_unless(visible, p)

    # A row that has not seen a token has m = LOWEST, and exp2(LOWEST - LOWEST) would be 1.
    p = masked(jnp.exp2(logits - ROWS_LAST.over(m_new, logits.shape)))
    l = l * ROWS_LAST.over(alpha, l.shape) + p
    if v_scales is not None:
        p = masked(p * over_tokens(v_scales, p.shape, ROWS_LAST))  # the scale past the end may be NaN
    return m_new, l, alpha, p
