"""The sizes of an engine that its caller leaves open: from the pool, the longest request, and the device."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxpaged import _device
from jaxpaged._engine.inputs import caches_in
from jaxpaged._engine.kinds import last_few
from jaxpaged._integers import checked_size, checked_tuple

# With 384 seats rollouts of 512 completions take 13% longer. 768 need more widths, and gain 3% at most. [seats_h100]
MOST_SEATS, MOST_ROWS = 512, 1024
MOST_SEATS_ON_CPU, MOST_ROWS_ON_CPU = 32, 128
LEAST_SEATS = 8
FEW_SEATS = 128  # with fewer, the widest step has half of the rows, so that a token is not kept waiting for prompts
USUAL_LENGTH = 512  # tokens of a request at its end, if it may be longer
MOST_LENGTH = 8192
# Up to 64 rows a step costs what reading the weights costs; from 256 on, what its products cost. Each width takes a
# GPU's compiler 10 s if the 32 layers of an 8B model are unrolled.
WIDTHS = (64, 128, 256)
# Reading the weights takes as long as these rows, and fewer than FREE_ROWS take as long as so many.
# [h200/engine_steps.json]
WEIGHT_ROWS, FREE_ROWS = 384, 64
# On a CPU a step of a single row takes less: from two rows on, XLA copies the weights for its products.
WEIGHT_ROWS_ON_CPU, SINGLE_ROW_ON_CPU = 26, 16  # [cpu/text_drafts.json]
# The steps of a slice read so many bytes of weights, for 4 ms at 3 TB/s, unless they would be more than MOST_STEPS.
# [slices_h100] On a CPU for 80 ms at 10 GB/s: a slice's own time is not hidden behind its last step.
SLICE_BYTES, SLICE_BYTES_ON_CPU, MOST_STEPS = 12 * 10**9, 8 * 10**8, 16
COMPILER_OPTIONS = {
    "xla_gpu_enable_triton_gemm": "False",  # products by cuBLAS [slices_h100]
    # Else products of the same rows, as for q, k and v, become one of weights that each step copies together.
    "xla_gpu_dot_merger_threshold_mb": "0",  # [joined_h100]
}


SHARING_BYTES = 64 * 1024 * 1024  # of a layer: to read shared blocks once takes about as long as to read as much


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What `Engine`'s arguments of these names say, or what stands in for them."""

    num_seats: int
    max_length: int
    chunk_tokens: int
    widths: tuple[int, ...]


def chosen_sizes(
    num_blocks: int,
    block_size: int,
    *,
    num_seats: int | None,
    max_length: int | None,
    chunk_tokens: int | None,
    widths: Sequence[int] | None,
    is_gpu: bool,
    drafts: int = 0,
    exact: bool = False,
) -> Sizes:
    """The sizes that were given, checked, and the others chosen."""
    pool_tokens = max(num_blocks - 1, 1) * block_size
    most_seats, most_rows = (MOST_SEATS, MOST_ROWS) if is_gpu else (MOST_SEATS_ON_CPU, MOST_ROWS_ON_CPU)
    max_length = checked_size("max_length", min(pool_tokens, MOST_LENGTH) if max_length is None else max_length)
    drafts = checked_size("drafts", drafts, 0, max_length)
    if num_seats is None:
        num_seats = min(most_seats, max(LEAST_SEATS, pool_tokens // min(max_length, USUAL_LENGTH)))
        num_seats -= num_seats % 64 if num_seats > 64 else 0  # products of 64 rows
    num_seats = checked_size("num_seats", num_seats)
    if chunk_tokens is None:
        rows = most_rows if num_seats > FEW_SEATS else most_rows // 2
        chunk_tokens = min(max(rows - num_seats, rows // 2), pool_tokens)
    chunk_tokens = checked_size("chunk_tokens", chunk_tokens)
    widest = num_seats + chunk_tokens
    if widths is None:
        chosen = [width for width in WIDTHS if width <= num_seats]
        if drafts:
            chosen = draft_widths(num_seats, drafts, widest, is_gpu=is_gpu)
    else:
        chosen = sorted({checked_size("widths", width) for width in checked_tuple("widths", widths)})
        if chosen and chosen[-1] >= widest:
            raise ValueError(
                "widths are rows of steps narrower than the widest, which has num_seats + chunk_tokens = "
                f"{widest}; got widths={tuple(widths)}."
            )
        few = chosen if drafts else last_few(chosen, widest)
        if unused := [width for width in chosen if width > num_seats and width not in few]:
            raise ValueError(
                f"of the widths above {num_seats=}, only the last that is at most a third of the widest "
                f"step, which has {widest} rows, is used; leave out {unused}."
            )
    if drafts and not exact and not chosen:
        raise ValueError(
            "drafts are computed in steps of widths, and there is none below the widest step, which has "
            f"num_seats + chunk_tokens = {widest} rows; pass widths, or more chunk_tokens."
        )
    return Sizes(num_seats, max_length, chunk_tokens, tuple(chosen))


def draft_widths(num_seats: int, drafts: int, widest: int, *, is_gpu: bool) -> list[int]:
    """The widths of steps with drafts: those below the first that has room for all drafts of all seats, and it."""
    most = num_seats * (drafts + 1)
    steps = list(WIDTHS) if is_gpu else sorted({drafts + 1, max(drafts + 1, 2 * num_seats), most})
    return [width for i, width in enumerate(steps) if width < widest and (i == 0 or steps[i - 1] < most)]


def step_cost(num_rows: int, *, is_gpu: bool) -> float:
    """How long a step of so many rows takes, if a row takes 1."""
    if is_gpu:
        return float(WEIGHT_ROWS + max(num_rows, FREE_ROWS))
    return float(SINGLE_ROW_ON_CPU if num_rows == 1 else WEIGHT_ROWS_ON_CPU + num_rows)


def chosen_steps(given: int | None, num_bytes: int, *, is_gpu: bool) -> int:
    """The steps of a slice. `num_bytes`: those of the weights on a device."""
    if given is not None:
        return checked_size("steps_per_slice", given)
    of_slice = SLICE_BYTES if is_gpu else SLICE_BYTES_ON_CPU
    return min(MOST_STEPS, math.ceil(of_slice / max(num_bytes, 1)))


def chosen_least_spared(caches: Any) -> int | None:
    """The tokens of shared blocks of which a step must be spared reading so many that it pays; None: it never does."""
    if not _device.is_gpu() or not _device.gpu().is_hopper:
        return None
    cache, *_ = caches_in(caches)
    if cache.v is None:  # not measured
        return None
    return SHARING_BYTES // (2 * math.prod(cache.k.shape[-2:]) * cache.k.dtype.itemsize)


def chosen_compiler_options(given: dict[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return dict(COMPILER_OPTIONS) if _device.is_gpu() else {}
    return given
