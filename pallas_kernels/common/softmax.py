"""The online softmax of a tile.

Everything here is traced inside the decode kernel.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.rows import ROWS_LAST


def softmax(
    logits: jax.Array,  # f32 [tile, rows]
    peaks: jax.Array,  # f32 [tile, rows], what must not overflow
    visible: jax.Array | None,  # bool [tile, rows]
    m: jax.Array,
    l: jax.Array,
    headroom: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The new m and l, what sums so far are multiplied with, f32 [rows], and the weights, f32 [tile, rows]."""
    highest = peaks.max(axis=0)
    m_new = jnp.maximum(m, highest if headroom is None else highest - headroom)
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2(logits - ROWS_LAST.over(m_new, logits.shape))
    if visible is not None:  # a row that has seen nothing yet has m = LOWEST, and exp2(LOWEST - LOWEST) is 1
        p = jnp.where(visible, p, jnp.zeros_like(p))
    return m_new, l * ROWS_LAST.over(alpha, l.shape) + p, alpha, p
