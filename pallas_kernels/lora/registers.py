"""A thread's place, and what it has in registers: MLIR, inlined into the kernel for adapters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.mma import mma
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.common.chunks import CHUNK, THREADS, i32, pointer, product, thread, total, wide
from pallas_kernels.common.mlir import arith
from pallas_kernels.common.rows import LEFT, RIGHT


def find_place() -> tuple[Any, Any, Any]:
    """The thread's warp, g and t."""
    lane = arith.remui(thread(), i32(32))
    return arith.divui(thread(), i32(32)), arith.divui(lane, i32(4)), arith.remui(lane, i32(4))


def rank_of(stage: Any) -> int:
    return ir.MemRefType(stage.type).shape[0] // 2


def slot(stage: Any, i: int) -> Any:
    """The address of the thread's i-th 16 bytes of a stage."""
    return total(pointer(stage), product(thread(), CHUNK), i32(i * CHUNK * THREADS))


def address_of(matrix: Any, row: Any, column: Any) -> Any:
    """i64, of a 16-bit number of a matrix in GMEM."""
    start = llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(matrix))
    number = arith.addi(product(wide(row), ir.MemRefType(matrix.type).shape[1]), wide(column))
    return arith.addi(start, product(number, 2))


def load_words(stage: Any, i: int) -> list[Any]:
    """The thread's i-th 16 bytes of a stage: eight numbers in four words."""
    return load("v4.b32", word_type(), slot(stage, i))


def load(kind: str, its_type: ir.Type, address: Any) -> list[Any]:
    """From SMEM, after the wait before it."""
    count = int(kind[1])
    targets, constraint = ", ".join(f"${i}" for i in range(count)), "f" if kind.endswith("f32") else "r"
    loaded = llvm.inline_asm(
        llvm.StructType.get_literal([its_type] * count),
        [address],
        f"ld.shared.{kind} {{{targets}}}, [${count}];",
        ",".join([f"={constraint}"] * count + ["r"]),
        has_side_effects=True,
    )
    return [llvm.extractvalue(its_type, loaded, [i]) for i in range(count)]


def column_of(first: list[Any], second: list[Any], column: int) -> Any:
    """A word with the numbers of one of eight columns in two rows."""
    i, is_upper = divmod(column, 2)
    if is_upper:
        return arith.ori(arith.shrui(first[i], i32(16)), arith.andi(second[i], i32(-(1 << 16))))
    return arith.ori(arith.andi(first[i], i32((1 << 16) - 1)), arith.shli(second[i], i32(16)))


def plus_product(sums: Any, left: list[Any], right: list[Any], like: Any) -> Any:
    """sums + left @ right, each thread with its words of 16 terms; `like`: a memref of their dtype."""
    pair = ir.VectorType.get((2,), ir.MemRefType(like.type).element_type)
    left, right = ([utils.bitcast(word, pair) for word in words] for words in (left, right))
    return mma(sums, make_array(left, LEFT, (sums.shape[0], 16)), make_array(right, RIGHT, (16, sums.shape[1])))


def make_array(registers: Sequence[Any], layout: Any, shape: tuple[int, int]) -> fa.FragmentedArray:
    its = layout.to_mgpu()
    flat = np.array(registers, dtype=object).reshape(its.registers_shape(shape))
    return fa.FragmentedArray(_registers=flat, _layout=its, _is_signed=None)


def rows_of_thread(rows: Any) -> list[Any]:
    """Those of the thread, g and g + 8."""
    return [number for one in rows.registers.flat for number in numbers_of(one)]


def numbers_of(of: Any) -> list[Any]:
    """Those of a vector."""
    (count,) = ir.VectorType(of.type).shape
    return [vector.extract(of, dynamic_position=[], static_position=[i]) for i in range(count)]


def narrowed(pair: Sequence[Any], dtype: Any) -> Any:
    """Two float32 numbers as a vector of 16-bit ones."""
    wide_pair = vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), list(pair))
    return arith.truncf(ir.VectorType.get((2,), utils.dtype_to_ir_type(dtype)), wide_pair)


def is_less(x: Any, y: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.ult, x, y)


def word_type() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def scalar_of(x: Any) -> Any:
    return x.registers.item()
