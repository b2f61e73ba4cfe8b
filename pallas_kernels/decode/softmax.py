"""The online softmax of a tile.

Everything here is traced inside the kernel.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.rows import ROWS_LAST
from pallas_kernels.common.scales import over_tokens, peaks
from pallas_kernels.common.sizes import zero_unless


def softmax(
    logits: jax.Array,  # f32 [tile, rows], in units of log2
    visible: jax.Array | None,  # bool [tile, rows]; None: all
    v_scales: jax.Array | None,  # f32 [tile]
    m: jax.Array,
    l: jax.Array,
    headroom: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The new m and l, what sums so far are multiplied with, f32 [rows], and the weights times `v_scales`."""
    highest = (logits if v_scales is None else peaks(logits, v_scales, ROWS_LAST, visible)).max(axis=0)
    m_new = jnp.maximum(m, highest - headroom if headroom else highest)
    alpha = jnp.exp2(m - m_new)

    def masked(p: jax.Array) -> jax.Array:
        return p if visible is None else zero_unless(visible, p)

    # A row that has seen nothing yet has m = LOWEST, and exp2(LOWEST - LOWEST) is 1.
    p = masked(jnp.exp2(logits - ROWS_LAST.over(m_new, logits.shape)))
    l = l * ROWS_LAST.over(alpha, l.shape) + p
    if v_scales is not None:
        p = masked(p * over_tokens(v_scales, p.shape, ROWS_LAST))  # the scale of a token that is not there may be NaN
    return m_new, l, alpha, p
