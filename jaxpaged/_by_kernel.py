"""A call of a kernel, which XLA cannot partition: it would silently gather every array on each device.

What the call becomes is decided when it is lowered, which is when its platform and its devices are known.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def by_kernel[Result](
    kernel: Callable[..., Result], elsewhere: Callable[..., Result], *arguments: Any, refusal: str | None = None
) -> Result:
    """`kernel(*arguments)` if it is lowered for CUDA, `elsewhere(*arguments)` for other platforms.

    If XLA partitions the program over devices, it is `elsewhere` too, or with a `refusal` `NotImplementedError`. Inside
    `jax.shard_map`, with check_vma or without, each device runs the kernel on its own part.
    """
    leaves, tree = jax.tree.flatten(arguments)

    def on_leaves(function: Callable[..., Result]) -> Callable[..., list[jax.Array]]:
        return lambda *leaves: jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))

    # Pallas takes no types that vary over a mesh axis: the kernel gets types that do not say it.
    varying = frozenset[Any]().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    results = jax.eval_shape(lambda *leaves: kernel(*jax.tree.unflatten(tree, leaves)), *types)
    outs = _by_kernel.bind(
        *leaves,
        kernel=on_leaves(kernel),
        elsewhere=on_leaves(elsewhere),
        refusal=refusal,
        out_types=tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in jax.tree.leaves(results)),
    )
    if varying:
        outs = jax.lax.pcast(outs, tuple(sorted(varying)), to="varying")
    return jax.tree.unflatten(jax.tree.structure(results), outs)


_by_kernel = Primitive("by_kernel")
_by_kernel.multiple_results = True


@_by_kernel.def_abstract_eval
def _types_of_results(*_: Any, out_types: tuple, **__: Any) -> list[Any]:
    return list(out_types)


def _batch(arrays: Any, axes: Any, *, kernel: Callable, elsewhere: Callable, refusal: str | None, **_: Any) -> tuple:
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    mapped = [jax.vmap(function, in_axes=tuple(axes), axis_size=size) for function in (kernel, elsewhere)]
    outs = by_kernel(*mapped, *arrays, refusal=refusal)
    return outs, [0] * len(outs)


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, elsewhere: Callable, **_: Any) -> Any:
    return mlir.lower_fun(elsewhere)(ctx, *operands)


def _lower_for_cuda(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    kernel: Callable,
    elsewhere: Callable,
    refusal: str | None,
    **_: Any,
) -> Any:
    is_partitioned = _devices_to_partition_over(ctx.module_context.axis_context) > 1
    if is_partitioned and refusal is not None:
        raise NotImplementedError(refusal)
    avals: Any = ctx.avals_in
    types = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]
    return mlir.lower_fun(elsewhere if is_partitioned else kernel)(ctx.replace(avals_in=types), *operands)


def _devices_to_partition_over(context: Any) -> int:
    mesh = getattr(context, "mesh", None)
    if mesh is None:  # outside of shard_map
        return getattr(context, "num_devices", 1)
    return math.prod(size for axis, size in mesh.shape.items() if axis not in context.manual_axes)


@_by_kernel.def_impl
def _evaluate(*arrays: Any, **settings: Any) -> Any:  # outside of jit, which may be disabled
    with jax.disable_jit(False):
        return jax.jit(lambda *arrays: _by_kernel.bind(*arrays, **settings))(*arrays)


batching.primitive_batchers[_by_kernel] = _batch
mlir.register_lowering(_by_kernel, _lower)
mlir.register_lowering(_by_kernel, _lower_for_cuda, platform="cuda")
