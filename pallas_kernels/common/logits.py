"""From the products of queries and keys to the logits: what does not depend on which thread computes which rows.

Everything here is traced inside the kernels.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.rows import LOG2E, Orientation

# The sum e + 1 is rounded, and the cap multiplies its error: 7e-4 of a logit here. Larger caps, which mean no cap
# (infinity comes as 1e30), are lowered to this one. It changes a logit of 30 by 5e-4 and one of 100 by 0.02, less than
# the rounding of q and k to 16 bits.
LARGEST_CAP = 4096.0


def soft_capped(products: jax.Array, scale: jax.Array, cap: jax.Array, orientation: Orientation) -> jax.Array:
    """cap tanh(scale products / cap), in units of log2; scale f32 [], or [rows]."""
    # tanh(x) = 1 - 2 / (exp(2 x) + 1): the hardware's own tanh is good to 2^-11 only.
    cap = jnp.minimum(cap, LARGEST_CAP)
    e = jnp.exp2(orientation.times(products, scale / cap * (2 * LOG2E)))
    return (cap * LOG2E) * (1.0 - 2.0 / (e + 1.0))
