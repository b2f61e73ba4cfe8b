"""What the kernel takes, and how much shared memory it has: pure functions of ints, without Mosaic."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels.common.sizes import LEAST_COMPUTE_CAPABILITY, LEAST_SMEM_PER_SM, smem_per_sm

ROWS = 16  # of a tile
WARPS = 4  # of a warpgroup
FEATURES = 128  # that a warpgroup multiplies in a step, a quarter in each warp
COLUMNS = 256  # of out that it computes in a step, a quarter in each warp
RANKS = (16, 32, 64)
MOST_WARPGROUPS = 2
MOST_STAGES = 16


@dataclasses.dataclass(frozen=True)
class Config:
    parts: tuple[int, ...]  # columns of out in each, one after the other
    num_stages: int  # steps whose operands are in SMEM at a time
    num_warpgroups: int


def limit(dtypes: Sequence[Any], *, rank: int, features: int, parts: tuple[int, ...], compute_capability: float) -> str:
    """What this kernel cannot take, with the limit and the value; empty: it takes the call."""
    if compute_capability < LEAST_COMPUTE_CAPABILITY:
        return f"the kernel of lora needs a GPU of compute capability 8.0 or more; got {compute_capability=}."
    if any(dtype != dtypes[0] or dtype not in (jnp.bfloat16, jnp.float16) for dtype in dtypes):
        names = ", ".join(jnp.dtype(dtype).name for dtype in dtypes)
        return f"the kernel of lora takes x, a and b that are all bfloat16 or all float16; got {names}."
    if rank not in RANKS:
        return f"the kernel of lora takes ranks of 16, 32 and 64; got {rank=}. Fill a smaller one up with zeros."
    if features % (MOST_WARPGROUPS * FEATURES) or math.gcd(*parts) % (COLUMNS // WARPS):
        outputs = sum(parts)
        return (
            f"the kernel of lora takes a multiple of {MOST_WARPGROUPS * FEATURES} features and of {COLUMNS // WARPS} "
            f"outputs; got {features=} and {outputs=}."
        )
    return ""


def default_config(*, rank: int, parts: tuple[int, ...], compute_capability: float) -> Config:
    """Two programs share a SM if it has room for twice the shared memory that every GPU's SM has."""
    smem = max(smem_per_sm(compute_capability) // 2, LEAST_SMEM_PER_SM) - 1024
    num_warpgroups = MOST_WARPGROUPS if rank < RANKS[-1] else 1
    stages = smem // num_warpgroups - WARPS * ROWS * rank * 4
    return Config(parts, min(MOST_STAGES, stages // (stage_rows(rank) * FEATURES * 2)), num_warpgroups)


def stage_rows(rank: int) -> int:
    """Of a warpgroup, of 128 numbers: 16 of X and `rank` of A, or `rank` of B, which are twice as long."""
    return 2 * rank
