"""Parts of the online softmax that all kernels share: soft cap, rescaling to a new maximum, normalisation.

All functions are traced inside the kernels.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.common.interpret import interpreted_by
from pallas_kernels.common.mlir import arith, constant, integer, make_array, scf
from pallas_kernels.common.rows import LN2, LOG2E, ROWS, ROWS_FIRST, Orientation

# `soft_capped` rounds exp(2 x) + 1, and the cap multiplies that error: at this cap the error of a logit is 7e-4. Larger
# caps mean no cap (infinity is passed as 1e30) and are lowered to this one. That changes a logit of 30 by 5e-4 and a
# logit of 100 by 0.02, less than the rounding of q and k to 16 bits.
LARGEST_CAP = 4096.0


def soft_capped(products: jax.Array, scale: jax.Array, cap: jax.Array, orientation: Orientation) -> jax.Array:
    """cap tanh(scale products / cap), in units of log2; scale f32 [], or [rows]."""
    # tanh(x) = 1 - 2 / (exp(2 x) + 1), because the hardware's tanh has an error of 2^-11.
    cap = jnp.minimum(cap, LARGEST_CAP)
    e = jnp.exp2(orientation.times(products, scale / cap * (2 * LOG2E)))
    return (cap * LOG2E) * (1.0 - 2.0 / (e + 1.0))


# How far a logit may exceed m before O is rescaled, in units of log2. Weights of 2^8 are far from overflow.
HEADROOM = 8.0


@interpreted_by(ROWS_FIRST.times)
def rescale(acc: jax.Array, alpha: jax.Array) -> jax.Array:
    """acc f32 [rows, width] times alpha f32 [rows]. A warp skips the product if alpha is 1 in all its rows."""

    @plgpu.inline_mgpu(
        arg_types=(ROWS, ROWS_FIRST.vector),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.dtype(jnp.float32), ROWS),
    )
    def scale(_: Any, acc: Any, alpha: Any) -> Any:
        factors = list(alpha.registers.flat)
        first, *more = (f"${i + 1}, 0f3F800000" for i in range(len(factors)))  # 1.0
        is_needed = llvm.inline_asm(
            integer(),
            factors,
            f"{{ .reg .pred p, q; setp.neu.f32 p, {first}; {' '.join(f'setp.neu.or.f32 p, {x}, p;' for x in more)}"
            " vote.sync.any.pred q, p, 0xffffffff; selp.b32 $0, 1, 0, q; }",
            ",".join(["=r"] + ["f"] * len(factors)),
            has_side_effects=True,
        )
        types = [x.type for x in acc.registers.flat]
        branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ne, is_needed, constant("i32", 0)), types, has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scaled = acc * alpha.broadcast_in_dim(acc.shape, (0,), acc.layout)
            scf.yield_(list(scaled.registers.flat))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(list(acc.registers.flat))
        return make_array(branch.results, acc.layout, acc.shape)

    return scale(acc, alpha)


def raised(m: jax.Array, highest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the new m and alpha, the factor for the sums so far, both f32 [rows]. m is the highest logit so far, or
    up to HEADROOM less, in units of log2."""
    m_new = jnp.where(highest > m + HEADROOM, highest, m)
    return m_new, jnp.exp2(m - m_new)


def normalise(m: jax.Array, l: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns the factor that normalises a row's sum, and its lse (natural logarithm); 0 and -inf for a row that saw no
    token.

    m, in units of log2, and l are f32 [rows]. A row that saw a token has l > 0, or NaN.
    """
    nothing = l == 0.0
    if sinks is None:
        m_all, denominator = m, l
    else:
        m_all = jnp.maximum(m, sinks * LOG2E)
        denominator = l * jnp.exp2(m - m_all) + jnp.exp2(sinks * LOG2E - m_all)
    safe = jnp.where(nothing, jnp.ones_like(denominator), denominator)
    factor = jnp.where(nothing, jnp.zeros_like(safe), jnp.exp2(m - m_all) / safe)
    lse = jnp.where(nothing, jnp.full_like(safe, -jnp.inf), m_all * LN2 + jnp.log(safe))
    return factor, lse
