"""What JAX says about the hardware. No other file asks."""

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
    broken_ptxas: str | None = None  # the version of the one that JAX compiles with here, if it miscompiles

    @property
    def has_kernels(self) -> bool:
        return self.compute_capability >= LEAST_COMPUTE_CAPABILITY

    @property
    def is_hopper(self) -> bool:
        return self.compute_capability == 9.0


# For questions about a GPU that is not there.
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
    """The one that JAX uses by default in this process."""
    return jax.local_devices()[0]  # the first of jax.devices() may be another process's


def is_gpu() -> bool:
    """Whether JAX uses a GPU by default."""
    return device().platform == "gpu"


def kind() -> str:
    """The name of the device that JAX uses by default."""
    return device().device_kind


def memory() -> tuple[int, int] | None:
    """Bytes in use on the device that JAX uses by default, and how many JAX may use; None if that is unknown."""
    stats = device().memory_stats() or {}
    return (stats["bytes_in_use"], stats["bytes_limit"]) if "bytes_limit" in stats else None


def gpu() -> Gpu:
    """The GPU that JAX uses by default in this process. Raises `NotImplementedError` if it uses none."""
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
    """The version of NVIDIA's driver; empty if the system does not say."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found[0] if found else ""


@functools.cache  # each call of attention asks
def broken_ptxas() -> str | None:
    """The version of the `nvidia-cuda-nvcc-cu12` that JAX compiles with, if it miscompiles causal masks, as CUDA 12.8.0
    to 12.9.0 do. JAX's own `attention_mgpu` refuses them too."""
    try:
        importlib.metadata.version("jax-cuda12-plugin")
        version = importlib.metadata.version("nvidia-cuda-nvcc-cu12")
    except importlib.metadata.PackageNotFoundError:
        return None
    return version if (12, 8) <= tuple(map(int, version.split(".")[:3])) < (12, 9, 86) else None
