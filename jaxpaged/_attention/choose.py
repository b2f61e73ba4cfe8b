"""Which kernel computes a call, and how: decided by shapes and the GPU, before anything runs.

Three kernels share the calls. The prefill kernel, of which Hopper has its own form, takes packed query tokens, several
of a sequence with more than 32 rows (query tokens times heads of a KV head), and single ones with more than 64. The
kernel for latents takes those of 64 heads, 128 and so on, without options, on Hopper. The decode kernel takes the other
calls, with up to 64 rows, and longer queries in runs; trees are of one run.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal

from jaxpaged._attention.call import Call
from jaxpaged._attention.plan import follows, plan_pays, programs_at_once, visible
from jaxpaged._attention.runs import fewest_runs, most_runs
from jaxpaged._device import Gpu
from pallas_kernels.decode import config as decode_config
from pallas_kernels.decode import partition_plan
from pallas_kernels.latent import config as latent_config
from pallas_kernels.prefill import config as prefill_config
from pallas_kernels.prefill.portable import config as portable_config

Implementation = Literal["mosaic_gpu", "xla"]
Kernel = Literal["paged_decode", "paged_latent", "paged_prefill", "portable_prefill"]  # as a profile names it
Config = decode_config.Config | latent_config.Config | prefill_config.Config | portable_config.Config

# Rows of a KV head up to which the decode kernel is faster. [one_kernel_h200 of benchmarks/results/decisions/]
FEW_ROWS = 32


@dataclasses.dataclass(frozen=True)
class StaticHints:
    """Static facts about a call, besides its shapes."""

    num_partitions: int | None = None  # of each sequence; None: chosen here
    window: int | None = None  # the sliding window in tokens, if it is a number
    total_partitions: int | None = None  # of the plan that came with the call
    implementation: Implementation | None = None  # named: nothing else may compute the call


NO_HINTS = StaticHints()


@dataclasses.dataclass(frozen=True)
class Choice:
    """A kernel, and how it computes a call. It holds no array, so that a jitted function can be keyed on it."""

    kernel: Kernel
    config: Config
    run: int = 0  # query tokens of a run, which the decode kernel takes as a sequence; the prefill kernel has none
    # Partitions of a KV head that run at the same time, if the call follows a plan; None: it follows none.
    at_once: int | None = None
    mapped: "Choice | None" = None  # of calls under `jax.vmap`: one partition a sequence; None: this one
    falls_back: bool = False  # whether XLA computes it if it is lowered for another platform
    interpret: Any = None  # of `plgpu.kernel`, for interpret mode; None: for a GPU


@dataclasses.dataclass(frozen=True)
class Refusal:
    """No kernel takes the call."""

    message: str  # names the limit and what was received
    is_told: bool = True  # whether a caller who named nothing is warned: a kernel could have computed the call

    @property
    def reason(self) -> str:
        """The message without what was received, the same for all calls beyond one limit."""
        return self.message.partition("; got ")[0]


def choose(call: Call, gpu: Gpu, hints: StaticHints = NO_HINTS) -> Choice | Refusal:
    """Reads no array: shapes, dtypes, and which options there are."""
    total, by_name = hints.total_partitions, hints.implementation is not None
    planned = total is not None and follows(call, total)
    by_prefill_kernel = not planned and _prefill_is_faster(call, gpu, hints)
    decode_limits = () if by_prefill_kernel else _decode_limits(call, gpu)
    for text, is_beyond in itertools.chain(_option_limits(call), decode_limits, _faults(gpu, by_name=by_name)):
        if is_beyond:
            return Refusal(text, is_told=gpu.has_kernels)
    if by_prefill_kernel:
        choice = by_prefill(call, gpu, hints)
    elif (run := _latent_run(call, gpu)) is not None:
        choice = by_latent(call, gpu, hints, run)
    else:
        seqs, seen = call.lengths.shape[0], visible(call, hints.window)
        if total is None and hints.num_partitions is None and plan_pays(gpu, pairs=seqs * call.kv_heads, seen=seen):
            planned = follows(call, partition_plan.default_total(seqs, programs_at_once(gpu, call.kv_heads)))
        choice = by_decode(call, gpu, hints, planned=planned)
    return dataclasses.replace(choice, falls_back=not by_name)


def _prefill_is_faster(call: Call, gpu: Gpu, hints: StaticHints) -> bool:
    """Whether the prefill kernel takes the call, and computes it faster than the decode kernel."""
    q_len = call.tokens_per_seq
    # The decode kernel keeps single tokens, of all the heads that it takes.
    many_rows = q_len is None or q_len * call.group > (decode_config.MAX_ROWS if q_len == 1 else FEW_ROWS)
    is_plain = call.tree_mask is None and hints.num_partitions in (None, 1)
    takes = prefill_config.takes if gpu.is_hopper else portable_config.takes
    return many_rows and is_plain and takes(call.shapes(), gpu.compute_capability)


def by_decode(call: Call, gpu: Gpu, hints: StaticHints = NO_HINTS, *, planned: bool = False) -> Choice:
    """The decode kernel, with its default configuration, whatever the rules say. `planned`: it follows a plan."""
    num_runs, run = _runs(call, gpu)
    shapes = call.shapes(run)
    if not call.causal:  # query tokens that see the same become heads: see `runs`
        shapes = dataclasses.replace(shapes, q_len=1, group=run * call.group)
    config = decode_config.default_config(
        shapes,
        pairs=num_runs * call.kv_heads,
        capacity=call.capacity,
        num_sms=gpu.num_sms,
        compute_capability=gpu.compute_capability,
        window=hints.window,
        num_partitions=hints.num_partitions,
        planned=planned,
    )
    mapped = None
    if planned or (hints.num_partitions is None and config.num_partitions > 1):
        # Mapped calls whose partitions merge in memory run one after the other: see `pallas_kernels.common.launch`.
        mapped = by_decode(call, gpu, dataclasses.replace(hints, num_partitions=1))
    return Choice("paged_decode", config, run, programs_at_once(gpu, call.kv_heads) if planned else None, mapped)


def _latent_run(call: Call, gpu: Gpu) -> int | None:
    """Query tokens of a run, if the kernel for latents takes the call, which it computes in about half of the decode
    kernel's time. [latent_heads_h100 of benchmarks/results/decisions/]"""
    run = 1 if call.causal else _run(call, latent_config.HEADS)  # whose tokens become heads
    others = (getattr(call.options, field.name) for field in dataclasses.fields(call.options) if field.name != "scale")
    is_plain = call.tree_mask is None and all(option is None for option in others)
    return run if is_plain and latent_config.takes(call.shapes(run), gpu.compute_capability) else None


