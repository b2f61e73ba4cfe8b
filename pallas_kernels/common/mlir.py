"""MLIR's dialects as they are: the type stubs describe the generated classes, not the functions that stand for them."""

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as _arith
from jaxlib.mlir.dialects import scf as _scf

arith: Any = _arith
scf: Any = _scf


def constant(kind: str, x: float) -> Any:
    """Of a type by its name in MLIR."""
    return arith.constant(ir.Type.parse(kind), x)


def integer(bits: int = 32) -> ir.Type:
    return ir.IntegerType.get_signless(bits)
