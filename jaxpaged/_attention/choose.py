"""Which kernel computes a call, and how: decided by shapes and the GPU, before anything runs.

Three kernels share the calls. The prefill kernel takes prompts: packed query tokens, more than 64 rows (query tokens
times heads of a KV head), and trees of that size. The decode kernels take up to 64 rows, and longer queries in runs:
one is for Hopper GPUs, the portable one for the others, and on Hopper for some of the calls that follow a plan.
"""

import dataclasses
from typing import Any, Literal

from jaxpaged._attention import query_runs
from jaxpaged._attention.arguments import AttentionArguments, PackedArguments
from jaxpaged._attention.partitions import portable_follows, programs_at_once
from jaxpaged._device import Gpu
from pallas_kernels import decode_config, partition_plan, portable_config, prefill_config
from pallas_kernels._sizes import filled_rows, padded_width

Call = AttentionArguments | PackedArguments
Kernel = Literal["paged_decode", "portable_decode", "paged_prefill"]  # a package of `pallas_kernels`
Config = decode_config.Config | portable_config.Config | prefill_config.Config

WIDE = 8192  # tokens; narrower tables hold no sequence that takes long by itself
PARTIAL_BYTES = 128 * 1024 * 1024  # the most memory for the partials of a plan


@dataclasses.dataclass(frozen=True)
class Known:
    """What a caller tells beforehand, beside the shapes of a call."""

    num_partitions: int | None = None  # of each sequence; None: chosen here
    window: int | None = None  # the sliding window in tokens, if it is a number
    total_partitions: int | None = None  # of the plan that came with the call
    by_name: bool = False  # the kernels were named: nothing else may compute the call


NOTHING = Known()


@dataclasses.dataclass(frozen=True)
class Choice:
    """A kernel, and how it computes a call. It holds no array, so that a jitted function can be keyed on it."""

    kernel: Kernel
    config: Config
    run: int = 0  # query tokens of a run, which the decode kernels take as a sequence; the prefill kernel has none
    # The call follows a plan for so many partitions of a KV head at the same time; None: it follows none.
    at_once: int | None = None
    mapped: "Choice | None" = None  # of calls under `jax.vmap`, which follow no plan; None: this one
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


def choose(call: Call, gpu: Gpu, known: Known = NOTHING) -> Choice | Refusal:
    """Reads no array: shapes, dtypes, and which options there are."""
    try:
        choice = _choose(call, gpu, known)
    except NotImplementedError as refusal:
        return Refusal(str(refusal), is_told=gpu.is_hopper)
    if not known.by_name and not gpu.is_hopper:
        return Refusal(
            'on this GPU the kernels must be named, implementation="mosaic_gpu". `python -m jaxpaged.selftest` checks '
            "them here, and compares them with XLA."
        )
    if gpu.broken_ptxas is not None:
        return Refusal(
            f"the Mosaic GPU kernels do not run with the ptxas of nvidia-cuda-nvcc-cu12 {gpu.broken_ptxas}, which "
            'miscompiles causal masks. Install a later one: pip install "nvidia-cuda-nvcc-cu12>=12.9.86".'
        )
    return dataclasses.replace(choice, falls_back=not known.by_name)


def _choose(call: Call, gpu: Gpu, known: Known) -> Choice:
    """Raises `NotImplementedError`, which names the limit and what was received."""
    _check_options(call)
    _check_tree(call, gpu, known)
    is_packed = isinstance(call, PackedArguments)
    if is_wide_tree(call) or (is_packed and known.num_partitions in (None, 1) and _prefill_takes(call, gpu)):
        return by_prefill(call, gpu, known)
    _check_decode(call, gpu)
    if known.total_partitions is not None:
        is_planned = follows(call, known.total_partitions)
    else:
        is_planned = known.num_partitions is None and are_uneven(call, gpu, known) and follows(call, _total(call, gpu))
    return with_plan(call, gpu, known) if is_planned else evenly(call, gpu, known)


