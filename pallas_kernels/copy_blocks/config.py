"""Static configuration of the copy kernel: pure functions of ints that do not import Mosaic."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from pallas_kernels.common.interface import Gpu, Hints, Kernel, is_hopper

MAX_BOX = 256  # numbers along an axis of one copy, the copy engine's limit
ALIGNMENT = 128  # bytes, alignment of the copy engine's addresses in SMEM
TILE_BYTES, SLICE_BYTES = 16 * 1024, 4 * 1024  # at most
PROGRAMS_OF_SM = 4  # so that copies overlap
SMEM_BYTES = 54 * 1024  # ring of one program; four programs share an SM
SLICE_PROGRAMS = 128  # the buffer grows with it, to at most 512 KiB a pair
MAX_BARRIERS = 32  # in one array of barriers


@dataclasses.dataclass(frozen=True)
class Config:
    width: int  # numbers in a row; a pool is viewed as [layers * blocks * rows, width]
    rows: int  # rows of a block
    tile_rows: int  # rows in one copy of a direct pair, a divisor of rows
    slice_rows: int  # rows in one copy of another pair, a divisor of tile_rows
    num_stages: int  # tiles in the ring
    stage_slices: int  # slices that fit into one stage of the ring
    num_programs: int
    num_slice_programs: int  # programs that also copy pairs that are not direct


class Copies(NamedTuple):
    """Copies of blocks within pools."""

    pools: tuple[Any, ...]  # each [layers, blocks, ...], with the same shape and dtype
    pairs: Any  # int32 [pairs, 2], source and destination: direct pairs from the front, the others from the back
    counts: Any  # int32 [2], number of direct pairs and of other pairs


def limits(copies: Copies, gpu: Gpu, _: Hints) -> Iterator[str]:
    """Reasons to refuse the copies."""
    first, *others = copies.pools
    (num_layers, num_blocks, *block), itemsize = first.shape, first.dtype.itemsize
    numbers = math.prod(block)
    if not is_hopper(gpu) or copies.pairs.shape[0] == 0 or any(pool.shape != first.shape for pool in others):
        yield "the kernel that copies blocks needs Hopper, at least one pair, and pools of one shape."
    if itemsize not in (1, 2, 4) or numbers % 16 or first.size == 0:
        yield "the kernel that copies blocks needs blocks of a multiple of 16 numbers, of 1, 2 or 4 bytes each."
    if num_layers * num_blocks * (numbers // largest_tile(numbers, itemsize)[0]) >= 2**31:
        yield "the kernel that copies blocks supports fewer than 2^31 rows."


def configure(copies: Copies, gpu: Gpu, _: Hints) -> Config:
    num_layers, _, *block = copies.pools[0].shape
    return default_config(
        block_numbers=math.prod(block),
        itemsize=copies.pools[0].dtype.itemsize,
        num_pools=len(copies.pools),
        num_layers=num_layers,
        num_pairs=copies.pairs.shape[0],
        num_sms=gpu.num_sms,
    )


def launch(copies: Copies, config: Config) -> Any:
    from pallas_kernels.copy_blocks import kernel

    return kernel.launch(copies, config)


KERNEL = Kernel("copy_blocks", "the kernel that copies blocks", limits, configure, launch)


def default_config(
    *, block_numbers: int, itemsize: int, num_pools: int, num_layers: int, num_pairs: int, num_sms: int
) -> Config:
    """The configuration for pools whose blocks have `block_numbers` numbers each."""
    width, tile_rows = largest_tile(block_numbers, itemsize)
    rows = block_numbers // width
    row_bytes = width * itemsize
    slice_rows = max(n for n in divisors(tile_rows) if n * row_bytes <= max(SLICE_BYTES, row_bytes))
    num_tiles = num_pools * num_layers * (rows // tile_rows)
    num_programs = min(PROGRAMS_OF_SM * num_sms, num_tiles * num_pairs)
    num_stages = min(8, SMEM_BYTES // (padded_rows(tile_rows, row_bytes) * row_bytes))
    aligned = slice_rows * row_bytes % ALIGNMENT == 0
    return Config(
        width=width,
        rows=rows,
        tile_rows=tile_rows,
        slice_rows=slice_rows,
        num_stages=num_stages,
        stage_slices=min(tile_rows // slice_rows, MAX_BARRIERS // num_stages) if aligned else 1,
        num_programs=num_programs,
        num_slice_programs=min(SLICE_PROGRAMS, num_programs, num_tiles * (tile_rows // slice_rows)),
    )


def largest_tile(block_numbers: int, itemsize: int) -> tuple[int, int]:
    """Returns the width and the rows of the largest tile; of equally large tiles, the widest."""
    return max(
        (
            (width, rows)
            for width in range(16, MAX_BOX + 1, 16)
            if block_numbers % width == 0
            for rows in divisors(block_numbers // width)
            if rows <= MAX_BOX and rows * width * itemsize <= TILE_BYTES
        ),
        key=lambda tile: (tile[0] * tile[1], tile[0]),
    )


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def padded_rows(rows: int, row_bytes: int) -> int:
    """`rows` rounded up so that the next stage of the ring is aligned."""
    step = ALIGNMENT // math.gcd(ALIGNMENT, row_bytes)
    return -(-rows // step) * step
