"""Paged attention by the Mosaic GPU kernels: what they take, which of them gets a call, and how many partitions."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged import _device
from jaxpaged._attention import decode, packed, query_runs, xla
from jaxpaged._attention.arguments import AttentionArguments, PackedArguments
from jaxpaged._attention.kernel_call import call_kernel
from jaxpaged._attention.partitions import NumPartitions
from pallas_kernels import decode_config, portable_config, prefill_config
from pallas_kernels.partition_plan import PartitionPlan

WIDE = 8192  # tokens; narrower tables hold no sequence that takes long by itself


def attend(
    a: AttentionArguments, *, num_partitions: NumPartitions, window: int | None = None, falls_back: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns out [seqs, q_len, heads, head_dim] in q's dtype and lse f32 [seqs, q_len, heads].

    What `check_supported` lets through. `window`: the sliding window, in tokens, where it is known beforehand.
    `falls_back`: XLA computes it where it is lowered for another platform.
    """
    gpu = _device.gpu()
    if num_partitions is None and are_uneven(a, gpu.num_sms, window):
        num_partitions = decode.plan_of(a, gpu)
    if isinstance(num_partitions, PartitionPlan):
        if decode.follows(a, num_partitions.total_partitions):
            return decode.attend(a, plan=num_partitions, window=window, falls_back=falls_back)
        num_partitions = None
    return _attend_evenly(a, num_partitions, window, falls_back)


def _attend_evenly(
    a: AttentionArguments, num_partitions: int | None, window: int | None, falls_back: bool
) -> tuple[jax.Array, jax.Array]:
    """As many partitions for each sequence."""
    gpu = _device.gpu()
    prompts = _prompt_config_of(a, gpu, num_partitions, window)
    if prompts is not None:
        out, lse = _launch_packed(prompts, None, _packed(a), falls_back)
        return out.reshape(a.q.shape), lse.reshape(a.q.shape[:3])
    if not a.causal:
        most_rows = decode_config.MAX_ROWS
        if not gpu.is_hopper:
            most_rows = portable_config.most_rows(
                head_dim=a.q.shape[-1],
                itemsize=a.k_cache.dtype.itemsize,
                compute_capability=gpu.compute_capability,
            )
        folded = query_runs.fold(a, most_rows=most_rows)
        out, lse = _attend_evenly(folded, num_partitions, window, falls_back)
        return query_runs.unfold(out, a), query_runs.unfold(lse, a)
    return decode.attend(a, num_partitions=num_partitions, window=window, falls_back=falls_back)


