"""Computes a call: decides on this machine which kernel does, or XLA; in two parts if sequences share blocks."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxpaged import _device
from jaxpaged._allocator.prefix_groups import PrefixGroups
from jaxpaged._attention import xla
from jaxpaged._attention.kernels import KERNELS, Results, launch
from jaxpaged._attention.merge import merge_attention
from jaxpaged._attention.shared_prefix import split
from jaxpaged._by_kernel import Choice, Refusal, StaticHints, choose, computed_by_kernel
from jaxpaged._device import Gpu
from jaxpaged._selftest.verdict import find_fault, warn_once
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


def decide(call: Call, hints: StaticHints, gpu: Gpu | None = None, *, computes: bool = False) -> Choice | Refusal:
    """The kernel for a call on a GPU (default: JAX's default device), or a refusal if XLA computes it.

    `computes` means that the call is computed or traced now. Then the self-test may run, and if a kernel could have
    computed the call, a warning says why XLA does. Raises `NotImplementedError` if `implementation="mosaic_gpu"` and
    all kernels refuse the call.
    """
    if hints.implementation == "xla":
        return Refusal('the call names implementation="xla".', is_told=False)
    try:
        gpu = gpu or _device.gpu()
    except NotImplementedError as no_gpu:
        choice: Choice | Refusal = Refusal(str(no_gpu), is_told=False)
    else:
        choice = choose(call, gpu, hints, KERNELS)
        if isinstance(choice, Choice):
            fault = find_fault(gpu, call if computes else None, by_name=hints.implementation is not None)
            choice = Refusal(fault) if fault else choice
    if isinstance(choice, Refusal) and hints.implementation == "mosaic_gpu":
        raise NotImplementedError(choice.message)
    if isinstance(choice, Refusal) and choice.is_told and computes:
        warn_once(f"XLA computes this call: {choice.message}", choice.reason)
    return choice


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


def check_new_gpu() -> None:
    """Runs the self-test if JAX's default device needs one. Must be called outside of a trace."""
    if _device.is_gpu():
        find_fault(_device.gpu(), ())
