"""The products of a step, with operands read from SMEM 16 columns or tokens at a time (ldmatrix).

    S [rows, tile]   = Q [rows, width]  K^T [width, tile]
    O [rows, width] += P [rows, tile]   V [tile, width]

An operand is 16 numbers deep. Because operands are read just before use, Q, K and V need 24 registers of a thread; a
whole tile of K would need 128. All functions are traced inside the kernel.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.mma import mma
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.common.interpret import interpreted_by
from pallas_kernels.common.mlir import (
    arith,
    constant,
    i32,
    integer,
    make_array,
    pointer,
    product,
    quotient,
    remainder,
    thread,
    total,
)
from pallas_kernels.common.rows import LEFT, RIGHT, ROWS, matrix
from pallas_kernels.common.sizes import COLUMNS

DEPTH = 16  # depth (k) of an operand
MATRIX = matrix(COLUMNS, 2)  # in SMEM


def _dot_scores(q: Any, k: Any) -> jax.Array:
    return jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)


def _dot_add(acc: jax.Array, p: jax.Array, v: Any) -> jax.Array:
    return acc + jnp.dot(p, v[...], preferred_element_type=jnp.float32)


@interpreted_by(_dot_scores)
def scores(q: Any, k: Any) -> jax.Array:
    """Q K^T, f32 [rows, tile], from SMEM [rows, width] and [tile, width]."""
    (rows, width), tile = q.shape, k.shape[0]
    ref, result = plgpu.RefType(MATRIX), plgpu.ShapeDtypeStruct((rows, tile), jnp.dtype(jnp.float32), ROWS)

    @plgpu.inline_mgpu(arg_types=(ref, ref), return_type=result)
    def multiply(_: Any, q: Any, k: Any) -> fa.FragmentedArray:
        acc = fa.FragmentedArray.splat(constant("f32", 0.0), result.shape, ROWS.to_mgpu())
        queries = _Matrices.of(q, product(quotient(thread(), 32), 16), rows_first=True)
        keys = _Matrices.of(k, None, rows_first=False)
        for start in range(0, width, DEPTH):
            left = [x for row in range(0, rows, 64) for x in queries.load(row, start)]
            right = [x for row in range(0, tile, 16) for x in keys.load(row, start)]
            acc = _plus_product(acc, left, right)
        return acc

    return multiply(q, k)


@interpreted_by(_dot_add)
def add(acc: jax.Array, p: jax.Array, v: Any) -> jax.Array:
    """acc + P V, f32 [rows, width], from P [rows, tile] and SMEM [tile, width]."""
    result = plgpu.ShapeDtypeStruct(acc.shape, jnp.dtype(jnp.float32), ROWS)

    @plgpu.inline_mgpu(arg_types=(ROWS, ROWS, plgpu.RefType(MATRIX)), return_type=result)
    def multiply(_: Any, acc: fa.FragmentedArray, p: fa.FragmentedArray, v: Any) -> fa.FragmentedArray:
        tile, width = p.shape[1], acc.shape[1]
        values = _Matrices.of(v, None, rows_first=True)
        for start in range(0, tile, DEPTH):
            # P is already in the layout of left operands.
            left = p[:, start : start + DEPTH].registers.flat
            right = [x for column in range(0, width, 16) for x in values.load(start, column, transposed=True)]
            acc = _plus_product(acc, left, right)
        return acc

    return multiply(acc, p, v)


def _plus_product(sums: fa.FragmentedArray, left: Iterable[Any], right: Iterable[Any]) -> fa.FragmentedArray:
    """sums [m, n] + left [m, 16] @ right [16, n], whose registers are pairs of 16-bit numbers (m16n8k16)."""
    m, n = sums.shape
    return mma(sums, make_array(left, LEFT.to_mgpu(), (m, DEPTH)), make_array(right, RIGHT.to_mgpu(), (DEPTH, n)))


@dataclasses.dataclass(frozen=True)
class _Matrices:
    """Loads 16 x 16 numbers of a matrix in SMEM into four registers of a thread: quarters of 8 x 8 numbers, in row or
    column order."""

    lane: Any  # i32, address of the row that this thread reads in the matrix's first 16 x 16 numbers
    row_bytes: int  # bytes of 8 rows
    number: ir.Type  # element type of the matrix

    @classmethod
    def of(cls, smem: Any, first_row: Any | None, *, rows_first: bool) -> "_Matrices":
        smem_type = ir.MemRefType(smem.type)
        row_bytes = smem_type.shape[1] * 8 * 2 * COLUMNS
        lane = remainder(thread(), 32)
        in_eight, quarter = remainder(lane, 8), quotient(lane, 8)
        first, second = remainder(quarter, 2), quotient(quarter, 2)
        lower, right = (first, second) if rows_first else (second, first)
        start = total(pointer(smem), product(lower, row_bytes), product(in_eight, 2 * COLUMNS))
        if first_row is not None:
            start = arith.addi(start, product(quotient(first_row, 8), row_bytes))
        # The swizzle: a 16-byte chunk is at its index xor the row.
        return cls(arith.addi(start, product(arith.xori(right, in_eight), 16)), row_bytes, smem_type.element_type)

    def load(self, row: int, column: int, *, transposed: bool = False) -> list[Any]:
        """Loads from `row`, a multiple of 8, and `column`, a multiple of 16. `transposed` transposes each quarter."""
        tile, in_tile = divmod(column, COLUMNS)
        address = arith.xori(self.lane, i32(2 * in_tile)) if in_tile else self.lane
        address = arith.addi(address, i32(row // 8 * self.row_bytes + tile * 8 * 2 * COLUMNS))
        # Declared to have side effects, so that it stays after the preceding wait.
        loaded = llvm.inline_asm(
            llvm.StructType.get_literal([integer()] * 4),
            [address],
            f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
            "=r,=r,=r,=r,r",
            has_side_effects=True,
        )
        pair = ir.VectorType.get((2,), self.number)
        words = [llvm.extractvalue(integer(), loaded, [i]) for i in range(4)]
        return [utils.bitcast(word, pair) for word in words]
