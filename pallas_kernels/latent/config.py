"""What the kernel for latents takes, and in how many partitions."""

import dataclasses

from pallas_kernels.common.shapes import Shapes
from pallas_kernels.common.sizes import DTYPES_16BIT, divides_tiles

TILE = 64  # tokens
HEADS = 64  # of a program: heads of one query token
REST = 64  # columns of a latent behind its values: as many as a tile has tokens, for the weights take their place


@dataclasses.dataclass(frozen=True)
class Config:
    num_partitions: int  # programs for each sequence and 64 rows


def takes(shapes: Shapes, compute_capability: float) -> bool:
    """Whether this kernel takes the call, if it has no other option than a scale."""
    return (
        compute_capability == 9.0
        and shapes.is_latent
        and shapes.q_dtype in DTYPES_16BIT
        and shapes.cache_dtype == shapes.q_dtype
        and shapes.q_len * shapes.group % HEADS == 0
        and shapes.value_dim in (128, 256, 384, 512)
        and shapes.head_dim == shapes.value_dim + REST
        and divides_tiles(shapes.block_size)
    )


def default_config(*, num_rows: int, capacity: int, num_sms: int, num_partitions: int | None = None) -> Config:
    """`num_rows`: of all query tokens; `capacity`: tokens that a table row can hold."""
    if num_partitions is None:
        num_partitions = max(1, min(num_sms * HEADS // num_rows, capacity // (2 * TILE)))
    return Config(min(num_partitions, max(1, -(-capacity // TILE))))  # more would have no tile
