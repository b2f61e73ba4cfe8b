"""Sums of rows, brought to a higher maximum where that is needed.

Everything here is traced inside the kernels.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.common.interpret import interpreted_by
from pallas_kernels.common.mlir import arith, constant, integer, scf
from pallas_kernels.common.registers import make_array
from pallas_kernels.common.rows import ROWS, ROWS_FIRST

# In units of log2, by which a logit may exceed m before O is scaled to it: weights of 2^8 are far from overflow.
HEADROOM = 8.0


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
