"""The limits of the prefill kernel, and how a call is divided."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

from pallas_kernels.common.interface import MOST_ROWS, Call, Gpu, Hints, Kernel, Shapes, is_hopper
from pallas_kernels.common.sizes import DTYPES_16BIT, round_up

ITEM_ROWS = 128
WG_ROWS = 64  # rows of a computing warpgroup
# Up to this number of rows per KV head the decode kernel is faster. [one_kernel_h200 of benchmarks/results/decisions/]
FEW_ROWS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """How a call is divided into items, and items into tiles."""

    num_programs: int
    heads: int  # query heads of an item, a divisor of the group
    item_tokens: int  # query tokens of an item, a multiple of 8
    tile_tokens: int  # keys of a step
    num_parts: int = 1  # programs that share the tiles of an item; several parts are merged after the kernel
    causal: bool = True  # False: every query token sees the whole sequence, as if at the last position
    run: ClassVar[int] = 0  # the query tokens are packed
    at_once: ClassVar[None] = None

    @property
    def partitions(self) -> int:
        return self.num_parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Cut):
    num_stages: int  # 16-bit tiles of K, and of V, in SMEM
    # O is stored through its own SMEM, this number of columns at a time, while the next item's Q is copied. 0: O is
    # stored through Q's SMEM.
    output_columns: int
    registers: tuple[int, int]  # per thread that computes, and per thread that fetches or widens
    num_8bit_stages: int  # 8-bit tiles of K, and of V, in SMEM; 0 for a 16-bit cache

    @property
    def num_fetched_stages(self) -> int:
        return self.num_8bit_stages or self.num_stages

    @property
    def num_scale_stages(self) -> int:
        """Stages of per-token scales: enough that none is replaced while in use, without a barrier of its own.

        A tile is fetched after the values `num_8bit_stages` tiles before it are widened. Those are widened after the
        products with the values `num_stages` tiles before them, which follow that tile's softmax.
        """
        return self.num_8bit_stages + self.num_stages


def limits(call: Call, gpu: Gpu, hints: Hints) -> Iterator[str]:
    """Reasons to refuse a call."""
    if not is_hopper(gpu):
        yield "the prefill kernel needs compute capability 9.0."
    yield from limits_of_prompts(call, hints)
    if call.shapes().is_8bit and call.head_dim not in (*range(32, 129, 16), 192):
        yield "the prefill kernel supports 8-bit caches with a head_dim of 192, or a multiple of 16 up to 128."


def limits_of_prompts(call: Call, hints: Hints) -> Iterator[str]:
    """Reasons of both prefill kernels to refuse a call."""
    yield from call.option_limits()
    q_len, shapes = call.tokens_per_seq, call.shapes()
    # The decode kernel computes single tokens with all heads that it has room for.
    if q_len is not None and q_len * call.group <= (MOST_ROWS if q_len == 1 else FEW_ROWS):
        yield "the decode kernel is faster for few rows per KV head."
    if call.tree_mask is not None or hints.num_partitions not in (None, 1) or call.follows_plan:
        yield "a prefill kernel supports no tree_mask, no plan and no num_partitions above 1."
    if not (
        shapes.head_dim in range(32, 257, 16)
        and shapes.widths == (shapes.head_dim, shapes.head_dim)
        and shapes.block_size in (8, 16, 32, 64, 128, 256)
        and shapes.q_dtype in DTYPES_16BIT
        and (shapes.cache_dtype == shapes.q_dtype or shapes.is_8bit)
    ):
        yield "a prefill kernel supports head_dim 32 to 256 in steps of 16, blocks of 8 to 256, and 16-bit queries."


def configure(call: Call, gpu: Gpu, hints: Hints) -> Config:
    return in_parts(default_config(call.shapes(), num_sms=gpu.num_sms), call, gpu, hints)


def in_parts[C: Cut](config: C, call: Call, gpu: Gpu, hints: Hints) -> C:
    """The configuration with parts for this call. A requested num_partitions makes it one part, because the bits of
    such a call must not depend on the GPU."""
    num_runs = call.num_runs(config.item_tokens)  # at most
    if call.tokens_per_seq is None and not call.causal:
        num_runs = -(-call.q.shape[0] // config.item_tokens)  # nearly all runs are full in groups that share a prefix
    num_items, num_parts = num_runs * (call.q.shape[-2] // config.heads), 1
    if hints.num_partitions is None:
        seen = call.visible(hints.window)
        num_parts = default_parts(num_items=num_items, visible=seen, head_dim=call.head_dim, num_sms=gpu.num_sms)
    return dataclasses.replace(config, causal=call.causal, num_parts=num_parts)


def launch(call: Call, config: Config) -> Any:
    from pallas_kernels.prefill import kernel

    return kernel.launch(call, config)


KERNEL = Kernel("paged_prefill", "the prefill kernel", limits, configure, launch)


def default_config(shapes: Shapes, *, num_sms: int) -> Config:
    heads, item_tokens = heads_and_tokens(shapes.group)
    width = round_up(shapes.head_dim, 64)
    # At head_dim 128, O needs 64 registers of a thread, so steps of 128 tokens spill registers, and 64 tokens are
    # faster on an H100. At head_dim 64 nothing is spilled, and 128 tokens are faster. There are also enough registers
    # for three computing warpgroups; their time relative to two is 0.95 at 8 x 1024, 1.12 with 32/32 heads and 1.28 for
    # 64 tokens after 2048. [prefill_warpgroups_h100 of benchmarks/results/decisions/]
    tile_tokens, num_stages = {64: (128, 4), 128: (64, 4), 192: (64, 3), 256: (64, 2)}[width]
    # 64 prompts of 1 to 1024 tokens need 463 to 498 us if O has its own SMEM, 534 to 547 us if O is stored through Q's.
    # A second buffer for Q instead is not faster. At head_dim 256 there is room for half of O: 8 x 1024 needs 347 us,
    # with a quarter 357 us, through Q's SMEM 414 us. At head_dim 192 a third of O is not faster.
    # [prefill_ahead_h100, prefill_variants_h100 of benchmarks/results/decisions/]
    output_columns = {64: 64, 128: 128, 192: 0, 256: 128}[width]
    registers, num_8bit_stages = (232, 40), 0
    if shapes.itemsize == 1:
        num_stages, num_8bit_stages = {64: (3, 3), 128: (3, 3), 192: (2, 3)}[width]
        registers = (216, 40)  # 512 threads share 65536 registers
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
    """Parts per item to occupy all SMs, for items that see up to `visible` tokens."""
    # Each part is written and read once more. The bytes for this grow with the number of parts, while the keys of a
    # part get fewer. [one_kernel_h200, prefill_parts_h100 of benchmarks/results/decisions/]
    return max(1, min(num_sms // num_items, math.isqrt(16 * visible // (num_items * round_up(head_dim, 64)))))


def heads_and_tokens(group: int, rows: int = ITEM_ROWS) -> tuple[int, int]:
    """Heads and tokens of an item. Heads share keys, so it is the most heads with which at most an eighth of the rows
    are empty."""

    def tokens(heads: int) -> int:
        return rows // heads // 8 * 8

    heads = max(n for n in range(1, rows // 8 + 1) if group % n == 0 and 8 * n * tokens(n) >= 7 * rows)
    return heads, tokens(heads)
