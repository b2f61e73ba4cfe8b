"""Arithmetic of rows, tiles and columns, shared by kernels, configurations and plans.

Does not import Mosaic, which needs 0.3 s: configurations and plans are imported everywhere.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LEAST_COMPUTE_CAPABILITY = 8.0  # Ampere, the first with cp.async
COLUMNS = 64  # columns of a head per step: the smallest M of a product, and the unit of a head's width in SMEM
DTYPES_16BIT = (jnp.bfloat16, jnp.float16)
DTYPES_8BIT = (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)


# Bytes of SMEM per SM by compute capability (CUDA programming guide, table of technical specifications). A program can
# use 1024 less. 8.6, 8.9 and 12.x, which are not listed, have the least.
SMEM_PER_SM = {8.0: 164 * 1024, 8.7: 164 * 1024, 9.0: 228 * 1024, 10.0: 228 * 1024, 10.3: 228 * 1024, 11.0: 228 * 1024}
LEAST_SMEM_PER_SM = 100 * 1024


def smem_per_sm(compute_capability: float) -> int:
    return SMEM_PER_SM.get(compute_capability, LEAST_SMEM_PER_SM)


def is_8bit(cache_dtype: Any) -> bool:
    return cache_dtype in DTYPES_8BIT


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def divides_tiles(block_size: int) -> bool:
    """Whether a tile of 64 tokens is a whole number of blocks, or a block a whole number of tiles."""
    return block_size in (8, 16, 32) or block_size % 64 == 0


def div(x: jax.Array, y: int) -> jax.Array:
    """int32 division, rounded towards zero as in `rem`."""
    return lax.div(x, jnp.int32(y))


def rem(x: jax.Array, y: int) -> jax.Array:
    return lax.rem(x, jnp.int32(y))


def ceil_div(x: jax.Array, y: int | jax.Array) -> jax.Array:
    return lax.div(x + jnp.int32(y - 1), jnp.int32(y))


def first_visible(length: jax.Array, window: jax.Array | None, q_len: int | jax.Array) -> jax.Array:
    """The first position that any query of a sequence sees, int32 []."""
    if window is None:
        return jnp.zeros_like(length)
    return jnp.maximum(length - jnp.int32(q_len - 1) - window, 0)


def tile_range(
    length: jax.Array, window: jax.Array | None, q_len: int | jax.Array, tile_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """The range of tiles with a token that some query sees: the first, and one past the last."""
    return div(first_visible(length, window, q_len), tile_tokens), ceil_div(length, tile_tokens)


def count_tiles(first: jax.Array, end: jax.Array, num_partitions: int | jax.Array, partition: jax.Array) -> jax.Array:
    """Number of tiles of a partition, which has every `num_partitions`-th tile from `first + partition` on.

    The tiles depend only on the sequence's true length, so neither the width of the table nor other sequences of the
    batch change the order of the sums. Partitions alternate tile by tile so that a partition's first tile does not
    depend on the length.
    """
    return ceil_div(jnp.maximum(end - first - partition, 0), num_partitions)


def zero_unless(condition: jax.Array, x: jax.Array) -> jax.Array:
    """x, or zero where the condition is false, even where x is NaN (a product with zero would stay NaN)."""
    return jnp.where(condition, x, jnp.zeros_like(x))
