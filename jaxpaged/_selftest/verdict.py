"""The verdict on the kernels on a GPU. A plain call imports no other file of the self-test.

The kernels are known to be right on Hopper. On any other kind of GPU a self-test compares them with the reference
before they are used by default: at the first call outside of a trace, or when an `Engine` is made. Its result is kept
in the user's cache folder, by GPU, driver, and versions of JAX and jaxpaged. A call that is traced before the test uses
the kernels, with a warning that names the self-test. With JAXPAGED_SELFTEST=0 in the environment no test runs, and the
kernels are used.
"""

import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged import _device
from jaxpaged._device import Gpu

VARIABLE = "JAXPAGED_SELFTEST"
CONFIRMED = (9.0,)  # compute capabilities that need no self-test
# Warnings skip the frames of these folders, so that they name the user's line.
LIBRARIES = tuple(f"{os.path.dirname(file)}{os.sep}" for file in (jax.__file__, _device.__file__))

_warned = dict[str, str]()  # messages by reason; each is given once per process


def find_fault(gpu: Gpu, arrays: Any, *, by_name: bool = False) -> str:
    """Why the kernels must not compute a call on this GPU; empty if they may, or if there is no verdict yet.

    `arrays` are the arguments of a call that is computed or traced now; then the self-test may run. With None it does
    not run. With `by_name`, for a call that names the kernels, the self-test does not count.
    """
    if gpu.broken_ptxas is not None:
        return (
            f"the Mosaic GPU kernels do not run with the ptxas of nvidia-cuda-nvcc-cu12 {gpu.broken_ptxas}, which "
            'miscompiles causal masks. Install a later one: pip install "nvidia-cuda-nvcc-cu12>=12.9.86".'
        )
    fault = "" if by_name else _verdict(gpu, arrays)
    if not fault:
        return ""
    return (
        f"the self-test found the kernels wrong on this kind of GPU, {gpu.name}: {fault}. "
        "`python -m jaxpaged.selftest` tests again."
    )


def _verdict(gpu: Gpu, arrays: Any) -> str:
    needs_none = gpu.compute_capability in CONFIRMED or not gpu.has_kernels
    if needs_none or os.environ.get(VARIABLE) == "0":
        return ""
    from jaxpaged._selftest import kept

    fault = kept.read_fault(gpu)
    if fault is not None or arrays is None:
        return fault or ""
    if any(isinstance(x, jax.core.Tracer) for x in (jnp.zeros(()), *jax.tree.leaves(arrays))):
        warn_once(
            f"jaxpaged uses its kernels on {gpu.name}, a kind of GPU on which they have not been tested. Run "
            "`python -m jaxpaged.selftest` once, or call jaxpaged.paged_attention outside of jax.jit. "
            f"{VARIABLE}=0 in the environment: no test, no warning."
        )
        return ""
    return kept.test_once(gpu)


def warn_once(message: str, reason: str | None = None) -> None:
    """Warns at the user's line, once per process for each reason."""
    if (reason or message) not in _warned:
        _warned[reason or message] = message
        warnings.warn(message, skip_file_prefixes=LIBRARIES)
