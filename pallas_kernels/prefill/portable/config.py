"""The limits of the portable prefill kernel, and how a call is divided.

All functions are pure functions of ints, are not traced, and are tested on a CPU.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from pallas_kernels.common.interface import Call, Gpu, Hints, Kernel, Shapes, is_hopper
from pallas_kernels.common.sizes import COLUMNS, LEAST_COMPUTE_CAPABILITY, round_up, smem_per_sm
from pallas_kernels.prefill.config import Cut, heads_and_tokens, in_parts, limits_of_prompts

OVERHEAD = 1024  # bytes of SMEM that CUDA uses per program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Cut):
    rows: int  # rows of an item
    num_stages: int  # tiles of K, and of V, in SMEM


def limits(call: Call, gpu: Gpu, hints: Hints) -> Iterator[str]:
    """Reasons to refuse a call."""
    least = 8.9 if call.k_cache.dtype == jnp.float8_e4m3fn else LEAST_COMPUTE_CAPABILITY
    if is_hopper(gpu) or gpu.compute_capability < least:  # Hopper has a kernel of its own
        yield f"the prefill kernel for every GPU needs compute capability {least} or higher, and not Hopper."
    yield from limits_of_prompts(call, hints)


def configure(call: Call, gpu: Gpu, hints: Hints) -> Config:
    config = default_config(call.shapes(), compute_capability=gpu.compute_capability)
    return in_parts(config, call, gpu, hints)


def launch(call: Call, config: Config) -> Any:
    from pallas_kernels.prefill.portable import kernel

    return kernel.launch(call, config)


KERNEL = Kernel("portable_prefill", "the prefill kernel for every GPU", limits, configure, launch)


def default_config(shapes: Shapes, *, compute_capability: float) -> Config:
    width = round_up(shapes.head_dim, COLUMNS)

    def fits(resident: int, rows: int, tile_tokens: int, num_stages: int = 1) -> bool:
        needed = smem_bytes(rows, tile_tokens, num_stages, width=width, itemsize=shapes.itemsize)
        return needed <= program_smem(compute_capability, resident)

    # With more rows a wider O does not fit into registers. Fewer rows are slower, even with wider tiles.
    # [portable_tiles_h100 of benchmarks/results/decisions/]
    rows = 128 if width <= 128 else 64
    resident = 2 if fits(2, rows, 32) else 1
    tile_tokens = 64 if fits(resident, rows, 64) else 32
    num_stages = 2 if fits(resident, rows, tile_tokens, 2) else 1
    heads, item_tokens = heads_and_tokens(shapes.group, rows)
    return Config(
        num_programs=1,  # see `kernel.launch`
        rows=rows,
        heads=heads,
        item_tokens=item_tokens,
        tile_tokens=tile_tokens,
        num_stages=num_stages,
    )


def program_smem(compute_capability: float, resident: int) -> int:
    """Bytes of SMEM for the arrays of a program, if `resident` programs share an SM."""
    return smem_per_sm(compute_capability) // resident - OVERHEAD


def smem_bytes(rows: int, tile_tokens: int, num_stages: int, *, width: int, itemsize: int) -> int:
    """Bytes of Q, K and V, and for an 8-bit cache of a widened tile and the per-token scales."""
    size = (2 * rows + 2 * num_stages * tile_tokens * itemsize) * width
    return size + (2 * tile_tokens * width + 2 * num_stages * round_up(4 * tile_tokens, 1024) if itemsize == 1 else 0)