def attend_packed(
    p: PackedArguments, *, num_partitions: int | None, window: int | None = None, falls_back: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns out [tokens, heads, head_dim] in q's dtype and lse f32 [tokens, heads]: see `attend`."""
    gpu = _device.gpu()
    if num_partitions in (None, 1) and _prefill_takes(p, gpu):
        tokens_of_item = prefill_config.heads_and_tokens(p.group)[1]
        most_entries = -(-p.q.shape[0] // tokens_of_item) + p.lengths.shape[0]
        config = _prefill_config_of(p, gpu, most_entries, num_partitions, window)
        return _launch_packed(config, None, p, falls_back)
    runs = packed.runs_of(p, _run_of(p))
    out, lse = _attend_evenly(packed.cut(p, runs), num_partitions, window, falls_back)
    return packed.join(out, lse, p, runs)


def _run_of(p: PackedArguments) -> int:
    """Query tokens of a sequence that the decode kernel works on together."""
    return max(1, decode_config.MAX_ROWS // p.group)


def _prompt_config_of(
    a: AttentionArguments, gpu: _device.Gpu, num_partitions: int | None, window: int | None
) -> prefill_config.Config | None:
    """How the prefill kernel takes this call; None: the decode kernel does, as it does what is one run of it."""
    seqs, q_len, heads, _ = a.q.shape
    num_runs, _ = query_runs.runs_of(q_len, a.group)
    if not is_wide_tree(a) and (num_runs == 1 or num_partitions not in (None, 1) or not _prefill_takes(a, gpu)):
        return None
    num_entries = seqs * -(-q_len // prefill_config.heads_and_tokens(a.group)[1])
    config = _prefill_config_of(a, gpu, num_entries, num_partitions, window)
    # Fewer items leave SMs idle, unless there are keys for several parts. H100, us: 256 tokens after 8192 take 81.6 in
    # two parts, 90.2 in runs of the decode kernel. [prefill_parts_h100 of benchmarks/results/decisions/]
    num_programs = num_entries * (heads // config.heads) * config.num_parts
    is_filled = num_programs > gpu.num_sms or (config.num_parts > 1 and 4 * num_programs > 3 * gpu.num_sms)
    return config if is_filled or is_wide_tree(a) else None


def are_uneven(a: AttentionArguments, num_sms: int, window: int | None = None) -> bool:
    """Whether some sequences may be much longer than the others: in wide tables, or where the pool can fill only a part
    of them."""
    seqs, (num_blocks, block_size, kv_heads, _) = a.q.shape[0], a.k_cache.shape
    # H100, in tables for 131072, with a plan and without: 8 x 1024, one of 131072, 196, 515, of 8 bits 102, 411, of 64
    # rows 198, 646; 64 x U(1..8192) 366, 360, of 8 bits 198, 198. With none longer: 64 x 4096 353, 351; 24 x 4096 142,
    # 135; 8 x 8192 93, 94, of 8 bits 51, 48, of 64 rows 97, 95, of one KV head 19.3, 16.5. [plan_kernels_h100 of
    # benchmarks/results/decisions/]
    if _visible(a, window) > WIDE:
        return True
    most_of_mean = seqs * _visible(a, window) / (num_blocks * block_size)
    # More programs even each other out. H100, with a plan and without: 8 x U(1..8192), 3 times the mean, 36.8, 38.8; 64
    # with one of 4096, 4 times the mean, 104.9, 98.7; 64 x 8192 / 1, / 2, ..., 14 times, 58.2, 61.3; 64 with one of
    # 32768, 22 times, 136.7, 161.9; 16 with one of 8192, 6 times, 38.7, 40.4; 64 with one, 7 times, 111.8, 104.3.
    # [plans_h100 of benchmarks/results/decisions/]
    return most_of_mean > 2 + 1.5 * seqs * kv_heads / num_sms


def _visible(a: AttentionArguments | PackedArguments, window: int | None) -> int:
    """The most tokens that a query can see, as far as is known beforehand."""
    return a.capacity if window is None else min(a.capacity, window)


def _prefill_takes(a: AttentionArguments | PackedArguments, gpu: _device.Gpu) -> bool:
    try:
        _check_prefill(a, gpu)
    except NotImplementedError:
        return False
    return True


def _check_prefill(a: AttentionArguments | PackedArguments, gpu: _device.Gpu) -> None:
    prefill_config.check_supported(
        head_dim=a.q.shape[-1],
        block_size=a.block_size,
        q_dtype=a.q.dtype,
        cache_dtype=a.k_cache.dtype,
        compute_capability=gpu.compute_capability,
    )


def _prefill_config_of(
    a: AttentionArguments | PackedArguments,
    gpu: _device.Gpu,
    num_entries: int,  # of its work list, at most
    num_partitions: int | None,
    window: int | None,
) -> prefill_config.Config:
    heads, _ = prefill_config.heads_and_tokens(a.group)
    num_items = num_entries * (a.q.shape[-2] // heads)
    num_parts = 1  # asked for one, the bits are those of one
    if num_partitions is None:
        num_parts = prefill_config.default_parts(num_items=num_items, visible=_visible(a, window), num_sms=gpu.num_sms)
    return prefill_config.default_config(
        group=a.group,
        head_dim=a.q.shape[-1],
        num_sms=gpu.num_sms,
        num_parts=num_parts,
        causal=a.causal,
        itemsize=a.k_cache.dtype.itemsize,
    )


def check_supported(a: AttentionArguments | PackedArguments, *, num_partitions: int | None = None) -> None:
    """Raises `NotImplementedError` where the kernels, or the GPU, cannot; the message names the limit and the value."""
    if a.k_cache.dtype.itemsize > 1 and (a.options.k_scale is not None or a.options.v_scale is not None):
        raise NotImplementedError(
            "the Mosaic GPU kernels take k_scale and v_scale with 8-bit caches; "
            f'got k_cache.dtype={a.k_cache.dtype!s}. Pass implementation="xla".'
        )
    gpu = _device.gpu()
    _check_tree(a, gpu, num_partitions)
    if is_wide_tree(a):
        return
    if isinstance(a, PackedArguments):
        if num_partitions in (None, 1) and _prefill_takes(a, gpu):
            return
        run = _run_of(a)
        a = jax.eval_shape(lambda p: packed.cut(p, packed.runs_of(p, run)), a)
    (seqs, q_len, _, head_dim), group = a.q.shape, a.group
    num_runs, run = query_runs.runs_of(q_len, group)
    if group > decode_config.MAX_ROWS:
        raise NotImplementedError(
            f"the decode kernel takes up to {decode_config.MAX_ROWS} query heads a KV head; got {group=}."
        )
    check = decode_config.check_supported if gpu.is_hopper else portable_config.check_supported
    check(
        head_dim=head_dim,
        block_size=a.block_size,
        group=group,
        q_len=run,
        q_dtype=a.q.dtype,
        cache_dtype=a.k_cache.dtype,
        compute_capability=gpu.compute_capability,
    )
    if seqs * num_runs > decode_config.MAX_SEQS:
        raise NotImplementedError(
            f"the decode kernel takes up to {decode_config.MAX_SEQS} runs of query tokens in a call; got {seqs=}, "
            f"{q_len=}, {group=}: {seqs * num_runs} runs of {run}. Pass fewer sequences or query tokens at a time."
        )


def is_wide_tree(a: AttentionArguments | PackedArguments) -> bool:
    """Whether there is a tree that only the prefill kernel takes: the decode kernel's runs have none."""
    return a.has_tree and (isinstance(a, PackedArguments) or a.q.shape[1] * a.group > decode_config.MAX_ROWS)


def _check_tree(a: AttentionArguments | PackedArguments, gpu: _device.Gpu, num_partitions: int | None) -> None:
    """Raises `NotImplementedError` for a tree that the Mosaic GPU kernels do not take."""
    if not a.has_tree:
        return
    if not gpu.is_hopper:
        raise NotImplementedError(
            "the portable decode kernel takes no tree_mask; "
            f'got compute_capability={gpu.compute_capability}. Pass implementation="xla".'
        )
    # Both count from a token's depth; the kernels know its place only.
    if a.options.sliding_window is not None or a.options.alibi_slopes is not None:
        raise NotImplementedError(
            "the Mosaic GPU kernels take a tree_mask without sliding_window and alibi_slopes. "
            'Pass implementation="xla".'
        )
    if not is_wide_tree(a):
        return
    if num_partitions not in (None, 1):
        raise NotImplementedError(
            "the prefill kernel, which takes a tree_mask with query_starts or of more than "
            f"{decode_config.MAX_ROWS} rows (q_len * heads / kv_heads), chooses its partitions itself; "
            f"got {num_partitions=}. Leave it out, or pass 1."
        )
    _check_prefill(a, gpu)


def _prompts(
    config: prefill_config.Config, interpret: Any, falls_back: bool, p: PackedArguments
) -> tuple[jax.Array, jax.Array]:
    token_bytes = 2 * p.k_cache.shape[2] * p.q.shape[-1] * p.k_cache.dtype.itemsize

    def launch(p: PackedArguments) -> tuple[jax.Array, jax.Array]:
        from pallas_kernels import _interpret, paged_prefill  # here, so that only its callers import Mosaic

        work = paged_prefill.make_work_list(
            p.query_starts, p.lengths, tokens=p.q.shape[0], token_bytes=token_bytes, config=config
        )
        options = dataclasses.replace(p.options, tree_bits=packed.tree_by_place(p))
        with _interpret.interpret_mode(interpret):
            return paged_prefill.launch(p.q, p.k_cache, p.v_cache, p.block_tables, work, options, config=config)

    if interpret is not None:
        return launch(p)
    by_xla = functools.partial(xla.attend_packed, num_partitions=1)

    # One program is on each SM already, so that mapped calls follow one another.
    @jax.custom_batching.sequential_vmap
    def one_after_the_other(p: PackedArguments) -> tuple[jax.Array, jax.Array]:
        return call_kernel(launch, by_xla if falls_back else None, p)

    return one_after_the_other(p)


def _packed(a: AttentionArguments) -> PackedArguments:
    """As many query tokens of each sequence, one sequence after the other."""
    seqs, q_len, heads, head_dim = a.q.shape
    return PackedArguments(
        q=a.q.reshape(seqs * q_len, heads, head_dim),
        k_cache=a.k_cache,
        v_cache=a.v_cache,
        block_tables=a.block_tables,
        lengths=a.lengths,
        query_starts=jnp.arange(seqs + 1, dtype=jnp.int32) * q_len,
        options=a.options,
        tree_mask=None if a.tree is None else a.tree.bits.reshape(seqs * q_len, -1),
        causal=a.causal,
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 3))
def _launch_packed(
    config: prefill_config.Config, interpret: Any, p: PackedArguments, falls_back: bool = False
) -> tuple[jax.Array, jax.Array]:
    return _prompts(config, interpret, falls_back, p)


@_launch_packed.__wrapped__.defjvp  # type: ignore[attr-defined]
def _launch_packed_jvp(
    config: prefill_config.Config, interpret: Any, falls_back: bool, primals: tuple, tangents: tuple
) -> tuple:
    return jax.jvp(functools.partial(xla.attend_packed, num_partitions=None), primals, tangents)
