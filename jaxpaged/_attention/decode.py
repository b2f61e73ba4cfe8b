"""Paged attention by a decode kernel: the one for Hopper, or on other GPUs, and for some plans, the portable one."""

import dataclasses
import functools
from typing import Any

import jax

from jaxpaged import _device
from jaxpaged._attention import query_runs, xla
from jaxpaged._attention.arguments import AttentionArguments
from jaxpaged._attention.kernel_call import call_kernel
from jaxpaged._attention.partitions import portable_follows, programs_at_once
from pallas_kernels import decode_config, partition_plan, portable_config
from pallas_kernels._sizes import filled_rows, padded_width
from pallas_kernels.partition_plan import PartitionPlan

Config = decode_config.Config | portable_config.Config

PARTIAL_BYTES = 128 * 1024 * 1024  # the most memory for the partials of a plan


def attend(
    a: AttentionArguments,
    *,
    num_partitions: int | None = None,
    plan: PartitionPlan | None = None,  # one that `follows`
    window: int | None,
    falls_back: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns out [seqs, q_len, heads, head_dim] in q's dtype and lse f32 [seqs, q_len, heads]."""
    gpu = _device.gpu()
    if plan is None:
        return launch(config_of(a, gpu, num_partitions=num_partitions, window=window), None, a, None, falls_back)
    mapped = config_of(a, gpu, num_partitions=1, window=window)
    return launch(config_of(a, gpu, planned=True, window=window), None, a, plan, falls_back, mapped)


def follows(a: AttentionArguments, total_partitions: int) -> bool:
    """Whether the kernel follows a plan of so many partitions for this call: not for one sequence, queries that are not
    causal, prompts in several runs, more partitions than the grid takes, nor where the partials would need too much
    memory."""
    num_runs, run = query_runs.runs_of(a.q.shape[1], a.group)
    rows_first = decode_config.rows_come_first(q_len=run, group=a.group, itemsize=a.k_cache.dtype.itemsize)
    rows = filled_rows(run, a.group, rows_first=rows_first)
    num_bytes = total_partitions * a.k_cache.shape[2] * rows * padded_width(a.q.shape[-1]) * 4
    fits = total_partitions <= decode_config.MAX_SEQS and num_bytes <= PARTIAL_BYTES
    return a.q.shape[0] > 1 and num_runs == 1 and a.causal and fits


def plan_of(a: AttentionArguments, gpu: _device.Gpu) -> PartitionPlan | None:
    """The plan of this call; None: the kernel follows none."""
    q_len, kv_heads = a.q.shape[1], a.k_cache.shape[2]
    by_portable = _portable_takes(a, gpu, planned=True)
    at_once = programs_at_once(gpu, num_kv_heads=kv_heads, rows=q_len * a.group, by_portable=by_portable)
    if not follows(a, partition_plan.default_total(a.q.shape[0], at_once)):
        return None
    return partition_plan.default(a.lengths, a.options.sliding_window, q_len=q_len, at_once=at_once)


def config_of(a: AttentionArguments, gpu: _device.Gpu, *, planned: bool = False, **how: Any) -> Config:
    """`how`: num_partitions, or None; window, in tokens, where it is known."""
    of_kernel = portable_config_of if _portable_takes(a, gpu, planned) else hopper_config_of
    return of_kernel(a, gpu, planned=planned, **how)


def hopper_config_of(a: AttentionArguments, gpu: _device.Gpu, **how: Any) -> decode_config.Config:
    scales = a.options.k_scale, a.options.v_scale
    token_scales = sum(scale is not None and scale.ndim == 3 for scale in scales)
    how |= query_runs.sizes_of(a) | dict(num_sms=gpu.num_sms, fast_memory=gpu.fast_memory)
    return decode_config.default_config(**how, token_scales=token_scales)


def portable_config_of(a: AttentionArguments, gpu: _device.Gpu, **how: Any) -> portable_config.Config:
    how |= query_runs.sizes_of(a) | dict(num_sms=gpu.num_sms, compute_capability=gpu.compute_capability)
    return portable_config.default_config(**how)


def _portable_takes(a: AttentionArguments, gpu: _device.Gpu, planned: bool) -> bool:
    if not planned:
        return not gpu.is_hopper
    rows, itemsize = a.q.shape[1] * a.group, a.k_cache.dtype.itemsize
    return portable_follows(gpu, rows=rows, itemsize=itemsize, has_tree=a.has_tree)


# Jitted by itself: otherwise every layer of a model lowers the kernel again, 0.4 s each.
@functools.partial(jax.jit, static_argnums=(0, 1, 4, 5))
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 4, 5))
def launch(
    config: Config,
    interpret: Any,
    a: AttentionArguments,
    plan: PartitionPlan | None = None,
    falls_back: bool = False,
    mapped: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns out [seqs, q_len, heads, head_dim] in q's dtype and lse f32 [seqs, q_len, heads].

    `falls_back`: XLA computes it where it is lowered for another platform. `mapped`: the configuration of mapped calls,
    which follow no plan; None: `config`.
    """

    def by_kernel(a: AttentionArguments, plan: PartitionPlan | None) -> tuple[jax.Array, jax.Array]:
        from pallas_kernels import _interpret, paged_decode, portable_decode  # only its callers import Mosaic

        kernel: Any = paged_decode if isinstance(config, decode_config.Config) else portable_decode
        runs = query_runs.cut(a)
        arrays = runs.q, runs.k_cache, runs.v_cache, runs.block_tables, runs.lengths
        options = dataclasses.replace(runs.options, tree_bits=None if runs.tree is None else runs.tree.bits)
        with _interpret.interpret_mode(interpret):
            out, lse = kernel.launch(*arrays, options, plan=plan, config=config)
        return query_runs.join(out, a), query_runs.join(lse, a)

    def call(a: AttentionArguments, plan: PartitionPlan | None) -> tuple[jax.Array, jax.Array]:
        by_xla = (lambda a, _: xla.attend(a, num_partitions=1)) if falls_back else None
        return by_kernel(a, plan) if interpret is not None else call_kernel(by_kernel, by_xla, a, plan)

    # Mapped calls that follow plans would wait for each other, and copy a mapped pool: see `pallas_kernels._launch`.
    @jax.custom_batching.custom_vmap
    def unless_mapped(a: AttentionArguments, plan: PartitionPlan) -> tuple[jax.Array, jax.Array]:
        return call(a, plan)

    @unless_mapped.def_vmap
    def without_plan(axis_size: int, is_mapped: Any, a: AttentionArguments, plan: PartitionPlan) -> Any:
        axes = jax.tree.map(lambda its: 0 if its else None, is_mapped[0])
        one = functools.partial(launch, mapped or config, interpret, plan=None, falls_back=falls_back)
        return jax.vmap(one, (axes,), axis_size=axis_size)(a), (True, True)

    return call(a, plan) if plan is None else unless_mapped(a, plan)


@launch.__wrapped__.defjvp  # type: ignore[attr-defined]
def _launch_jvp(
    config: Config, interpret: Any, falls_back: bool, mapped: Config | None, primals: tuple, tangents: tuple
) -> tuple:
    # The kernels have no backward pass: a step that is differentiated computes what it needs through XLA.
    return jax.jvp(functools.partial(xla.attend, num_partitions=None), primals[:1], tangents[:1])
