"""MLIR helpers: arithmetic, a thread's registers, and the chunks of a matrix in SMEM that threads copy.

The code is inlined into the kernels and runs on the 128 threads of a warpgroup. The type stubs of MLIR's dialects
describe the generated classes, not the functions that replace them.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as _arith
from jaxlib.mlir.dialects import llvm, vector
from jaxlib.mlir.dialects import scf as _scf

THREADS = 128
CHUNK = 16  # bytes
arith: Any = _arith
scf: Any = _scf


def constant(kind: str, x: float) -> Any:
    """A constant; `kind` is the MLIR name of its type."""
    return arith.constant(ir.Type.parse(kind), x)


def integer(bits: int = 32) -> ir.Type:
    return ir.IntegerType.get_signless(bits)


def scalar_of(x: Any) -> Any:
    return x.registers.item()


def numbers_of(of: Any) -> list[Any]:
    """The elements of a vector."""
    (count,) = ir.VectorType(of.type).shape
    return [vector.extract(of, dynamic_position=[], static_position=[i]) for i in range(count)]


def make_array(registers: Iterable[Any], layout: Any, shape: tuple[int, ...]) -> fa.FragmentedArray:
    """An array in one of Mosaic's layouts, from a thread's floating-point registers."""
    flat = np.fromiter(registers, dtype=object).reshape(layout.registers_shape(shape))
    return fa.FragmentedArray(_registers=flat, _layout=layout, _is_signed=None)


def pointer(array: Any, bits: int = 32) -> Any:
    """The address of an array: 32 bits in SMEM, 64 in GMEM."""
    return llvm.ptrtoint(integer(bits), utils.memref_ptr(array))


def thread() -> Any:
    return remainder(utils.thread_idx(), THREADS)


def i32(x: int) -> Any:
    return constant("i32", x)


def wide(x: Any) -> Any:
    return arith.extui(integer(64), x)


def product(x: Any, y: int) -> Any:
    return arith.muli(x, utils.c(y, x.type))


def quotient(x: Any, y: int) -> Any:
    return arith.divui(x, utils.c(y, x.type))


def remainder(x: Any, y: int) -> Any:
    return arith.remui(x, utils.c(y, x.type))


def total(*terms: Any) -> Any:
    result = terms[0]
    for term in terms[1:]:
        result = arith.addi(result, term)
    return result


def below(x: Any, bound: int) -> Any:
    return is_less(x, utils.c(bound, x.type))


def is_less(x: Any, y: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.ult, x, y)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """16 bytes of a matrix in SMEM that a thread copies."""

    thread_row: Any  # i32, the row `rows_after` rows before the chunk's
    rows_after: int
    rows: range  # contains the chunk's row for every thread
    byte: Any  # i32, first byte in the row
    width: int  # bytes of a row
    smem: Any  # i32, the chunk's address

    @property
    def row(self) -> Any:
        return arith.addi(self.thread_row, i32(self.rows_after))


def chunks(smem: Any) -> Iterator[Chunk]:
    """The chunks that this thread of a warpgroup copies. `smem`: [row tiles, column tiles, 8, columns of a tile].

    All chunks of a thread have the same position within their tile. So the part of an address that depends on the
    thread is computed once and needs few registers.
    """
    smem_type = ir.MemRefType(smem.type)
    row_tiles, column_tiles, tile_rows, tile_columns = smem_type.shape
    row_bytes = tile_columns * utils.bitwidth(smem_type.element_type) // 8  # per row of a tile
    width = column_tiles * row_bytes
    in_row = width // CHUNK
    num_chunks = row_tiles * tile_rows * in_row
    period = math.lcm(THREADS, tile_rows * in_row)
    places: dict[int, tuple[Any, Any, Any]] = {}
    for first in range(0, num_chunks, THREADS):
        is_whole = first + THREADS <= num_chunks
        again, in_period = divmod(first, period)
        if not again or not is_whole:
            again, in_period = 0, first
            number = arith.addi(thread(), i32(first))
            if not is_whole:  # few rows: several threads copy the same chunk
                number = remainder(number, num_chunks)
            row, byte = quotient(number, in_row), product(remainder(number, in_row), CHUNK)
            tile = total(product(quotient(row, tile_rows), column_tiles), quotient(byte, row_bytes))
            offset = total(
                product(tile, tile_rows * row_bytes),
                product(remainder(row, tile_rows), row_bytes),
                remainder(byte, row_bytes),
            )
            # The swizzle: bits 4 to 6 of the address (fewer for narrower tiles), xor bits 7 to 9.
            turn = arith.andi(arith.shrui(offset, i32(7)), i32(row_bytes // CHUNK - 1))
            offset = arith.xori(offset, arith.shli(turn, i32(4)))
            places[first] = row, byte, arith.addi(pointer(smem), offset)
        row, byte, address = places[in_period]
        rows_after = again * (period // in_row)
        rows = range(first // in_row, min((first + THREADS - 1) // in_row + 1, row_tiles * tile_rows))
        yield Chunk(row, rows_after, rows, byte, width, arith.addi(address, i32(rows_after * width)))
