"""Refuses the kernels where XLA would partition them: it would silently gather the whole cache on each device."""

import math
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

MESSAGE = (
    "the Mosaic GPU kernels got arrays on several devices outside of jax.shard_map. XLA cannot partition a kernel: it "
    "would gather the whole cache on each device. Call paged_attention inside jax.shard_map over the KV heads, with "
    'check_vma=False, or pass implementation="xla", which XLA partitions.'
)


def refuse[T](arrays: T) -> T:
    """The same arrays. Where XLA is to partition what uses them, raises `NotImplementedError`.

    On an explicit mesh at once, elsewhere when the computation is lowered: types of arrays on an auto mesh do not say
    where these are.
    """
    if any(axis is not None for x in jax.tree.leaves(arrays) for axis in jax.typeof(x).sharding.spec):
        raise NotImplementedError(MESSAGE)
    return jax.tree.map(_check.bind, arrays)


def _lower(ctx: mlir.LoweringRuleContext, x: Any) -> list[Any]:
    if _devices_to_partition_over(ctx.module_context.axis_context) > 1:
        raise NotImplementedError(MESSAGE)
    return [x]


def _devices_to_partition_over(context: Any) -> int:
    mesh = getattr(context, "mesh", None)
    if mesh is None:  # outside of shard_map
        return getattr(context, "num_devices", 1)
    return math.prod(size for axis, size in mesh.shape.items() if axis not in context.manual_axes)


_check = Primitive("refuse_several_devices")  # the identity, and no operation once it is lowered
_check.def_abstract_eval(lambda x: x)
batching.defvectorized(_check)
mlir.register_lowering(_check, _lower)
