"""What a thread has in registers: numbers of vectors, and its part of matrices. MLIR, inlined into the kernels."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector


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
