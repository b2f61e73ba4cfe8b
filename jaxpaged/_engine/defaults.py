"""The options of an engine that its caller leaves at None: from the pool, the longest request, and the device."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxpaged import _device
from jaxpaged._engine.inputs import pool_sizes
from jaxpaged._integers import checked_size
from jaxpaged._slice.kinds import last_few
from jaxpaged._slice.options import EngineOptions, ResolvedOptions
from jaxpaged._slice.pytrees import caches_in

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


def resolve_options(options: EngineOptions, caches: Any, num_bytes: int) -> ResolvedOptions:
    """The options with a value for each that is None. `num_bytes`: of the weights on a device."""
    num_blocks, block_size = pool_sizes(caches)
    is_gpu = _device.is_gpu()
    sized = with_sizes(options, (num_blocks - 1) // max(len(options.windows), 1) + 1, block_size, is_gpu=is_gpu)
    assert sized.max_num_seqs is not None
    chosen: dict[str, Any] = {
        "max_requests": options.max_requests or 4 * sized.max_num_seqs,
        "steps_per_slice": options.steps_per_slice or chosen_steps(num_bytes, is_gpu=is_gpu),
        "compiler_options": chosen_compiler_options(options.compiler_options),
    }
    return ResolvedOptions(**vars(sized) | chosen, num_blocks=num_blocks, block_size=block_size, is_gpu=is_gpu)


def with_sizes(options: EngineOptions, num_blocks: int, block_size: int, *, is_gpu: bool) -> EngineOptions:
    """With `max_num_seqs`, `max_model_len`, `chunk_tokens` and `widths`: those given are checked, the others chosen."""
    max_num_seqs, max_model_len, chunk_tokens = options.max_num_seqs, options.max_model_len, options.chunk_tokens
    pool_tokens = max(num_blocks - 1, 1) * block_size
    most_seats, most_rows = (MOST_SEATS, MOST_ROWS) if is_gpu else (MOST_SEATS_ON_CPU, MOST_ROWS_ON_CPU)
    if max_model_len is None:
        max_model_len = min(pool_tokens, MOST_LENGTH)
    num_drafts = checked_size("num_speculative_tokens", options.num_speculative_tokens, 0, max_model_len)
    if max_num_seqs is None:
        max_num_seqs = min(most_seats, max(LEAST_SEATS, pool_tokens // min(max_model_len, USUAL_LENGTH)))
        max_num_seqs -= max_num_seqs % 64 if max_num_seqs > 64 else 0  # products of 64 rows
    if chunk_tokens is None:
        rows = most_rows if max_num_seqs > FEW_SEATS else most_rows // 2
        chunk_tokens = min(max(rows - max_num_seqs, rows // 2), pool_tokens)
    widest = max_num_seqs + chunk_tokens
    if options.widths is None:
        widths = [width for width in WIDTHS if width <= max_num_seqs]
        if num_drafts:
            widths = draft_widths(max_num_seqs, num_drafts, widest, is_gpu=is_gpu)
    else:
        widths = list(options.widths)
        if widths and widths[-1] >= widest:
            raise ValueError(
                "widths are rows of steps narrower than the widest, which has max_num_seqs + chunk_tokens = "
                f"{widest}; got widths={options.widths}."
            )
        few = widths if num_drafts else last_few(widths, widest)
        if unused := [width for width in widths if width > max_num_seqs and width not in few]:
            raise ValueError(
                f"of the widths above {max_num_seqs=}, only the last that is at most a third of the widest "
                f"step, which has {widest} rows, is used; leave out {unused}."
            )
    if num_drafts and not options.batch_invariant and not widths:
        raise ValueError(
            "drafts are computed in steps of widths, and there is none below the widest step, which has "
            f"max_num_seqs + chunk_tokens = {widest} rows; pass widths, or more chunk_tokens."
        )
    return dataclasses.replace(
        options,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        chunk_tokens=chunk_tokens,
        widths=tuple(widths),
    )


def draft_widths(num_seats: int, num_drafts: int, widest: int, *, is_gpu: bool) -> list[int]:
    """The widths of steps with drafts: those below the first that has room for all drafts of all seats, and it."""
    most = num_seats * (num_drafts + 1)
    steps = list(WIDTHS) if is_gpu else sorted({num_drafts + 1, max(num_drafts + 1, 2 * num_seats), most})
    return [width for i, width in enumerate(steps) if width < widest and (i == 0 or steps[i - 1] < most)]


def step_cost(num_rows: int, *, is_gpu: bool) -> float:
    """How long a step of so many rows takes, if a row takes 1."""
    if is_gpu:
        return float(WEIGHT_ROWS + max(num_rows, FREE_ROWS))
    return float(SINGLE_ROW_ON_CPU if num_rows == 1 else WEIGHT_ROWS_ON_CPU + num_rows)


def chosen_steps(num_bytes: int, *, is_gpu: bool) -> int:
    """The steps of a slice. `num_bytes`: those of the weights on a device."""
    of_slice = SLICE_BYTES if is_gpu else SLICE_BYTES_ON_CPU
    return min(MOST_STEPS, math.ceil(of_slice / max(num_bytes, 1)))


def chosen_least_saved_reads(caches: Any) -> int | None:
    """How many reads of tokens a step must save for reading shared blocks once to pay; None: it never does."""
    if not _device.is_gpu() or not _device.gpu().is_hopper:
        return None
    cache, *_ = caches_in(caches)
    if cache.v is None:  # not measured
        return None
    return SHARING_BYTES // (2 * math.prod(cache.k.shape[-2:]) * cache.k.dtype.itemsize)


def chosen_compiler_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return dict(COMPILER_OPTIONS) if _device.is_gpu() else {}
    return dict(given)
