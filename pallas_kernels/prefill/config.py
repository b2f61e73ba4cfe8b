"""What the prefill kernel takes, and how a call is cut up."""

import dataclasses
import math

from pallas_kernels.common.shapes import Shapes
from pallas_kernels.common.sizes import DTYPES_16BIT, round_up

ITEM_ROWS = 128
WG_ROWS = 64  # of them, for each of two warpgroups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """How a call is cut into items, and these into tiles."""

    num_programs: int
    heads: int  # query heads of an item, which divide the group
    item_tokens: int  # query tokens of an item, a multiple of 8
    tile_tokens: int  # of keys, a step
    num_parts: int = 1  # of the tiles that an item sees, each a program's; more than one are merged after the kernel
    causal: bool = True  # False: every query token sees the whole sequence, and stands at its last token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Cut):
    num_stages: int  # tiles of K, and of V, in SMEM, of 16 bits
    # Of O at a time through SMEM of their own, beside which the next item's Q is fetched; 0: through Q's.
    output_columns: int
    registers: tuple[int, int]  # of a thread that computes, and of one that fetches or widens
    num_8bit_stages: int  # tiles of K, and of V, of an 8-bit cache, as they are fetched; 0: of 16 bits

    @property
    def num_fetched_stages(self) -> int:
        return self.num_8bit_stages or self.num_stages

    @property
    def num_scale_stages(self) -> int:
        """Tiles whose scales of tokens are in SMEM: enough to need no barrier before one is replaced. A tile is fetched
        after the values `num_8bit_stages` tiles before it are widened, and these after the products with those
        `num_stages` before them, which follow their tile's softmax."""
        return self.num_8bit_stages + self.num_stages


def takes(shapes: Shapes, compute_capability: float) -> bool:
    """Whether this kernel takes a call; what it does not take goes to the decode kernel, in runs."""
    heads_8bit = (*range(32, 129, 16), 192)
    return compute_capability == 9.0 and takes_shapes(shapes) and (not shapes.is_8bit or shapes.head_dim in heads_8bit)


def takes_shapes(shapes: Shapes) -> bool:
    """Whether both prefill kernels take them."""
    return (
        shapes.head_dim in range(32, 257, 16)
        and shapes.widths == (shapes.head_dim, shapes.head_dim)
        and shapes.block_size in (8, 16, 32, 64, 128, 256)
        and shapes.q_dtype in DTYPES_16BIT
        and (shapes.cache_dtype == shapes.q_dtype or shapes.is_8bit)
    )


def default_config(shapes: Shapes, *, num_sms: int) -> Config:
    heads, item_tokens = heads_and_tokens(shapes.group)
    width = round_up(shapes.head_dim, 64)
    # Of head_dim 128, O takes 64 registers of a thread: 128 tokens a step spill registers, and 64 are faster on an
    # H100. Of head_dim 64 none are spilled, and 128 are faster. Three warpgroups, for which it leaves registers too,
    # take 0.95 of the time of two at 8 x 1024, 1.12 with 32/32 heads and 1.28 for 64 tokens after 2048.
    # [prefill_warpgroups_h100 of benchmarks/results/decisions/]
    tile_tokens, num_stages = {64: (128, 4), 128: (64, 4), 192: (64, 3), 256: (64, 2)}[width]
    # 64 prompts of 1 to 1024 tokens take 463 to 498 us with SMEM of its own for O, 534 to 547 where O leaves through
    # that of Q. A second Q in its stead is not faster. Of head_dim 256 half of O has room: 8 x 1024 347 us, a quarter
    # 357, through Q's 414; of 192 a third gains nothing.
    # [prefill_ahead_h100, prefill_variants_h100 of benchmarks/results/decisions/]
    output_columns = {64: 64, 128: 128, 192: 0, 256: 128}[width]
    registers, num_8bit_stages = (232, 40), 0
    if shapes.itemsize == 1:
        num_stages, num_8bit_stages = {64: (3, 3), 128: (3, 3), 192: (2, 3)}[width]
        registers = (216, 40)  # of 512 threads, which have 65536 together
    return Config(
        num_programs=num_sms,
        heads=heads,
        item_tokens=item_tokens,
        tile_tokens=tile_tokens,
        num_stages=num_stages,
        output_columns=output_columns,
        registers=registers,
        num_8bit_stages=num_8bit_stages,
    )


def default_parts(*, num_items: int, visible: int, head_dim: int, num_sms: int) -> int:
    """As many as there are SMs for, of items that see up to `visible` tokens."""
    # Each part of an item is written and read once more: these bytes grow with the number of parts, the keys of a part
    # fall with it. [one_kernel_h200, prefill_parts_h100 of benchmarks/results/decisions/]
    return max(1, min(num_sms // num_items, math.isqrt(16 * visible // (num_items * round_up(head_dim, 64)))))


def heads_and_tokens(group: int, rows: int = ITEM_ROWS) -> tuple[int, int]:
    """Heads and tokens of an item: the most heads, which share keys, with at most an eighth of the rows empty."""

    def tokens(heads: int) -> int:
        return rows // heads // 8 * 8

    heads = max(n for n in range(1, rows // 8 + 1) if group % n == 0 and 8 * n * tokens(n) >= 7 * rows)
    return heads, tokens(heads)
