"""What the kernel for latents takes, and in how many partitions."""

import dataclasses
from typing import Any

import jax.numpy as jnp

TILE = 64  # tokens
ROWS = 64  # of a program: heads of one query token
REST = 64  # columns of a latent behind its values: as many as a tile has tokens, for the weights take their place


@dataclasses.dataclass(frozen=True)
class Config:
    num_partitions: int  # programs for each sequence and 64 rows


def takes(
    *,
    head_dim: int,
    value_dim: int,
    group: int,
    block_size: int,
    q_dtype: Any,
    cache_dtype: Any,
    compute_capability: float,
) -> bool:
    """Whether this kernel takes a latent without other options than a scale, of `group` heads."""
    return (
        compute_capability == 9.0
        and q_dtype in (jnp.bfloat16, jnp.float16)
        and cache_dtype == q_dtype
        and group % ROWS == 0
        and value_dim in (128, 256, 384, 512)
        and head_dim == value_dim + REST
        and (block_size in (8, 16, 32) or block_size % TILE == 0)
    )


def default_config(*, num_rows: int, capacity: int, num_sms: int, num_partitions: int | None = None) -> Config:
    """`num_rows`: of all query tokens; `capacity`: tokens that a table row can hold."""
    if num_partitions is None:
        num_partitions = max(1, min(num_sms * ROWS // num_rows, capacity // (2 * TILE)))
    return Config(min(num_partitions, max(1, -(-capacity // TILE))))  # more would have no tile
