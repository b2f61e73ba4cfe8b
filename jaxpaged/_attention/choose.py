"""Which kernel computes a call, and how: decided by shapes and the GPU, before anything runs.

Three kernels share the calls. The prefill kernel takes prompts: packed query tokens, more than 64 rows (query tokens
times heads of a KV head), and trees of that size. The decode kernels take up to 64 rows, and longer queries in runs:
the portable one is for all GPUs; on Hopper another takes more than 32 rows of 16 bits.
"""

import dataclasses
from typing import Any, Literal

from jaxpaged._attention import query_runs
from jaxpaged._attention.arguments import AttentionArguments, PackedArguments
from jaxpaged._attention.plan import follows, plan_pays, programs_at_once, visible
from jaxpaged._device import Gpu
from pallas_kernels import decode_config, partition_plan, portable_config, prefill_config

Call = AttentionArguments | PackedArguments
Kernel = Literal["paged_decode", "portable_decode", "paged_prefill"]  # a package of `pallas_kernels`
Config = decode_config.Config | portable_config.Config | prefill_config.Config


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
    if is_wide_tree(call) or (call.tokens_per_seq is None and _prefill_takes(call, gpu, known)):
        return by_prefill(call, gpu, known)
    _check_decode(call, gpu)
    total, by_portable = known.total_partitions, decode_kernel(call, gpu) == "portable_decode"
    if total is None and known.num_partitions is None and plan_pays(call, gpu, known.window, by_portable=by_portable):
        total = _default_total(call, gpu)
    return evenly(call, gpu, known) if total is None or not follows(call, total) else with_plan(call, gpu, known)


def with_plan(call: Call, gpu: Gpu, known: Known = NOTHING) -> Choice:
    """A decode kernel follows a plan."""
    planned, whole = Known(window=known.window), Known(num_partitions=1, window=known.window)
    kernel = decode_kernel(call, gpu)
    choice = by_decode(kernel, call, gpu, planned, planned=True)
    return dataclasses.replace(choice, mapped=by_decode(kernel, call, gpu, whole))


def evenly(call: Call, gpu: Gpu, known: Known = NOTHING) -> Choice:
    """The same number of partitions for each sequence."""
    is_long = call.tokens_per_seq is not None and query_runs.runs_of(call.tokens_per_seq, call.group)[0] > 1
    if is_long and _prefill_takes(call, gpu, known):
        choice = by_prefill(call, gpu, known)
        if _fills(choice.config, call, gpu):
            return choice
    choice = by_decode(decode_kernel(call, gpu), call, gpu, known)
    config: Any = choice.config
    if choice.kernel == "portable_decode" and known.num_partitions is None and config.num_partitions > 1:
        # Mapped calls whose partitions merge in memory run one after the other: see `pallas_kernels._launch`.
        mapped = by_decode(choice.kernel, call, gpu, dataclasses.replace(known, num_partitions=1))
        choice = dataclasses.replace(choice, mapped=mapped)
    return choice


def by_decode(kernel: Kernel, call: Call, gpu: Gpu, known: Known = NOTHING, *, planned: bool = False) -> Choice:
    """This decode kernel, with its default configuration, whatever the rules say."""
    num_runs, run = _runs(call, gpu)
    how: dict[str, Any] = dict(
        seqs=num_runs,
        kv_heads=call.kv_heads,
        # Query tokens that see the same become heads: see `query_runs`.
        group=call.group if call.causal else run * call.group,
        q_len=run if call.causal else 1,
        head_dim=call.head_dim,
        capacity=call.capacity,
        num_sms=gpu.num_sms,
        window=known.window,
        num_partitions=known.num_partitions,
        planned=planned,
    )
    config: Config
    if kernel == "portable_decode":
        config = portable_config.default_config(
            **how, itemsize=call.itemsize, compute_capability=gpu.compute_capability
        )
    else:
        config = decode_config.default_config(**how)
    return Choice(kernel, config, run, _at_once(call, gpu, kernel) if planned else None)


