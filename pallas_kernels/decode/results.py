"""Finished rows, from registers to GMEM. Everything here is traced inside the kernel."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels.common.chunks import below, pointer, product, quotient, remainder
from pallas_kernels.common.interpret import interpreted_by
from pallas_kernels.common.mlir import arith, constant, integer
from pallas_kernels.common.registers import scalar_of
from pallas_kernels.common.rows import ROWS, ROWS_LAST, SCALAR
from pallas_kernels.common.sizes import COLUMNS


def _store_at_once(
    parts: Sequence[jax.Array], lse: jax.Array, out: Any, lse_out: Any, seq: jax.Array, kv_head: jax.Array, group: int
) -> None:
    _, q_len, _, head_dim = out.shape
    heads = pl.ds(kv_head * group, group)
    for token in range(q_len):
        rows = slice(token * group, (token + 1) * group)
        lse_out[seq, token, heads] = lse[rows]
        for c, part in enumerate(parts):
            size = min(COLUMNS, head_dim - c * COLUMNS)
            out[seq, token, heads, pl.ds(c * COLUMNS, size)] = part.T[rows, :size]


@interpreted_by(_store_at_once)
def store(
    parts: Sequence[jax.Array],  # [64, rows] each, together O^T, in the dtype of `out_gmem`
    lse: jax.Array,  # f32 [rows]
    out_gmem: Any,  # [seqs, q_len, heads, head_dim]
    lse_gmem: Any,  # f32 [seqs, q_len, heads]
    seq: jax.Array,
    kv_head: jax.Array,
    group: int,
) -> None:
    q_len = out_gmem.shape[1]

    def put(ref: Any, arrays: Sequence[Any], scalars: Sequence[Any]) -> None:
        start = pointer(ref, 64)
        ref_type = ir.MemRefType(ref.type)
        _, _, heads, *rest = ref_type.shape
        width = rest[0] if rest else 1
        bits = utils.bitwidth(ref_type.element_type)
        seq, kv_head = (arith.index_cast(ir.IndexType.get(), scalar_of(x)) for x in scalars)
        head = product(kv_head, group)
        for c, array in enumerate(arrays):

            def put_one(value: Any, at: tuple[Any, ...], c: int = c) -> None:
                *column, row = at
                token = arith.addi(product(seq, q_len), quotient(row, group))
                number = arith.addi(product(token, heads), arith.addi(head, remainder(row, group)))
                is_there = below(row, q_len * group)
                if column:
                    its_column = arith.addi(column[0], constant("index", c * COLUMNS))
                    number = arith.addi(product(number, width), its_column)
                    is_there = arith.andi(is_there, below(its_column, width))
                byte = arith.index_cast(integer(64), product(number, bits // 8))
                utils.inline_ptx(
                    f"st.global.b{bits} [$0], $1;",
                    arith.addi(start, byte),
                    utils.bitcast(value, integer(bits)),
                    predicate=is_there,
                    has_side_effects=True,
                )

            array.foreach(put_one)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), ROWS_LAST.vector, *[ROWS] * len(parts), SCALAR, SCALAR)
    )
    def put_all(_: Any, out: Any, lse_out: Any, lse: Any, *operands: Any) -> None:
        put(lse_out, [lse], operands[-2:])
        put(out, operands[:-2], operands[-2:])

    put_all(out_gmem, lse_gmem, lse, *parts, seq, kv_head)
