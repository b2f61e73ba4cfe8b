"""Hardware properties reported by JAX. No other file queries them."""

import dataclasses
import functools
import importlib.metadata
import re
from pathlib import Path

import jax

from pallas_kernels.common.sizes import LEAST_COMPUTE_CAPABILITY


@dataclasses.dataclass(frozen=True)
class Gpu:
    num_sms: int
    compute_capability: float
    name: str = "a GPU"
    broken_ptxas: str | None = None  # version of a ptxas that miscompiles kernels, if JAX uses one

    @property
    def has_kernels(self) -> bool:
        return self.compute_capability >= LEAST_COMPUTE_CAPABILITY


# GPUs by name, for questions about a GPU that this machine lacks.
GPUS = {
    "A100": Gpu(108, 8.0, name="A100"),
    "L4": Gpu(58, 8.9, name="L4"),
    "H100": Gpu(132, 9.0, name="H100"),
    "H200": Gpu(132, 9.0, name="H200"),
    "B200": Gpu(148, 10.0, name="B200"),
}


def named(name: str) -> Gpu:
    """Raises `ValueError` for a GPU that is not in the table."""
    if name not in GPUS:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, or None for JAX's default device; got gpu={name!r}.")
    return GPUS[name]


def device() -> jax.Device:
    """JAX's default device in this process."""
    return jax.local_devices()[0]  # the first of jax.devices() may belong to another process


def is_gpu() -> bool:
    """Whether the default device is a GPU."""
    return device().platform == "gpu"


def kind() -> str:
    """The name of the default device."""
    return device().device_kind


def memory() -> tuple[int, int] | None:
    """Bytes in use on the default device, and the bytes that JAX may use; None if unknown.

    Inside `jax.default_device(...)` the default device is that device.
    """
    chosen = jax.config.jax_default_device
    stats = (chosen if isinstance(chosen, jax.Device) else device()).memory_stats() or {}
    return (stats["bytes_in_use"], stats["bytes_limit"]) if "bytes_limit" in stats else None


def gpu() -> Gpu:
    """The default device, if it is a GPU. Raises `NotImplementedError` if not."""
    its = device()
    if not is_gpu():
        raise NotImplementedError(f"the Mosaic GPU kernels need an NVIDIA GPU; got device.platform={its.platform!r}.")
    return Gpu(
        num_sms=int(its.core_count),
        compute_capability=float(its.compute_capability),
        name=its.device_kind,
        broken_ptxas=broken_ptxas(),
    )


def driver() -> str:
    """The version of NVIDIA's driver; empty if unknown."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found[0] if found else ""


@functools.cache  # every call of attention needs it
def broken_ptxas() -> str | None:
    """The version of `nvidia-cuda-nvcc-cu12` that JAX compiles with, if it miscompiles causal masks.

    CUDA 12.8.0 to 12.9.0 do. JAX's own `attention_mgpu` refuses them too.
    """
    version = version_beside("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")
    return version if version and (12, 8) <= numbers_of(version) < (12, 9, 86) else None


def old_nccl() -> tuple[str, str] | None:
    """The pip package of NCCL and its version, if sums over GPUs fail with it: XLA's own in jax 0.12 need 2.29."""
    if jax.__version_info__ < (0, 12):
        return None
    for cuda in (12, 13):
        version = version_beside(f"jax-cuda{cuda}-plugin", package := f"nvidia-nccl-cu{cuda}")
        if version and numbers_of(version) < (2, 29):
            return package, version
    return None


def version_beside(plugin: str, package: str) -> str | None:
    """The version of a pip package that JAX's plugin uses, if both are installed."""
    try:
        importlib.metadata.version(plugin)
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers_of(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:3]))