def by_prefill(call: Call, gpu: Gpu, known: Known) -> Choice:
    heads, _ = prefill_config.heads_and_tokens(call.group)
    num_items = _prefill_entries(call) * (call.q.shape[-2] // heads)
    num_parts = 1  # asked for one, the bits are those of one
    if known.num_partitions is None:
        seen = visible(call, known.window)
        num_parts = prefill_config.default_parts(num_items=num_items, visible=seen, num_sms=gpu.num_sms)
    config = prefill_config.default_config(
        group=call.group,
        head_dim=call.head_dim,
        num_sms=gpu.num_sms,
        num_parts=num_parts,
        causal=call.causal,
        itemsize=call.itemsize,
    )
    return Choice("paged_prefill", config)


def _prefill_entries(call: Call) -> int:
    """Of the work list, at most."""
    return _num_runs(call, prefill_config.heads_and_tokens(call.group)[1])


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
            head_dim=call.head_dim,
            itemsize=call.itemsize,
            compute_capability=gpu.compute_capability,
        )
    run = max(1, most_rows // call.group)
    if call.tokens_per_seq is not None:
        _, run = query_runs.runs_of(call.tokens_per_seq, call.group, most_rows)
    return _num_runs(call, run), run


def _num_runs(call: Call, run: int) -> int:
    """Runs of `run` query tokens, at most: none has tokens of two sequences."""
    if call.tokens_per_seq is None:
        return -(-call.q.shape[0] // run) + call.lengths.shape[0]
    return call.q.shape[0] * -(-call.tokens_per_seq // run)


def decode_kernel(call: Call, gpu: Gpu) -> Kernel:
    """The one for Hopper is faster with many rows of 16 bits, which are the M dimension of its products."""
    _, run = _runs(call, gpu)
    # [one_kernel_h200 of benchmarks/results/decisions/]
    many_rows = decode_config.rows_come_first(q_len=run, group=call.group, itemsize=call.itemsize)
    return "paged_decode" if gpu.is_hopper and many_rows else "portable_decode"


def _at_once(call: Call, gpu: Gpu, kernel: Kernel) -> int:
    """For how many partitions of a KV head at the same time its plan is made."""
    return programs_at_once(gpu, num_kv_heads=call.kv_heads, by_portable=kernel == "portable_decode")


def _default_total(call: Call, gpu: Gpu) -> int:
    """Partitions of the plan that is made for a call without one."""
    return partition_plan.default_total(call.lengths.shape[0], _at_once(call, gpu, decode_kernel(call, gpu)))


def is_wide_tree(call: Call) -> bool:
    """Whether there is a tree that only the prefill kernel takes: the decode kernel's runs have none."""
    if not call.has_tree or call.tokens_per_seq is None:
        return call.has_tree
    return call.tokens_per_seq * call.group > decode_config.MAX_ROWS


def _check_options(call: Call) -> None:
    if call.itemsize > 1 and (call.options.k_scale is not None or call.options.v_scale is not None):
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


def _prefill_takes(call: Call, gpu: Gpu, known: Known) -> bool:
    try:
        _check_prefill(call, gpu)
    except NotImplementedError:
        return False
    return known.num_partitions in (None, 1)


def _check_prefill(call: Call, gpu: Gpu) -> None:
    prefill_config.check_supported(
        head_dim=call.head_dim,
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
    for_hopper = decode_kernel(call, gpu) == "paged_decode"
    check = decode_config.check_supported if for_hopper else portable_config.check_supported
    check(
        head_dim=call.head_dim,
        block_size=call.block_size,
        group=call.group,
        q_len=run,
        q_dtype=call.q.dtype,
        cache_dtype=call.k_cache.dtype,
        compute_capability=gpu.compute_capability,
    )
    if num_runs > decode_config.MAX_SEQS:
        seqs, tokens, group = call.lengths.shape[0], call.q.shape[-3], call.group
        name = "tokens" if call.tokens_per_seq is None else "q_len"
        raise NotImplementedError(
            f"the decode kernel takes up to {decode_config.MAX_SEQS} runs of query tokens in a call; got {seqs=}, "
            f"{name}={tokens}, {group=}: {num_runs} runs of {run}. Pass fewer sequences or query tokens at a time."
        )
