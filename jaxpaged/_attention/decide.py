"""Decides which kernel computes a call on this machine, or that XLA computes it."""

from jaxpaged import _device
from jaxpaged._attention.kernels import KERNELS
from jaxpaged._by_kernel import Choice, Refusal, StaticHints, choose
from jaxpaged._device import Gpu
from jaxpaged._selftest.verdict import find_fault, warn_once
from pallas_kernels.common.interface import Call


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


def check_new_gpu() -> None:
    """Runs the self-test if JAX's default device needs one. Must be called outside of a trace."""
    if _device.is_gpu():
        find_fault(_device.gpu(), ())
