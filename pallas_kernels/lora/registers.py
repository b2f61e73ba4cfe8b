"""A thread's place, and what it has in registers: MLIR, inlined into the kernel for adapters."""

from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels.common.chunks import (
    CHUNK,
    THREADS,
    i32,
    pointer,
    product,
    quotient,
    remainder,
    thread,
    total,
    wide,
)
from pallas_kernels.common.mlir import arith, integer
from pallas_kernels.common.registers import load, numbers_of, plus_product


def find_place() -> tuple[Any, Any, Any]:
    """The thread's warp, g and t."""
    lane = remainder(thread(), 32)
    return quotient(thread(), 32), quotient(lane, 4), remainder(lane, 4)


def rank_of(stage: Any) -> int:
    return ir.MemRefType(stage.type).shape[0] // 2


def slot(stage: Any, i: int) -> Any:
    """The address of the thread's i-th 16 bytes of a stage."""
    return total(pointer(stage), product(thread(), CHUNK), i32(i * CHUNK * THREADS))


def address_of(matrix: Any, row: Any, column: Any) -> Any:
    """i64, of a 16-bit number of a matrix in GMEM."""
    start = pointer(matrix, 64)
    number = arith.addi(product(wide(row), ir.MemRefType(matrix.type).shape[1]), wide(column))
    return arith.addi(start, product(number, 2))


def load_words(stage: Any, i: int) -> list[Any]:
    """The thread's i-th 16 bytes of a stage: eight numbers in four words."""
    return load("ld.shared.v4.b32", integer(), slot(stage, i))


def column_of(first: list[Any], second: list[Any], column: int) -> Any:
    """A word with the numbers of one of eight columns in two rows."""
    i, is_upper = divmod(column, 2)
    if is_upper:
        return arith.ori(arith.shrui(first[i], i32(16)), arith.andi(second[i], i32(-(1 << 16))))
    return arith.ori(arith.andi(first[i], i32((1 << 16) - 1)), arith.shli(second[i], i32(16)))


def plus_product_of_words(sums: Any, left: list[Any], right: list[Any], like: Any) -> Any:
    """sums + left @ right, each thread with its words of 16 terms; `like`: a memref of their dtype."""
    pair = ir.VectorType.get((2,), ir.MemRefType(like.type).element_type)
    left, right = ([utils.bitcast(word, pair) for word in words] for words in (left, right))
    return plus_product(sums, left, right)


def rows_of_thread(rows: Any) -> list[Any]:
    """Those of the thread, g and g + 8."""
    return [number for one in rows.registers.flat for number in numbers_of(one)]


def narrowed(pair: Sequence[Any], dtype: Any) -> Any:
    """Two float32 numbers as a vector of 16-bit ones."""
    wide_pair = vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), list(pair))
    return arith.truncf(ir.VectorType.get((2,), utils.dtype_to_ir_type(dtype)), wide_pair)
