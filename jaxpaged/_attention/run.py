"""Computes a call by a kernel or by XLA, in two parts if sequences share blocks."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxpaged._allocator.prefix_groups import PrefixGroups
from jaxpaged._attention import xla
from jaxpaged._attention.decide import decide
from jaxpaged._attention.kernels import Results, launch
from jaxpaged._attention.merge import merge_attention
from jaxpaged._attention.shared_prefix import split
from jaxpaged._by_kernel import Choice, StaticHints, computed_by_kernel
from pallas_kernels.common import partition_plan
from pallas_kernels.common.interface import Call

PARTITIONED = (
    "the Mosaic GPU kernels got arrays on several devices, but their types carry no sharding (an auto mesh). XLA "
    "cannot partition a kernel: it would gather the whole cache on each device. Put the arrays on an explicit mesh, "
    "the default of jax.make_mesh; or call paged_attention inside jax.shard_map over the KV heads, or inside "
    'jax.sharding.explicit_axes; or pass implementation="xla", which XLA partitions.'
)


def attend(call: Call, hints: StaticHints, prefix_groups: PrefixGroups | None) -> Results:
    parts = None if prefix_groups is None else split(call, prefix_groups)
    if parts is None:
        return _attend(call, hints)
    shared, rest, in_shared = parts
    out, lse = _attend(shared, hints)
    lse = jnp.where(in_shared[..., None], lse.reshape(call.q.shape[:-1]), -jnp.inf)
    return merge_attention(out.reshape(call.out_shape), lse, *_attend(rest, hints))


def _attend(call: Call, hints: StaticHints) -> Results:
    choice = decide(call, hints, computes=True)
    if isinstance(choice, Choice):
        return run(choice, call)
    return xla.attend(dataclasses.replace(call, plan=None), num_partitions=hints.num_partitions)


def run(choice: Choice, call: Call) -> Results:
    """Runs the chosen kernel. If its configuration follows a plan, this is the call's plan or a new one."""
    plan, at_once = call.plan, choice.config.at_once
    if at_once is None:
        plan = None
    elif plan is None:
        window, q_len = call.options.sliding_window, call.q.shape[1]
        plan = partition_plan.default(call.lengths, window, q_len=q_len, at_once=at_once)
    return _run(choice, dataclasses.replace(call, plan=plan))


def _elsewhere(choice: Choice, call: Call) -> Results:
    if choice.falls_back:
        return xla.attend(call, num_partitions=1)
    raise NotImplementedError(
        'implementation="mosaic_gpu" is for NVIDIA GPUs, and this call is lowered for another platform. '
        'Leave it out, or pass "xla".'
    )


def _tangents(choice: Choice, primals: tuple, tangents: tuple) -> Any:
    """The kernels have no backward pass, so XLA computes it from their results."""
    results = _run(choice, *primals)
    return results, xla.tangents_of(primals[0], tangents[0], results)


_run = computed_by_kernel(launch, _elsewhere, _tangents, refusal=PARTITIONED)
