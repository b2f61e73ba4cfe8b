"""Threefry, a counter-based random number generator."""

import jax
import numpy as np

Words = tuple[jax.Array, jax.Array]  # uint32, each half of 64 bits


def threefry(key: Words, block: Words) -> Words:
    """Threefry-2x32 with 20 rounds. JAX's own is a loop on a CPU, and on a GPU a kernel that XLA cannot fuse.

    References:
        Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
    """
    keys = *key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)
    x, y = block[0] + keys[0], block[1] + keys[1]
    for i in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x = x + y
            y = x ^ (y << np.uint32(distance) | y >> np.uint32(32 - distance))
        x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + np.uint32(i + 1)
    return x, y