def with_plan(call: Call, gpu: Gpu, known: Known = NOTHING, *, kernel: Kernel | None = None) -> Choice:
    """One of the decode kernels follows a plan; without `kernel`, the one that is faster."""
    kernel = kernel or _planned_kernel(call, gpu)
    how = Known(window=known.window)
    mapped = by_decode(_decode_kernel(gpu), call, gpu, dataclasses.replace(how, num_partitions=1))
    return dataclasses.replace(by_decode(kernel, call, gpu, how, planned=True), mapped=mapped)


def evenly(call: Call, gpu: Gpu, known: Known = NOTHING) -> Choice:
    """As many partitions for each sequence."""
    if not isinstance(call, PackedArguments):
        is_one_run = query_runs.runs_of(call.q.shape[1], call.group)[0] == 1
        if not is_one_run and known.num_partitions in (None, 1) and _prefill_takes(call, gpu):
            choice = by_prefill(call, gpu, known)
            if _fills(choice.config, call, gpu):
                return choice
    return by_decode(_decode_kernel(gpu), call, gpu, known)


def by_decode(kernel: Kernel, call: Call, gpu: Gpu, known: Known = NOTHING, *, planned: bool = False) -> Choice:
    """This decode kernel, with its default configuration, whatever the rules say."""
    num_runs, run = _runs(call, gpu)
    how: dict[str, Any] = dict(
        seqs=num_runs,
        kv_heads=call.k_cache.shape[2],
        # Query tokens that see the same become heads: see `query_runs`.
        group=call.group if call.causal else run * call.group,
        q_len=run if call.causal else 1,
        head_dim=call.q.shape[-1],
        capacity=call.capacity,
        itemsize=call.k_cache.dtype.itemsize,
        num_sms=gpu.num_sms,
        window=known.window,
        num_partitions=known.num_partitions,
        planned=planned,
    )
    config: Config
    if kernel == "portable_decode":
        config = portable_config.default_config(**how, compute_capability=gpu.compute_capability)
    else:
        scales = call.options.k_scale, call.options.v_scale
        token_scales = sum(scale is not None and scale.ndim == 3 for scale in scales)
        config = decode_config.default_config(**how, fast_memory=gpu.fast_memory, token_scales=token_scales)
    return Choice(kernel, config, run, _at_once(call, gpu, kernel) if planned else None)


