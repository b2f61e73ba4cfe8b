"""What a thread has in registers: numbers of vectors, and its part of matrices. MLIR, inlined into the kernels."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu.mma import mma
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.common.mlir import integer
from pallas_kernels.common.rows import LEFT, RIGHT


def scalar_of(x: Any) -> Any:
    return x.registers.item()


def numbers_of(of: Any) -> list[Any]:
    """Those of a vector."""
    (count,) = ir.VectorType(of.type).shape
    return [vector.extract(of, dynamic_position=[], static_position=[i]) for i in range(count)]


def make_array(registers: Iterable[Any], layout: Any, shape: tuple[int, ...]) -> fa.FragmentedArray:
    """Of the registers of a thread, of floating-point numbers; `layout`: of Mosaic."""
    flat = np.fromiter(registers, dtype=object).reshape(layout.registers_shape(shape))
    return fa.FragmentedArray(_registers=flat, _layout=layout, _is_signed=None)


def load(instruction: str, kind: ir.Type, address: Any, count: int = 4) -> list[Any]:
    """From SMEM, after the wait before it: `count` registers of a type."""
    targets, constraint = ", ".join(f"${i}" for i in range(count)), "r" if kind == integer() else "f"
    loaded = llvm.inline_asm(
        llvm.StructType.get_literal([kind] * count),
        [address],
        f"{instruction} {{{targets}}}, [${count}];",
        ",".join([f"={constraint}"] * count + ["r"]),
        has_side_effects=True,
    )
    return [llvm.extractvalue(kind, loaded, [i]) for i in range(count)]


def plus_product(sums: fa.FragmentedArray, left: Iterable[Any], right: Iterable[Any]) -> fa.FragmentedArray:
    """sums [m, n] + left [m, 16] @ right [16, n], whose registers are pairs of 16-bit numbers (m16n8k16)."""
    m, n = sums.shape
    return mma(sums, make_array(left, LEFT.to_mgpu(), (m, 16)), make_array(right, RIGHT.to_mgpu(), (16, n)))
