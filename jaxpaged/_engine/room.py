"""GPU memory reserved for arrays that are allocated while slices run."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

GUARD_BYTES = 256 * 1024  # size of a guard array: too large for a gap elsewhere


def keep_room(arrays: Any, count: int, device: Sharding) -> list[jax.Array]:
    """Leaves gaps for `count` copies of each array between guard arrays. The gaps exist while the guards are alive.

    JAX's allocator uses the smallest gap that suffices, so arrays of these sizes never occupy the slice's scratch
    memory. If the scratch memory moves, XLA updates the slice's CUDA graph, which costs as much as a step.
    [host_room_h100] [room_h200]

    Args:
        device: where the guards are.

    Returns:
        The guards.
    """
    places = [
        (jnp.zeros(x.shape, x.dtype, device=x.sharding), jnp.zeros(GUARD_BYTES, jnp.uint8, device=device))
        for _ in range(count)
        for x in jax.tree.leaves(arrays)
    ]
    jax.block_until_ready(places)
    return [guard for _, guard in places]
