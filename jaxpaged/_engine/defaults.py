"""Defaults of the options that are None, from the pool, the longest request and the device."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxpaged import _device
from jaxpaged._cache.kv_cache import caches_in
from jaxpaged._engine.inputs import pool_sizes
from jaxpaged._engine.on_mesh import find_mesh
from jaxpaged._integers import checked_size
from jaxpaged._slice.kinds import last_few
from jaxpaged._slice.options import EngineOptions, ResolvedOptions
from pallas_kernels.common.interface import is_hopper

# 384 seats make rollouts of 512 completions 13% slower; 768 need more widths and gain at most 3%. [seats_h100]
MOST_SEATS, MOST_ROWS = 512, 1024
MOST_SEATS_ON_CPU, MOST_ROWS_ON_CPU = 32, 128
LEAST_SEATS = 8
FEW_SEATS = 128  # with fewer, the widest step has half the rows, so that prompts delay other requests less
USUAL_LENGTH = 512  # expected tokens of a finished request
MOST_LENGTH = 8192
# Up to 64 rows, reading the weights dominates a step; from 256 rows on, the matrix products do. Each width adds 10 s
# of compilation for an 8B model with 32 unrolled layers.
WIDTHS = (64, 128, 256)
# The cost of a step in rows: WEIGHT_ROWS for reading the weights, plus its rows, at least FREE_ROWS.
# [h200/engine_steps.json]
WEIGHT_ROWS, FREE_ROWS = 384, 64
# On a CPU a step with one row is cheaper: from two rows on, XLA copies the weights for its products.
WEIGHT_ROWS_ON_CPU, SINGLE_ROW_ON_CPU = 26, 16  # [cpu/text_drafts.json]
# The steps of a slice read this many bytes of weights, at most MOST_STEPS times: 4 ms at 3 TB/s [slices_h100], on a CPU
# 80 ms at 10 GB/s, where the overhead of a slice is not hidden. On one GPU each layer counts LAYER_BYTES more, for its
# small kernels [slices_small_h200].
SLICE_BYTES, SLICE_BYTES_ON_CPU, MOST_STEPS = 12 * 10**9, 8 * 10**8, 16
LAYER_BYTES = 105 * 10**6
# Kernels that start before the previous one has ended (xla_gpu_enable_pdl) gain less than 5%. [dependent_launch_h200]
COMPILER_OPTIONS = {
    "xla_gpu_enable_triton_gemm": "False",  # products by cuBLAS [slices_h100, products_h200]
    # By default XLA merges products of the same rows (q, k and v), and copies their weights together in each step.
    "xla_gpu_dot_merger_threshold_mb": "0",  # [joined_h100]
    # By default XLA joins the slice of one group's block tables with the attention kernel. A CUDA graph cannot hold the
    # two, so the host would launch every layer and wait for the choice of each step's kind.
    "xla_gpu_enable_dynamic_slice_fusion": "False",
    # By default XLA computes small products of one row (an engine with one seat) as reductions with too few programs
    # for the memory's bandwidth. [one_row_h200]
    "xla_disable_hlo_passes": "dot-strength-reduction",
}


SHARING_BYTES = 64 * 1024 * 1024  # the overhead of reading shared blocks once, as bytes read in a layer


def resolve_options(options: EngineOptions, caches: Any, num_bytes: int) -> ResolvedOptions:
    """The options with a value for each that is None. `num_bytes`: bytes of the weights on one device."""
    num_blocks, block_size = pool_sizes(caches)
    is_gpu = _device.is_gpu()
    sized = with_sizes(options, (num_blocks - 1) // max(len(options.windows), 1) + 1, block_size, is_gpu=is_gpu)
    assert sized.max_num_seqs is not None
    chosen: dict[str, Any] = {
        "max_requests": options.max_requests or 4 * sized.max_num_seqs,
        "steps_per_slice": options.steps_per_slice
        or chosen_steps(num_bytes, counted_layers(caches, options), is_gpu=is_gpu),
        "compiler_options": chosen_compiler_options(options.compiler_options),
    }
    return ResolvedOptions(**vars(sized) | chosen, num_blocks=num_blocks, block_size=block_size, is_gpu=is_gpu)


def with_sizes(options: EngineOptions, num_blocks: int, block_size: int, *, is_gpu: bool) -> EngineOptions:
    """Checks or chooses `max_num_seqs`, `max_model_len`, `chunk_tokens` and `widths`."""
    max_num_seqs, max_model_len, chunk_tokens = options.max_num_seqs, options.max_model_len, options.chunk_tokens
    pool_tokens = max(num_blocks - 1, 1) * block_size
    most_seats, most_rows = (MOST_SEATS, MOST_ROWS) if is_gpu else (MOST_SEATS_ON_CPU, MOST_ROWS_ON_CPU)
    if max_model_len is None:
        max_model_len = min(pool_tokens, MOST_LENGTH)
    num_drafts = checked_size("num_speculative_tokens", options.num_speculative_tokens, 0, max_model_len)
    if max_num_seqs is None:
        max_num_seqs = min(most_seats, max(LEAST_SEATS, pool_tokens // min(max_model_len, USUAL_LENGTH)))
        max_num_seqs -= max_num_seqs % 64 if max_num_seqs > 64 else 0  # tiles of matrix products have 64 rows
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
                f"above {max_num_seqs=}, only the largest width that is at most a third of the widest step's "
                f"{widest} rows is used; leave out {unused}."
            )
    if num_drafts and not options.batch_invariant and not widths:
        raise ValueError(
            "drafts are verified in steps of widths, and no width is below the widest step, which has "
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
    """Widths of steps with drafts, up to the first with room for all drafts of all seats."""
    most = num_seats * (num_drafts + 1)
    steps = list(WIDTHS) if is_gpu else sorted({num_drafts + 1, max(num_drafts + 1, 2 * num_seats), most})
    return [width for i, width in enumerate(steps) if width < widest and (i == 0 or steps[i - 1] < most)]


def step_cost(num_rows: int, *, is_gpu: bool) -> float:
    """The cost of a step with this many rows, in rows."""
    if is_gpu:
        return float(WEIGHT_ROWS + max(num_rows, FREE_ROWS))
    return float(SINGLE_ROW_ON_CPU if num_rows == 1 else WEIGHT_ROWS_ON_CPU + num_rows)


def counted_layers(caches: Any, options: EngineOptions) -> int:
    """The layers of the model; 0 over several devices, where slices with fewer steps have not been timed."""
    if find_mesh(caches) is not None:
        return 0
    layers = sum(math.prod(cache.k.shape[:-4]) for cache in caches_in(caches))  # a stack has an axis of layers
    return layers * max(len(options.windows), 1)


def chosen_steps(num_bytes: int, num_layers: int, *, is_gpu: bool) -> int:
    """The number of steps in a slice. `num_bytes`: bytes of the weights on one device."""
    of_slice, of_layer = (SLICE_BYTES, LAYER_BYTES) if is_gpu else (SLICE_BYTES_ON_CPU, 0)
    return min(MOST_STEPS, math.ceil(of_slice / max(num_bytes + num_layers * of_layer, 1)))


def chosen_least_saved_reads(caches: Any) -> int | None:
    """The token reads that a step must save for reading shared blocks once to pay off; None: it never does."""
    if not _device.is_gpu() or not is_hopper(_device.gpu()):
        return None
    cache, *_ = caches_in(caches)
    if cache.v is None:  # not measured
        return None
    return SHARING_BYTES // (2 * math.prod(cache.k.shape[-2:]) * cache.k.dtype.itemsize)


def chosen_compiler_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return dict(COMPILER_OPTIONS) if _device.is_gpu() else {}
    return dict(given)
