"""Checks shared by all benchmarks: a call on poisoned memory, and the worst error of a row.

A kernel that leaves part of its output unwritten returns the buffer's old contents. These are often the right answer,
from the implementation that was checked just before. `poisoned` fills the memory with NaN before the call.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MOST_ERROR = 2e-2  # bfloat16: one rounding of p and one of the output, 2^-9 each of the largest number or less
POISON = 255  # as every byte: NaN in each float dtype, -1 in each integer dtype
LARGEST, SMALLEST = 2**30, 256  # bytes of a buffer of poison; XLA's allocator deals in multiples of the smallest


def poisoned(call: Callable[..., Any], *args: Any) -> Any:
    """`call(*args)`, with poison in all memory that its outputs and temporaries can be allocated in."""
    for device in jax.local_devices():
        poison_free_memory(device)
    return call(*args)


def poison_free_memory(device: jax.Device) -> None:
    """Fills all free memory of the device's allocator, down to the smallest pieces, and frees it again.

    This needs 0.1 s for 64 GB on an H100. Memory that the allocator gets from the GPU later holds no results of this
    process. On a CPU nothing is poisoned: its allocator does not report free memory, and XLA's CPU programs write their
    whole output.
    """
    if device.platform == "cpu":
        return
    size, held = LARGEST, []
    while size >= SMALLEST:
        if free_bytes(device) >= size:
            with jax.default_device(device):
                held.append(_poison(size=size))
        else:
            size //= 2
    jax.block_until_ready(held)
    for buffer in held:
        buffer.delete()


def free_bytes(device: jax.Device) -> int:
    """The size of the largest free piece of the device's allocator."""
    stats = device.memory_stats() or {}
    if "largest_free_block_bytes" not in stats:
        raise RuntimeError(
            f"{device} does not say which memory is free, so a check could find the answer of another call there; "
            "use JAX's default allocator (unset XLA_PYTHON_CLIENT_ALLOCATOR)."
        )
    return int(stats["largest_free_block_bytes"])


@functools.partial(jax.jit, static_argnames="size")
def _poison(*, size: int) -> jax.Array:
    return jnp.full(size, POISON, jnp.uint8)


def worst_error(name: str, out: Any, expected: Any, *, most: float = MOST_ERROR) -> float:
    """The worst error of a row, along the last axis, over the row's largest number; raises if it is too large."""
    out, expected = (np.asarray(x, np.float32) for x in (out, expected))
    with np.errstate(invalid="ignore"):  # a row of zeros
        errors = np.abs(out - expected).max(axis=-1) / np.abs(expected).max(axis=-1)
    worst = float(errors.max())  # NaN if any error is
    if not worst < most:
        raise AssertionError(f"wrong result at {name}: {worst} of the largest number of a row, at most {most} is right")
    return worst


def require(holds: Any, message: str) -> None:
    """Raises `AssertionError` unless `holds`, under `python -O` too."""
    if not holds:
        raise AssertionError(message)
