"""Rings of tiles in SMEM, which blocks of K and V are copied into."""

import dataclasses
from typing import Any

WARPS = 4  # that copy, of a warpgroup


@dataclasses.dataclass(frozen=True)
class Ring:
    source: Any  # GMEM [blocks, block_size, kv_heads, head_dim]
    target: Any  # SMEM [stages, tile, width]
    full: Any  # barriers [stages]
    free: Any  # barriers [stages]


def rows_of_copy(block_size: int, tile: int) -> int:
    """Tokens of a cache block in one copy."""
    return min(block_size, tile // WARPS)
