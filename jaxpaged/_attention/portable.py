"""Paged attention by the portable decode kernel: on Hopper for calls with a plan, by name for all on other GPUs."""

import functools
from typing import Any

import jax

from jaxpaged import _device
from jaxpaged._attention import query_runs, xla
from jaxpaged._attention.arguments import AttentionArguments
from jaxpaged._attention.kernel_call import call_kernel
from pallas_kernels import portable_config
from pallas_kernels._sizes import filled_rows, round_up
from pallas_kernels.partition_plan import PartitionPlan


def attend(
    a: AttentionArguments,
    *,
    num_partitions: int | None = None,
    plan: PartitionPlan | None = None,  # one that `follows`
    window: int | None,
    falls_back: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns out [seqs, q_len, heads, head_dim] in q's dtype and lse f32 [seqs, q_len, heads]."""
    config = config_of(a, _device.gpu(), num_partitions=num_partitions, planned=plan is not None, window=window)
    return launch(config, None, a, plan, falls_back)


def follows(a: AttentionArguments, total_partitions: int) -> bool:
    """Whether the kernel follows a plan of so many partitions for this call: not for one sequence, trees, queries that
    are not causal, prompts in several runs, more partitions than the grid takes, nor where the partials would need too
    much memory."""
    num_runs, run = query_runs.runs_of(a.q.shape[1], a.group)
    row_bytes = 4 * round_up(a.q.shape[-1], portable_config.COLUMNS)
    partial_bytes = filled_rows(run, a.group, rows_first=False) * row_bytes
    num_bytes = total_partitions * a.k_cache.shape[2] * partial_bytes
    fits = total_partitions <= portable_config.MAX_SEQS and num_bytes <= portable_config.PARTIAL_BYTES
    return a.q.shape[0] > 1 and num_runs == 1 and a.causal and not a.has_tree and fits


def config_of(
    a: AttentionArguments,
    gpu: _device.Gpu,
    *,
    num_partitions: int | None = None,
    planned: bool = False,
    window: int | None = None,
) -> portable_config.Config:
    return portable_config.default_config(
        **query_runs.sizes_of(a),
        num_sms=gpu.num_sms,
        compute_capability=gpu.compute_capability,
        window=window,
        num_partitions=num_partitions,
        planned=planned,
    )


# Jitted by itself: otherwise every layer of a model lowers the kernel again.
@functools.partial(jax.jit, static_argnums=(0, 1, 4))
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 4))
def launch(
    config: portable_config.Config,
    interpret: Any,
    a: AttentionArguments,
    plan: PartitionPlan | None = None,
    falls_back: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns out [seqs, q_len, heads, head_dim] in q's dtype and lse f32 [seqs, q_len, heads]."""

    def kernel(a: AttentionArguments, plan: PartitionPlan | None) -> tuple[jax.Array, jax.Array]:
        from pallas_kernels import _interpret, portable_decode  # here, so that only its callers import Mosaic

        runs = query_runs.cut(a)
        arrays = runs.q, runs.k_cache, runs.v_cache, runs.block_tables, runs.lengths
        with _interpret.interpret_mode(interpret):
            out, lse = portable_decode.launch(*arrays, runs.options, plan=plan, config=config)
        return query_runs.join(out, a), query_runs.join(lse, a)

    by_xla = (lambda a, _: xla.attend(a, num_partitions=1)) if falls_back else None
    return kernel(a, plan) if interpret is not None else call_kernel(kernel, by_xla, a, plan)


@launch.__wrapped__.defjvp  # type: ignore[attr-defined]
def _launch_jvp(
    config: portable_config.Config, interpret: Any, falls_back: bool, primals: tuple, tangents: tuple
) -> tuple:
    return jax.jvp(functools.partial(xla.attend, num_partitions=None), primals[:1], tangents[:1])
