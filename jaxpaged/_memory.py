"""Checks that the GPU has room before a large allocation. XLA waits ten silent seconds before an allocation fails."""

import gc
import time

import jax
import jax.numpy as jnp

from jaxpaged import _device

MORE_MEMORY = (
    "Use fewer blocks (jaxpaged.cache_capacity says how many fit), delete arrays, or let JAX use more of the GPU: the "
    "environment variable XLA_PYTHON_CLIENT_MEM_FRACTION is 0.75 by default and may be 0.95."
)
MOST_WAIT_SECONDS = 2.0  # time for a running computation to release its arrays


def check_memory(num_bytes: int, purpose: str) -> None:
    """Checks that JAX's default device has room for `num_bytes` more. Does nothing under a JAX transformation.

    Raises:
        MemoryError: there is not enough room. The message begins with `purpose`.
    """
    if isinstance(jnp.zeros(()), jax.core.Tracer) or _has_room(num_bytes):
        return
    gc.collect()  # reference cycles may hold arrays
    end = time.monotonic() + MOST_WAIT_SECONDS
    while not _has_room(num_bytes):
        if time.monotonic() > end:
            in_use, limit = (count / 1e9 for count in _device.memory() or (0, 0))
            raise MemoryError(
                f"{purpose}, but {in_use:.1f} of the {limit:.1f} GB that JAX may use on this GPU are in use. "
                f"{MORE_MEMORY}"
            )
        time.sleep(0.05)


def _has_room(num_bytes: int) -> bool:
    memory = _device.memory()
    return memory is None or memory[0] + num_bytes <= memory[1]