def by_latent(call: Call, gpu: Gpu, hints: StaticHints, run: int) -> Choice:
    """The kernel for latents, with its default configuration."""
    num_rows = _num_runs(call, run) * run * call.group
    config = latent_config.default_config(
        num_rows=num_rows, capacity=call.capacity, num_sms=gpu.num_sms, num_partitions=hints.num_partitions
    )
    return Choice("paged_latent", config, run)


def by_prefill(call: Call, gpu: Gpu, hints: StaticHints) -> Choice:
    """The GPU's form of the prefill kernel, with its default configuration."""
    config: prefill_config.Config | portable_config.Config
    if gpu.is_hopper:
        config = prefill_config.default_config(call.shapes(), num_sms=gpu.num_sms)
    else:
        config = portable_config.default_config(call.shapes(), compute_capability=gpu.compute_capability)
    num_runs = _num_runs(call, config.item_tokens)  # at most
    if call.tokens_per_seq is None and not call.causal:
        num_runs = -(-call.q.shape[0] // config.item_tokens)  # in groups that share a prefix there are few others
    num_items = num_runs * (call.q.shape[-2] // config.heads)
    num_parts = 1  # the bits of a call that asks for one partition do not depend on the GPU
    if hints.num_partitions is None:
        seen = visible(call, hints.window)
        num_parts = prefill_config.default_parts(
            num_items=num_items, visible=seen, head_dim=call.head_dim, num_sms=gpu.num_sms
        )
    kernel: Kernel = "paged_prefill" if gpu.is_hopper else "portable_prefill"
    return Choice(kernel, dataclasses.replace(config, causal=call.causal, num_parts=num_parts))


def _runs(call: Call, gpu: Gpu) -> tuple[int, int]:
    """Runs that the decode kernel takes, and query tokens in each."""
    most_rows = decode_config.MAX_ROWS
    if not call.causal or call.v_cache is None:
        most_rows = decode_config.most_rows(call.shapes(), gpu.compute_capability)
    run = _run(call, most_rows)
    return _num_runs(call, run), run


def _run(call: Call, most_rows: int) -> int:
    """Query tokens of a run: as many as have at most `most_rows` rows, but one at least."""
    if call.tokens_per_seq is None:
        return max(1, most_rows // call.group)
    return fewest_runs(call.tokens_per_seq, call.group, most_rows)[1]


def _num_runs(call: Call, run: int) -> int:
    """Runs of `run` query tokens, at most: none has tokens of two sequences."""
    if call.tokens_per_seq is None:
        return most_runs(call.q.shape[0], call.lengths.shape[0], run)
    return call.q.shape[0] * -(-call.tokens_per_seq // run)


def _option_limits(call: Call) -> Iterator[tuple[str, bool]]:
    """What no kernel takes with these options, with what was received, and whether the call is beyond it."""
    options = call.options
    yield (
        "the Mosaic GPU kernels take k_scale and v_scale with 8-bit caches; "
        f'got k_cache.dtype={call.k_cache.dtype!s}. Pass implementation="xla".',
        call.itemsize > 1 and (options.k_scale is not None or options.v_scale is not None),
    )
    yield (
        'the Mosaic GPU kernels take a tree_mask without sliding_window and alibi_slopes. Pass implementation="xla".',
        # Both count from a token's depth; the kernels know its ordinal only.
        call.tree_mask is not None and (options.sliding_window is not None or options.alibi_slopes is not None),
    )


def _decode_limits(call: Call, gpu: Gpu) -> Iterator[tuple[str, bool]]:
    """As `_option_limits`, of the decode kernel."""
    num_runs, run = _runs(call, gpu)
    yield from decode_config.limits(call.shapes(run), gpu.compute_capability)
    yield (
        f"the decode kernel takes a tree_mask of up to {decode_config.MAX_ROWS} rows (q_len * heads / kv_heads), on a "
        f'latent fewer; got q={list(call.q.shape)}, kv_heads={call.kv_heads}. Pass implementation="xla".',
        call.tree_mask is not None and run != call.tokens_per_seq,
    )
    seqs, q_len, group = call.lengths.shape[0], call.tokens_per_seq, call.group
    yield (
        f"the decode kernel takes up to {decode_config.MAX_SEQS} runs of query tokens in a call; got {seqs=}, "
        f"{q_len=}, {group=}: {num_runs} runs of {run}. Pass fewer sequences or query tokens at a time.",
        num_runs > decode_config.MAX_SEQS,
    )


def _faults(gpu: Gpu, *, by_name: bool) -> Iterator[tuple[str, bool]]:
    """Why kernels that take a call do not compute it, and whether that is so here."""
    yield (
        f"the self-test found the kernels wrong on this kind of GPU, {gpu.name}: {gpu.fault}. "
        "`python -m jaxpaged.selftest` tests again.",
        bool(gpu.fault) and not by_name,
    )
    yield (
        f"the Mosaic GPU kernels do not run with the ptxas of nvidia-cuda-nvcc-cu12 {gpu.broken_ptxas}, which "
        'miscompiles causal masks. Install a later one: pip install "nvidia-cuda-nvcc-cu12>=12.9.86".',
        gpu.broken_ptxas is not None,
    )
