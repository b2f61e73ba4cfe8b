"""Which kernel computes a call on this machine: what `choose` says, if the kernels are right here.

The kernels are known to be right on Hopper. On another kind of GPU a self-test compares them with the
reference before they compute a call by default: at the first call outside of a trace, or when an `Engine` is made. Its
result is kept in the user's cache folder, for a GPU, its driver, and the versions of JAX and jaxpaged. A call that is
traced before computes with the kernels, and a warning names the self-test. With JAXPAGED_SELFTEST=0 in the environment
none runs, and the kernels compute.
"""

import dataclasses
import os
import re
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged import _device
from jaxpaged._attention import kernel_cases
from jaxpaged._attention.call import Call, check_call
from jaxpaged._attention.choose import Choice, Refusal, StaticHints, choose
from jaxpaged._attention.launch import Results, launch
from jaxpaged._device import Gpu
from jaxpaged._version import __version__

VARIABLE = "JAXPAGED_SELFTEST"
CONFIRMED = (9.0,)  # compute capabilities that need no self-test
# Both kernels, each with every option and with a cache that is widened.
QUICK = (
    "window, soft cap, ALiBi, sinks",
    "int8, a scale a token and head",
    "prompts: window, soft cap, ALiBi, sinks",
    "prompts: int8, a scale a token and head",
)
# Whose frames a warning passes over, up to the user's line.
LIBRARIES = tuple(f"{Path(file).parent}{os.sep}" for file in (jax.__file__, _device.__file__))

_lock = threading.Lock()
_kept = dict[Gpu, str]()  # what this process knows of a GPU: what is wrong with the kernels, empty if nothing is
_warned = set[str]()  # what has been warned of: once a process


def decide(call: Call, hints: StaticHints, gpu: Gpu | None = None, *, computes: bool = False) -> Choice | Refusal:
    """How the kernels compute the call on a GPU, by default JAX's default device; a refusal if XLA does.

    `computes`: the call is computed or traced now, which is when the self-test may run. Raises `NotImplementedError` if
    the kernels were named and none takes it.
    """
    if hints.implementation == "xla":
        return Refusal('the call names implementation="xla".', is_told=False)
    try:
        gpu = gpu or _device.gpu()
    except NotImplementedError as no_gpu:
        choice: Choice | Refusal = Refusal(str(no_gpu), is_told=False)
    else:
        if hints.implementation is None:
            fault = kept_fault(gpu)
            if fault is None and computes:
                fault = find_fault(gpu, in_trace=_in_trace(call))
            gpu = dataclasses.replace(gpu, fault=fault or "")
        choice = choose(call, gpu, hints)
    if hints.implementation == "mosaic_gpu" and isinstance(choice, Refusal):
        raise NotImplementedError(choice.message)
    return choice


def warn_once(message: str, reason: str | None = None) -> None:
    """Warns the user's line, once a process for each reason."""
    if (reason or message) not in _warned:
        _warned.add(reason or message)
        warnings.warn(message, skip_file_prefixes=LIBRARIES)


def check_new_gpu() -> None:
    """The self-test, if JAX's default device is of a kind that needs one. Outside of a trace."""
    if _device.is_gpu():
        find_fault(_device.gpu(), in_trace=False)


def find_fault(gpu: Gpu, *, in_trace: bool, test: Callable[[Gpu], str] | None = None) -> str:
    """What is wrong with the kernels on this kind of GPU, empty if nothing is: as it was kept, or as `test` finds it
    now, by default the self-test. Inside a trace a kind that has not been tested passes, with a warning."""
    with _lock:
        fault = kept_fault(gpu)
        if fault is None and in_trace:
            warn_once(
                f"jaxpaged's kernels compute on {gpu.name}, a kind of GPU on which they have not been tested. Run "
                "`python -m jaxpaged.selftest` once, or call jaxpaged.paged_attention outside of jax.jit. "
                f"{VARIABLE}=0 in the environment: no test, no warning."
            )
            fault = ""
        elif fault is None:
            fault = (test or quick_test)(gpu)
            keep_fault(gpu, fault)
    return fault


def kept_fault(gpu: Gpu) -> str | None:
    """What a self-test found on this kind of GPU; None: it has not run. Empty too where none is needed."""
    needs_none = gpu.compute_capability in CONFIRMED or not gpu.has_kernels or gpu.broken_ptxas is not None
    if needs_none or os.environ.get(VARIABLE) == "0":
        return ""
    if gpu not in _kept:
        try:
            _kept[gpu] = _file(gpu).read_text()
        except OSError:
            return None
    return _kept[gpu]


def keep_fault(gpu: Gpu, fault: str) -> None:
    """For this process, and in the cache folder if that can be written."""
    _kept[gpu] = fault
    if "RESOURCE_EXHAUSTED" in fault:  # says nothing about the GPU
        return
    file = _file(gpu)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(fault)
    except OSError:
        pass


def _file(gpu: Gpu) -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = f"{gpu.name} driver {_device.driver()} jax {jax.__version__} jaxpaged {__version__}"
    return Path(folder, "jaxpaged", "selftest", re.sub(r"[^\w.]+", "-", name))


def quick_test(gpu: Gpu) -> str:
    """The cases of `QUICK`, compiled side by side, in threads that know nothing of the caller's trace and settings."""

    def attend(*arrays: Any, **options: Any) -> Results:
        call = check_call(*arrays, **options)
        choice = choose(call, gpu, StaticHints(implementation="mosaic_gpu"))
        if isinstance(choice, Refusal):
            raise NotImplementedError(choice.message)
        return launch(choice, call, None)

    def fault(name: str) -> str:
        with jax.default_device(_device.device()), jax.debug_nans(False):  # unused slots are NaN
            text, is_right = kernel_cases.check(name, attend)
        return "" if is_right else f"{name}: {text}"

    with ThreadPoolExecutor() as threads:
        return "; ".join(filter(None, threads.map(fault, QUICK)))


def _in_trace(call: Call) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in (jnp.zeros(()), *jax.tree.leaves(call)))
