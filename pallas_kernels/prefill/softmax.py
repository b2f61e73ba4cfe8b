"""The online softmax of a tile.

All functions are traced inside the kernels.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.rows import ROWS, ROWS_FIRST
from pallas_kernels.common.scales import over_tokens, peaks
from pallas_kernels.common.softmax import raised
from pallas_kernels.prefill.logits import Logits


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
