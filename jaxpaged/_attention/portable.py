"""Paged attention by the portable decode kernel: every GPU since Ampere, used by name on those that are not Hopper."""

import functools
from typing import Any

import jax

from jaxpaged import _device
from jaxpaged._attention import query_runs, xla
from jaxpaged._attention.arguments import AttentionArguments
from jaxpaged._attention.kernel_call import call_kernel
from pallas_kernels import portable_config


def attend(a: AttentionArguments, *, num_partitions: int | None, window: int | None) -> tuple[jax.Array, jax.Array]:
    """Returns out [seqs, q_len, heads, head_dim] in q's dtype and lse f32 [seqs, q_len, heads]."""
    return launch(config_of(a, _device.gpu(), num_partitions=num_partitions, window=window), None, a)


def config_of(
    a: AttentionArguments, gpu: _device.Gpu, *, num_partitions: int | None, window: int | None = None
) -> portable_config.Config:
    return portable_config.default_config(
        **query_runs.sizes_of(a),
        num_sms=gpu.num_sms,
        compute_capability=gpu.compute_capability,
        window=window,
        num_partitions=num_partitions,
    )


# Jitted by itself: otherwise every layer of a model lowers the kernel again.
@functools.partial(jax.jit, static_argnums=(0, 1))
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def launch(config: portable_config.Config, interpret: Any, a: AttentionArguments) -> tuple[jax.Array, jax.Array]:
    """Returns out [seqs, q_len, heads, head_dim] in q's dtype and lse f32 [seqs, q_len, heads]."""

    def kernel(a: AttentionArguments) -> tuple[jax.Array, jax.Array]:
        from pallas_kernels import portable_decode  # here, so that only its callers import Mosaic

        runs = query_runs.cut(a)
        arrays = runs.q, runs.k_cache, runs.v_cache, runs.block_tables, runs.lengths
        out, lse = portable_decode.launch(*arrays, runs.options, config=config, interpret=interpret)
        return query_runs.join(out, a), query_runs.join(lse, a)

    return kernel(a) if interpret is not None else call_kernel(kernel, None, a)


@launch.__wrapped__.defjvp  # type: ignore[attr-defined]
def _launch_jvp(config: portable_config.Config, interpret: Any, primals: tuple, tangents: tuple) -> tuple:
    return jax.jvp(functools.partial(xla.attend, num_partitions=None), primals, tangents)
