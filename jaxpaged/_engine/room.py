"""Room on a GPU for arrays that come and go while slices run."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

GUARD_BYTES = 256 * 1024  # of an array between two rooms: too large for a gap elsewhere


def keep_room(arrays: Any, count: int, device: Sharding) -> list[jax.Array]:
    """Leaves room for so many of each of these arrays between others, which are returned: the room is there as long as
    they are.

    JAX's allocator takes the least room that suffices, so arrays of these sizes never lie where the slice's scratch
    memory was. If that moves, XLA changes the slice's CUDA graph, and to change it takes as long as a step.
    [host_room_h100] [room_h200]

    Args:
        device: for the arrays between.
    """
    places = [
        (jnp.zeros(x.shape, x.dtype, device=x.sharding), jnp.zeros(GUARD_BYTES, jnp.uint8, device=device))
        for _ in range(count)
        for x in jax.tree.leaves(arrays)
    ]
    jax.block_until_ready(places)
    return [guard for _, guard in places]
