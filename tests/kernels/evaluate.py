"""Evaluates a jaxpr with NumPy, an operation at a time.

Interpret mode makes a program of hundreds of small operations of each kernel. XLA takes a second to compile it for a
CPU; to do the operations one by one takes a third of that at the sizes of the tests.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend import core


def evaluate(jaxpr: core.Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
    """The results of `jaxpr`, as NumPy arrays. An operation that is not known here is JAX's own."""
    with np.errstate(all="ignore"):
        return _evaluate(jaxpr, list(map(np.asarray, consts)), list(map(np.asarray, args)))


def _evaluate(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values: dict[core.Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, core.Literal) else values[atom]

    def run(closed: core.ClosedJaxpr, *operands: Any) -> list[Any]:
        return _evaluate(closed.jaxpr, closed.consts, operands)

    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        operands = [read(atom) for atom in equation.invars]
        if name in OPERATIONS:
            results = [OPERATIONS[name](*operands, **params)]
        elif name == "io_callback":
            # Interpret mode's callbacks ask for numbers, mostly.
            operands = [x.item() if np.ndim(x) == 0 and x.dtype.kind in "iu" else np.array(x) for x in operands]
            results = list(map(np.asarray, params["callback"](*operands)))
        elif name == "jit":
            results = run(params["jaxpr"], *operands)
        elif name == "cond":
            last = len(params["branches"]) - 1
            results = run(params["branches"][min(max(int(operands[0]), 0), last)], *operands[1:])
        elif name == "while":
            num_of_cond, num_of_body = params["cond_nconsts"], params["body_nconsts"]
            of_cond, of_body = operands[:num_of_cond], operands[num_of_cond : num_of_cond + num_of_body]
            results = operands[num_of_cond + num_of_body :]
            while run(params["cond_jaxpr"], *of_cond, *results)[0]:
                results = run(params["body_jaxpr"], *of_body, *results)
        elif name == "scan" and not _has_arrays_to_scan(equation):
            num_consts = len(operands) - len(equation.outvars)
            consts, results = operands[:num_consts], operands[num_consts:]
            for _ in range(params["length"]):
                results = run(params["jaxpr"], *consts, *results)
        else:
            results = equation.primitive.bind(*operands, **params)
            results = [np.asarray(x) for x in (results if equation.primitive.multiple_results else [results])]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _has_arrays_to_scan(equation: core.JaxprEqn) -> bool:
    """Whether the operands or the results have an axis that the body's do not have."""
    body = equation.params["jaxpr"].jaxpr
    pairs = zip((*equation.invars, *equation.outvars), (*body.invars, *body.outvars), strict=True)
    return any(outside.aval.ndim != inside.aval.ndim for outside, inside in pairs)


def _divide(x: Any, y: Any) -> Any:
    if not np.issubdtype(x.dtype, np.integer):
        return x / y
    return (np.sign(x) * np.sign(y) * (abs(x) // np.maximum(abs(y), 1))).astype(x.dtype)  # towards zero


def _convert(x: Any, *, new_dtype: Any, **_: Any) -> Any:
    return np.asarray(x).astype(new_dtype)


def _broadcast(x: Any, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> Any:
    of_x = np.ones(len(shape), int)
    of_x[list(broadcast_dimensions)] = np.shape(x)
    return np.broadcast_to(np.reshape(x, of_x), shape)


def _slice(x: Any, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    strides = strides or [1] * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, strides))]


def _dynamic_slice(x: Any, *starts: Any, slice_sizes: Any, **_: Any) -> Any:
    starts = [min(max(int(start), 0), n - size) for start, n, size in zip(starts, x.shape, slice_sizes, strict=True)]
    return x[tuple(slice(start, start + size) for start, size in zip(starts, slice_sizes, strict=True))]


def _select(which: Any, *cases: Any) -> Any:
    return np.choose(np.asarray(which, np.intp), cases)


def _dot(x: Any, y: Any, *, dimension_numbers: Any, preferred_element_type: Any, **_: Any) -> Any:
    contracted, batch = dimension_numbers
    assert batch == ((), ())
    return np.tensordot(x.astype(np.float32), y.astype(np.float32), contracted).astype(
        preferred_element_type or x.dtype
    )


def _iota(*, dtype: Any, shape: Any, dimension: int, **_: Any) -> Any:
    of_dimension = [n if i == dimension else 1 for i, n in enumerate(shape)]
    return np.broadcast_to(np.arange(shape[dimension], dtype=dtype).reshape(of_dimension), shape)


def _without_params(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands, **_: function(*operands)


OPERATIONS: dict[str, Callable[..., Any]] = {
    name: _without_params(function)
    for name, function in dict(
        abs=np.abs,
        add=np.add,
        clamp=lambda low, x, high: np.minimum(np.maximum(x, low), high),
        div=_divide,
        eq=np.equal,
        exp=np.exp,
        exp2=np.exp2,
        ge=np.greater_equal,
        gt=np.greater,
        le=np.less_equal,
        log=np.log,
        lt=np.less,
        max=np.maximum,
        min=np.minimum,
        mul=np.multiply,
        ne=np.not_equal,
        neg=np.negative,
        rem=np.fmod,
        select_n=_select,
        sign=np.sign,
        sub=np.subtract,
        tanh=np.tanh,
        xor=np.bitwise_xor,
    ).items()
} | {
    "and": _without_params(np.bitwise_and),
    "bitcast_convert_type": lambda x, *, new_dtype: np.ascontiguousarray(x).view(new_dtype).reshape(np.shape(x)),
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "convert_element_type": _convert,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "iota": _iota,
    "not": _without_params(np.invert),
    "or": _without_params(np.bitwise_or),
    "reduce_max": lambda x, *, axes, **_: np.max(x, axes),
    "reduce_sum": lambda x, *, axes, **_: np.sum(x, axes),
    "reshape": lambda x, *, new_sizes, **_: np.reshape(x, new_sizes),
    "slice": _slice,
    "stack": lambda *xs, axis: np.stack(xs, axis),
    "squeeze": lambda x, *, dimensions: np.squeeze(x, dimensions),
    "transpose": lambda x, *, permutation: np.transpose(x, permutation),
}
