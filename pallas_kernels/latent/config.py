"""The limits of the kernel for latents, and its number of partitions."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from pallas_kernels.common.interface import MOST_SEQS, Call, Gpu, Hints, Kernel, is_hopper
from pallas_kernels.common.sizes import DTYPES_16BIT, divides_tiles

TILE = 64  # tokens
HEADS = 64  # heads of a program, for one query token
REST = 64  # columns of a latent after its values; equal to TILE, because the weights replace them in SMEM


@dataclasses.dataclass(frozen=True)
class Config:
    num_partitions: int  # programs for each sequence and 64 rows
    run: int = 1  # query tokens of a run; they become heads
    at_once: ClassVar[None] = None

    @property
    def partitions(self) -> int:
        return self.num_partitions


def limits(call: Call, gpu: Gpu, hints: Hints) -> Iterator[str]:
    """Reasons to refuse a call.

    The kernel runs about twice as fast as the decode kernel. [latent_heads_h100 of benchmarks/results/decisions/]
    """
    run = _run(call)
    shapes = call.shapes(run)
    if not (
        is_hopper(gpu)
        and shapes.q_dtype in DTYPES_16BIT
        and shapes.cache_dtype == shapes.q_dtype
        and shapes.is_latent
        and shapes.value_dim in (128, 256, 384, 512)
        and shapes.head_dim == shapes.value_dim + REST
        and divides_tiles(shapes.block_size)
        and shapes.q_len * shapes.group % HEADS == 0
        and call.num_runs(run) <= MOST_SEQS
    ):
        yield "the kernel for latents of many heads needs Hopper, 16-bit latents, and a multiple of 64 heads."
    others = (getattr(call.options, field.name) for field in dataclasses.fields(call.options) if field.name != "scale")
    if call.tree_mask is not None or any(option is not None for option in others):
        yield "the kernel for latents of many heads supports no option except scale."


def configure(call: Call, gpu: Gpu, hints: Hints) -> Config:
    run, num_partitions = _run(call), hints.num_partitions
    if num_partitions is None:
        num_rows = call.num_runs(run) * run * call.group
        num_partitions = max(1, min(gpu.num_sms * HEADS // num_rows, call.capacity // (2 * TILE)))
    return Config(min(num_partitions, max(1, -(-call.capacity // TILE))), run)  # more partitions would have no tile


def _run(call: Call) -> int:
    return 1 if call.causal else call.run_tokens(HEADS)


def launch(call: Call, config: Config) -> Any:
    from pallas_kernels.latent import kernel

    return kernel.launch(call, config)


KERNEL = Kernel("paged_latent", "the kernel for latents of many heads", limits, configure, launch)
