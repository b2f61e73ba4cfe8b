"""What the portable prefill kernel takes, and how a call is cut up.

Pure functions of ints: nothing here is traced, and all of it is tested on a CPU.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.common.sizes import LEAST_COMPUTE_CAPABILITY, round_up, smem_per_sm
from pallas_kernels.prefill.config import Cut, heads_and_tokens

COLUMNS = 64  # of a head, that one product takes
OVERHEAD = 2 * 1024  # bytes of SMEM of a program: 1024 that CUDA takes, and barriers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Cut):
    rows: int  # of an item
    num_stages: int  # tiles of K, and of V, in SMEM at a time


def limit(*, head_dim: int, block_size: int, q_dtype: Any, cache_dtype: Any, compute_capability: float) -> str | None:
    """What this kernel cannot take, with the limit and the value; None: it takes the call."""
    name = "the portable prefill kernel"
    if compute_capability < LEAST_COMPUTE_CAPABILITY:
        return f"{name} needs compute capability 8.0 (Ampere) or higher; got {compute_capability=}."
    if head_dim % 16 or not 32 <= head_dim <= 256:
        return f"{name} takes a head_dim of 32, 48, ... 256; got {head_dim=}."
    if block_size not in (8, 16, 32, 64, 128, 256):
        return f"{name} takes a block_size of 8, 16, ... 256; got {block_size=}."
    if q_dtype not in (jnp.bfloat16, jnp.float16) or cache_dtype != q_dtype:
        return (
            f"{name} takes q of bfloat16 or float16, and a cache of the same; "
            f"got q.dtype={jnp.dtype(q_dtype)!s}, k_cache.dtype={jnp.dtype(cache_dtype)!s}."
        )
    return None


def default_config(
    *,
    group: int,
    head_dim: int,
    compute_capability: float,
    num_parts: int = 1,
    causal: bool = True,
    itemsize: int = 2,  # of the cache's numbers, in bytes
) -> Config:
    rows, tile_tokens, num_stages = 64, 64, 1
    width = round_up(head_dim, COLUMNS)
    if width <= 128 and program_smem(compute_capability, 2) >= smem_bytes(128, 64, 1, width):
        rows = 128
    resident = 2 if program_smem(compute_capability, 2) >= smem_bytes(rows, tile_tokens, 1, width) else 1
    if program_smem(compute_capability, resident) >= smem_bytes(rows, tile_tokens, 2, width):
        num_stages = 2
    heads, item_tokens = heads_and_tokens(group, rows)
    return Config(
        num_programs=1,  # see `launch`
        rows=rows,
        heads=heads,
        item_tokens=item_tokens,
        tile_tokens=tile_tokens,
        num_stages=num_stages,
        num_parts=num_parts,
        causal=causal,
    )


def program_smem(compute_capability: float, resident: int) -> int:
    """Bytes for the arrays of one of the `resident` programs that share a SM."""
    return smem_per_sm(compute_capability) // resident - OVERHEAD


def smem_bytes(rows: int, tile_tokens: int, num_stages: int, width: int) -> int:
    """Of Q, K and V."""
    return (rows + 2 * num_stages * tile_tokens) * width * 2
