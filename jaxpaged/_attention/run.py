"""What a `Choice` says, done: the parts of a call, and what JAX's transformations make of a kernel."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged._allocator.prefix_groups import PrefixGroups
from jaxpaged._attention import xla
from jaxpaged._attention.call import Call
from jaxpaged._attention.choose import Choice, StaticHints
from jaxpaged._attention.decide import decide, warn_once
from jaxpaged._attention.launch import Results, launch
from jaxpaged._attention.merge import merge_attention
from jaxpaged._attention.shared_prefix import split
from jaxpaged._by_kernel import by_kernel
from pallas_kernels.decode import partition_plan
from pallas_kernels.decode.partition_plan import PartitionPlan

PARTITIONED = (
    "the Mosaic GPU kernels got arrays on several devices, and their types do not say what lies where. XLA cannot "
    "partition a kernel: it would gather the whole cache on each device. Put the arrays on an explicit mesh, which is "
    "what jax.make_mesh makes by default; or call paged_attention inside jax.shard_map over the KV heads, or inside "
    'jax.sharding.explicit_axes; or pass implementation="xla", which XLA partitions.'
)


def attend(call: Call, hints: StaticHints, plan: PartitionPlan | None, prefix_groups: PrefixGroups | None) -> Results:
    """The call by a kernel or by XLA; blocks that sequences share are read once."""
    parts = None if prefix_groups is None else split(call, prefix_groups)
    if parts is None:
        return _attend(call, hints, plan)
    shared, rest, takes_part = parts
    out, lse = _attend(shared, hints, plan)
    lse = jnp.where(takes_part[..., None], lse.reshape(call.q.shape[:-1]), -jnp.inf)
    return merge_attention(out.reshape(call.out_shape), lse, *_attend(rest, hints, plan))


def _attend(call: Call, hints: StaticHints, plan: PartitionPlan | None) -> Results:
    choice = decide(call, hints, computes=True)
    if isinstance(choice, Choice):
        return run(choice, call, plan)
    if choice.is_told:
        warn_once(f"XLA computes this call: {choice.message}", choice.reason)
    return xla.attend(call, num_partitions=hints.num_partitions)


def run(choice: Choice, call: Call, plan: PartitionPlan | None = None) -> Results:
    """The call by its kernel. `plan`: the caller's; without it one is made for a choice that follows one."""
    if choice.at_once is None:
        plan = None
    elif plan is None:
        window, q_len = call.options.sliding_window, call.q.shape[1]
        plan = partition_plan.default(call.lengths, window, q_len=q_len, at_once=choice.at_once)
    return _run(choice, call, plan)


# Jitted by itself: otherwise every layer of a model lowers the kernel again, 0.4 s each.
@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(choice: Choice, call: Call, plan: PartitionPlan | None) -> Results:
    compute: Any = functools.partial(_on_platform, choice)
    if plan is not None or choice.mapped is not None:
        compute = jax.custom_batching.custom_vmap(compute)
        compute.def_vmap(functools.partial(_mapped, choice))
    elif choice.kernel.endswith("prefill") and choice.interpret is None:
        # One program is on each SM already, so that mapped calls follow one another.
        compute = jax.custom_batching.sequential_vmap(compute)
    return compute(call, plan)


@_run.__wrapped__.defjvp  # type: ignore[attr-defined]
def _run_jvp(choice: Choice, primals: tuple, tangents: tuple) -> tuple:
    # The kernels have no backward pass: XLA computes it, from their results.
    results = _run(choice, *primals)
    return results, xla.tangents_of(primals[0], tangents[0], results)


def _mapped(choice: Choice, axis_size: int, is_mapped: Any, call: Call, plan: PartitionPlan | None) -> Any:
    """Mapped calls. With plans and partitions they would wait for each other, and copy a mapped pool: see
    `pallas_kernels.common.launch`."""
    axes = jax.tree.map(lambda its: 0 if its else None, is_mapped[0])
    mapped = dataclasses.replace(choice.mapped or choice, falls_back=choice.falls_back, interpret=choice.interpret)
    return jax.vmap(lambda call: _run(mapped, call, None), (axes,), axis_size=axis_size)(call), (True, True)


def _on_platform(choice: Choice, call: Call, plan: PartitionPlan | None) -> Results:
    """By the kernel; lowered for another platform than CUDA by XLA, if the choice falls back."""
    if choice.interpret is not None:
        return launch(choice, call, plan)
    elsewhere = _by_xla if choice.falls_back else _refuse
    return by_kernel(functools.partial(launch, choice), elsewhere, call, plan, refusal=PARTITIONED)


def _by_xla(call: Call, _: PartitionPlan | None) -> Results:
    return xla.attend(call, num_partitions=1)


def _refuse(*_: Any) -> Results:
    raise NotImplementedError(
        'implementation="mosaic_gpu" is for NVIDIA GPUs, and this call is lowered for another platform. '
        'Leave it out, or pass "xla".'
    )