def by_prefill(call: Call, gpu: Gpu, known: Known) -> Choice:
    heads, _ = prefill_config.heads_and_tokens(call.group)
    num_items = _prefill_entries(call) * (call.q.shape[-2] // heads)
    num_parts = 1  # asked for one, the bits are those of one
    if known.num_partitions is None:
        visible = _visible(call, known)
        num_parts = prefill_config.default_parts(num_items=num_items, visible=visible, num_sms=gpu.num_sms)
    config = prefill_config.default_config(
        group=call.group,
        head_dim=call.q.shape[-1],
        num_sms=gpu.num_sms,
        num_parts=num_parts,
        causal=call.causal,
        itemsize=call.k_cache.dtype.itemsize,
    )
    return Choice("paged_prefill", config)


def _prefill_entries(call: Call) -> int:
    """Of the work list, at most."""
    _, tokens = prefill_config.heads_and_tokens(call.group)
    if isinstance(call, PackedArguments):
        return -(-call.q.shape[0] // tokens) + call.lengths.shape[0]
    return call.q.shape[0] * -(-call.q.shape[1] // tokens)


def _fills(config: Any, call: Call, gpu: Gpu) -> bool:
    """Whether the prefill kernel has work for all SMs, or, where there are keys for several parts, for most."""
    # H100, us: 256 tokens after 8192 take 81.6 in two parts, 90.2 in runs of the decode kernel. [prefill_parts_h100 of
    # benchmarks/results/decisions/]
    num_programs = _prefill_entries(call) * (call.q.shape[-2] // config.heads) * config.num_parts
    return num_programs > gpu.num_sms or (config.num_parts > 1 and 4 * num_programs > 3 * gpu.num_sms)


def _runs(call: Call, gpu: Gpu) -> tuple[int, int]:
    """Runs that the decode kernel takes, and query tokens in each."""
    most_rows = decode_config.MAX_ROWS
    if not call.causal and not gpu.is_hopper:
        most_rows = portable_config.most_rows(
            head_dim=call.q.shape[-1],
            itemsize=call.k_cache.dtype.itemsize,
            compute_capability=gpu.compute_capability,
        )
    if isinstance(call, PackedArguments):
        run = max(1, most_rows // call.group)
        return -(-call.q.shape[0] // run) + call.lengths.shape[0], run
    num_runs, run = query_runs.runs_of(call.q.shape[1], call.group, most_rows)
    return call.q.shape[0] * num_runs, run


def _decode_kernel(gpu: Gpu) -> Kernel:
    return "paged_decode" if gpu.is_hopper else "portable_decode"


def _planned_kernel(call: Call, gpu: Gpu) -> Kernel:
    rows, itemsize = call.q.shape[1] * call.group, call.k_cache.dtype.itemsize
    is_portable = portable_follows(gpu, rows=rows, itemsize=itemsize, has_tree=call.has_tree)
    return "portable_decode" if is_portable else "paged_decode"


def _at_once(call: Call, gpu: Gpu, kernel: Kernel) -> int:
    """For how many partitions of a KV head at the same time its plan is made."""
    rows = call.q.shape[1] * call.group
    by_portable = kernel == "portable_decode"
    return programs_at_once(gpu, num_kv_heads=call.k_cache.shape[2], rows=rows, by_portable=by_portable)


def _total(call: Call, gpu: Gpu) -> int:
    return partition_plan.default_total(call.q.shape[0], _at_once(call, gpu, _planned_kernel(call, gpu)))


def follows(call: Call, total_partitions: int) -> bool:
    """Whether a kernel follows a plan of so many partitions for this call: not for one sequence, queries that are not
    causal, prompts in several runs, more partitions than the grid takes, nor if the partials need too much memory."""
    if isinstance(call, PackedArguments) or not call.causal or call.q.shape[0] == 1:
        return False
    num_runs, run = query_runs.runs_of(call.q.shape[1], call.group)
    rows_first = decode_config.rows_come_first(q_len=run, group=call.group, itemsize=call.k_cache.dtype.itemsize)
    rows = filled_rows(run, call.group, rows_first=rows_first)
    num_bytes = total_partitions * call.k_cache.shape[2] * rows * padded_width(call.q.shape[-1]) * 4
    return num_runs == 1 and total_partitions <= decode_config.MAX_SEQS and num_bytes <= PARTIAL_BYTES


def are_uneven(call: Call, gpu: Gpu, known: Known = NOTHING) -> bool:
    """Whether some sequences may be much longer than the others: in wide tables, or if the pool can fill only a part of
    them."""
    seqs, (num_blocks, block_size, kv_heads, _) = call.lengths.shape[0], call.k_cache.shape
    visible = _visible(call, known)
    # H100, in tables for 131072, with a plan and without: 8 x 1024, one of 131072, 196, 515, of 8 bits 102, 411, of 64
    # rows 198, 646; 64 x U(1..8192) 366, 360, of 8 bits 198, 198. With none longer: 64 x 4096 353, 351; 24 x 4096 142,
    # 135; 8 x 8192 93, 94, of 8 bits 51, 48, of 64 rows 97, 95, of one KV head 19.3, 16.5. [plan_kernels_h100 of
    # benchmarks/results/decisions/]
    if visible > WIDE:
        return True
    most_of_mean = seqs * visible / (num_blocks * block_size)
    # More programs even each other out. H100, with a plan and without: 8 x U(1..8192), 3 times the mean, 36.8, 38.8; 64
    # with one of 4096, 4 times the mean, 104.9, 98.7; 64 x 8192 / 1, / 2, ..., 14 times, 58.2, 61.3; 64 with one of
    # 32768, 22 times, 136.7, 161.9; 16 with one of 8192, 6 times, 38.7, 40.4; 64 with one, 7 times, 111.8, 104.3.
    # [plans_h100 of benchmarks/results/decisions/]
    return most_of_mean > 2 + 1.5 * seqs * kv_heads / gpu.num_sms


def _visible(call: Call, known: Known) -> int:
    """The most tokens that a query can see, as far as is known beforehand."""
    return call.capacity if known.window is None else min(call.capacity, known.window)


def is_wide_tree(call: Call) -> bool:
    """Whether there is a tree that only the prefill kernel takes: the decode kernel's runs have none."""
    return call.has_tree and (
        isinstance(call, PackedArguments) or call.q.shape[1] * call.group > decode_config.MAX_ROWS
    )


def _check_options(call: Call) -> None:
    if call.k_cache.dtype.itemsize > 1 and (call.options.k_scale is not None or call.options.v_scale is not None):
        raise NotImplementedError(
            "the Mosaic GPU kernels take k_scale and v_scale with 8-bit caches; "
            f'got k_cache.dtype={call.k_cache.dtype!s}. Pass implementation="xla".'
        )


def _check_tree(call: Call, gpu: Gpu, known: Known) -> None:
    if not call.has_tree:
        return
    # Both count from a token's depth; the kernels know its place only.
    if call.options.sliding_window is not None or call.options.alibi_slopes is not None:
        raise NotImplementedError(
            "the Mosaic GPU kernels take a tree_mask without sliding_window and alibi_slopes. "
            'Pass implementation="xla".'
        )
    if not is_wide_tree(call):
        return
    if known.num_partitions not in (None, 1):
        raise NotImplementedError(
            "the prefill kernel, which takes a tree_mask with query_starts or of more than "
            f"{decode_config.MAX_ROWS} rows (q_len * heads / kv_heads), chooses its partitions itself; "
            f"got num_partitions={known.num_partitions}. Leave it out, or pass 1."
        )
    _check_prefill(call, gpu)


def _prefill_takes(call: Call, gpu: Gpu) -> bool:
    try:
        _check_prefill(call, gpu)
    except NotImplementedError:
        return False
    return True


def _check_prefill(call: Call, gpu: Gpu) -> None:
    prefill_config.check_supported(
        head_dim=call.q.shape[-1],
        block_size=call.block_size,
        q_dtype=call.q.dtype,
        cache_dtype=call.k_cache.dtype,
        compute_capability=gpu.compute_capability,
    )


def _check_decode(call: Call, gpu: Gpu) -> None:
    if call.group > decode_config.MAX_ROWS:
        raise NotImplementedError(
            f"the decode kernel takes up to {decode_config.MAX_ROWS} query heads a KV head; got group={call.group}."
        )
    num_runs, run = _runs(call, gpu)
    check = decode_config.check_supported if gpu.is_hopper else portable_config.check_supported
    check(
        head_dim=call.q.shape[-1],
        block_size=call.block_size,
        group=call.group,
        q_len=run,
        q_dtype=call.q.dtype,
        cache_dtype=call.k_cache.dtype,
        compute_capability=gpu.compute_capability,
    )
    if num_runs > decode_config.MAX_SEQS:
        seqs, tokens, group = call.lengths.shape[0], call.q.shape[-3], call.group
        name = "tokens" if isinstance(call, PackedArguments) else "q_len"
        raise NotImplementedError(
            f"the decode kernel takes up to {decode_config.MAX_SEQS} runs of query tokens in a call; got {seqs=}, "
            f"{name}={tokens}, {group=}: {num_runs} runs of {run}. Pass fewer sequences or query tokens at a time."
        )
