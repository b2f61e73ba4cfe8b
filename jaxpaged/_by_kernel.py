"""Calls of kernels: the choice of a kernel, and its behaviour under JAX's transformations.

XLA cannot partition a kernel: it would silently gather every array on each device. Whether the kernel or XLA computes a
call is decided when it is lowered, because only then its platform and devices are known.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from jaxpaged._device import Gpu
from pallas_kernels.common.interface import Hints, Kernel

Implementation = Literal["mosaic_gpu", "xla"]


@dataclasses.dataclass(frozen=True)
class StaticHints(Hints):
    """Static facts about a call, in addition to its shapes."""

    implementation: Implementation | None = None  # if given, no other implementation may compute the call


NO_HINTS = StaticHints()


@dataclasses.dataclass(frozen=True)
class Choice:
    """A kernel and its configuration. It holds no arrays, so it can be a static argument of a jitted function."""

    kernel: Kernel
    config: Any  # the kernel's own type
    falls_back: bool = False  # whether XLA computes the call if it is lowered for another platform
    interpret: Any = None  # the `interpret` argument of `plgpu.kernel`; None: for a GPU


@dataclasses.dataclass(frozen=True)
class Refusal:
    """No kernel computes the call."""

    message: str  # the limit, and what was received
    is_told: bool = True  # whether to warn that XLA computes the call

    @property
    def reason(self) -> str:
        """The message without what was received: the same for all calls beyond the same limit."""
        return self.message.partition("; got ")[0]


def choose(call: Any, gpu: Gpu, hints: StaticHints, kernels: tuple[Kernel, ...]) -> Choice | Refusal:
    """The first kernel that supports the call, or the last kernel's reason to refuse it. Uses only shapes, dtypes and
    the presence of options, and reads no array."""
    reason = None
    for kernel in kernels:
        reason = next(kernel.limits(call, gpu, hints), None)
        if reason is None:
            return Choice(kernel, kernel.configure(call, gpu, hints), falls_back=hints.implementation is None)
    return Refusal(reason or "there is no kernel.", is_told=gpu.has_kernels)


def computed_by_kernel[Result](
    launch: Callable[..., Result],  # (choice, *arrays) -> results
    elsewhere: Callable[..., Result],  # (choice, *arrays) -> results, by XLA
    tangents: Callable[..., tuple[Result, Result]],  # (choice, primals, tangents) -> results and their tangents
    *,
    refusal: str | None = None,
    can_be_mapped: bool = True,
) -> Callable[..., Result]:
    """Makes `launch`, a function of a choice and arrays, work with JAX's transformations: `jit`, `vmap`, `grad`, other
    platforms, several devices, and interpret mode. See `by_kernel` for `refusal` and `can_be_mapped`."""

    # Jitted, because otherwise every layer of a model would lower the kernel again, 0.4 s each.
    @functools.partial(jax.jit, static_argnums=0)
    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def run(choice: Choice, *arrays: Any) -> Result:
        kernel = functools.partial(in_mode, choice)
        if choice.interpret is not None:
            return kernel(*arrays)
        by_xla = functools.partial(elsewhere, choice)
        return by_kernel(kernel, by_xla, *arrays, refusal=refusal, can_be_mapped=can_be_mapped)

    def in_mode(choice: Choice, *arrays: Any) -> Result:
        from pallas_kernels.common.interpret import interpret_mode  # imported here, because it imports Mosaic

        with interpret_mode(choice.interpret):
            return launch(choice, *arrays)

    run.__wrapped__.defjvp(tangents)  # type: ignore[attr-defined]
    return run


def by_kernel[Result](
    kernel: Callable[..., Result],
    elsewhere: Callable[..., Result],
    *arguments: Any,
    refusal: str | None = None,
    can_be_mapped: bool = True,
) -> Result:
    """`kernel(*arguments)` if lowered for CUDA, `elsewhere(*arguments)` if lowered for another platform.

    If XLA partitions the program over devices, `elsewhere` computes it, or with a `refusal` the lowering raises
    `NotImplementedError`. Inside `jax.shard_map`, with or without check_vma, each device runs the kernel on its own
    part. Under `jax.vmap`, `elsewhere` computes it if the kernel cannot be mapped.
    """
    leaves, tree = jax.tree.flatten(arguments)
    # Pallas does not accept types that vary over a mesh axis, so the kernel gets types without this property.
    varying = frozenset[Any]().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    # Traced here only, because tracing it again when it is lowered takes 0.2 s.
    of_leaves = jax.make_jaxpr(lambda *leaves: kernel(*jax.tree.unflatten(tree, leaves)), return_shape=True)
    traced, results = of_leaves(*types)
    outs = _by_kernel.bind(
        *leaves,
        kernel=jaxpr_as_fun(traced),
        elsewhere=lambda *leaves: jax.tree.leaves(elsewhere(*jax.tree.unflatten(tree, leaves))),
        refusal=refusal,
        can_be_mapped=can_be_mapped,
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


def _batch(
    arrays: Any,
    axes: Any,
    *,
    kernel: Callable,
    elsewhere: Callable,
    refusal: str | None,
    can_be_mapped: bool,
    **_: Any,
) -> tuple:
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    functions = kernel if can_be_mapped else elsewhere, elsewhere
    mapped = [jax.vmap(function, in_axes=tuple(axes), axis_size=size) for function in functions]
    outs = by_kernel(*mapped, *arrays, refusal=refusal, can_be_mapped=can_be_mapped)
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
