"""The online softmax of a tile, and what it does to O.

Everything here is traced inside the kernels.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.common.interpret import interpreted_by
from pallas_kernels.common.mlir import arith, constant, scf
from pallas_kernels.common.rows import ROWS, ROWS_FIRST
from pallas_kernels.common.scales import over_tokens, peaks
from pallas_kernels.prefill.logits import Logits

# In units of log2, by which a logit may exceed m before O is scaled to it: weights of 2^8 are far from overflow.
HEADROOM = 8.0
Scales = tuple[jax.Array | None, jax.Array | None]  # of K and of V, f32 [tile] of its tokens


def softmax(
    scores: jax.Array,  # f32 [rows, tile], the products of Q and K
    logits_of: Logits,
    tile: jax.Array,
    scales: Scales,
    m: jax.Array,
    l: jax.Array,
    *,
    masked: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The new m and l, what sums so far are multiplied with, f32 [rows], and the weights, f32 [rows, tile]."""
    k_scales, v_scales = (_of_seen(x, logits_of, tile) if masked else x for x in scales)
    if k_scales is not None:
        scores *= over_tokens(k_scales, scores.shape, ROWS_FIRST)
    logits, to_log2 = logits_of(scores, tile, masked)
    if v_scales is None:
        highest = logits.max(axis=1) * to_log2
    else:
        highest = peaks(ROWS_FIRST.times(logits, to_log2), v_scales, ROWS_FIRST).max(axis=1)
    m_new = jnp.where(highest > m + HEADROOM, highest, m)
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2(ROWS_FIRST.times(logits, to_log2) - ROWS_FIRST.over(m_new, logits.shape))
    l_new = l * alpha + p.sum(axis=1)
    if v_scales is not None:
        p *= over_tokens(v_scales, p.shape, ROWS_FIRST)
    return m_new, l_new, alpha, p


def _of_seen(scales: jax.Array | None, logits_of: Logits, tile: jax.Array) -> jax.Array | None:
    """1 for a token that no query sees."""
    if scales is None:
        return None
    seen = logits_of.item.seen(tile, scales.shape, ROWS.reduce(0))
    return jnp.where(seen, scales, jnp.ones_like(scales))


@interpreted_by(ROWS_FIRST.times)
def rescale(acc: jax.Array, alpha: jax.Array) -> jax.Array:
    """acc f32 [rows, width] times alpha f32 [rows]; a warp in all of whose rows alpha is 1 leaves acc as it is."""

    @plgpu.inline_mgpu(
        arg_types=(ROWS, ROWS_FIRST.vector),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.dtype(jnp.float32), ROWS),
    )
    def scale(_: Any, acc: Any, alpha: Any) -> Any:
        factors = list(alpha.registers.flat)
        first, *more = (f"${i + 1}, 0f3F800000" for i in range(len(factors)))  # 1.0
        is_needed = llvm.inline_asm(
            ir.IntegerType.get_signless(32),
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
        registers = np.array(list(branch.results), dtype=object).reshape(acc.registers.shape)
        return fa.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None)

    return scale(acc, alpha)
