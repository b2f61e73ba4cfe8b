"""Verdicts on kinds of GPUs, kept in this process and in the user's cache folder, and the test that makes one."""

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxpaged import _device
from jaxpaged._attention.call import check_call
from jaxpaged._attention.kernels import KERNELS, Results, launch
from jaxpaged._by_kernel import Refusal, StaticHints, choose
from jaxpaged._device import Gpu
from jaxpaged._selftest import cases
from jaxpaged._version import __version__

# Decode and prompts, each with every option and with an 8-bit cache.
QUICK = (
    "window, soft cap, ALiBi, sinks",
    "int8, a scale a token and head",
    "prompts: window, soft cap, ALiBi, sinks",
    "prompts: int8, a scale a token and head",
)

_lock = threading.Lock()
_kept = dict[Gpu, str]()  # faults; empty: the kernels are right


def test_once(gpu: Gpu) -> str:
    """The kernels' fault on this kind of GPU, from the cache or from a test now; empty if they are right."""
    with _lock:
        fault = read_fault(gpu)
        if fault is None:
            fault = quick_test(gpu)
            keep_fault(gpu, fault)
    return fault


def read_fault(gpu: Gpu) -> str | None:
    """The kept fault; empty if the kernels are right, None if the test has not run on this kind of GPU."""
    if gpu not in _kept:
        try:
            _kept[gpu] = _file(gpu).read_text()
        except OSError:
            return None
    return _kept[gpu]


def keep_fault(gpu: Gpu, fault: str) -> None:
    """Keeps a fault in this process, and in the cache folder if that is writable."""
    _kept[gpu] = fault
    if "RESOURCE_EXHAUSTED" in fault:  # not a property of the GPU
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
    """Runs the cases of `QUICK` in parallel, in threads without the caller's trace and settings. Returns the faults."""

    def attend(*arrays: Any, **options: Any) -> Results:
        call = check_call(*arrays, **options)
        choice = choose(call, gpu, StaticHints(implementation="mosaic_gpu"), KERNELS)
        if isinstance(choice, Refusal):
            raise NotImplementedError(choice.message)
        return launch(choice, call)

    def fault(name: str) -> str:
        with jax.default_device(_device.device()), jax.debug_nans(False):  # unused slots are NaN
            text, is_right = cases.check(name, attend)
        return "" if is_right else f"{name}: {text}"

    with ThreadPoolExecutor() as threads:
        return "; ".join(filter(None, threads.map(fault, QUICK)))
