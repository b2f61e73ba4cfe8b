"""Paged attention by the Mosaic GPU kernels: what they take, and how many partitions they are given."""

import functools
from typing import Any

import jax

from jaxpaged import _xla
from jaxpaged._arguments import AttentionArguments
from pallas_kernels import decode_config, paged_decode


def attend(a: AttentionArguments, *, num_partitions: int | None) -> tuple[jax.Array, jax.Array]:
    """Returns out [seqs, q_len, heads, head_dim] in q's dtype and lse f32 [seqs, q_len, heads].

    What `check_supported` lets through.
    """
    num_sms, _ = _gpu()
    return _launch(config_of(a, num_sms=num_sms, num_partitions=num_partitions), None, a)


def config_of(a: AttentionArguments, *, num_sms: int, num_partitions: int | None) -> decode_config.Config:
    return decode_config.default_config(
        seqs=a.q.shape[0],
        kv_heads=a.k_cache.shape[2],
        group=a.group,
        q_len=a.q.shape[1],
        head_dim=a.q.shape[-1],
        capacity=a.block_tables.shape[1] * a.block_size,
        num_sms=num_sms,
        num_partitions=num_partitions,
    )


def check_supported(a: AttentionArguments) -> None:
    """Raises `NotImplementedError` where the kernels, or the GPU, cannot; the message names the limit and the value."""
    if a.k_scale is not None or a.v_scale is not None:
        raise NotImplementedError(
            f"the Mosaic GPU kernels take no k_scale or v_scale yet; got k_cache.dtype={a.k_cache.dtype!s}. "
            'Pass implementation="xla".'
        )
    _, compute_capability = _gpu()
    decode_config.check_supported(
        head_dim=a.q.shape[-1],
        block_size=a.block_size,
        group=a.group,
        q_len=a.q.shape[1],
        q_dtype=a.q.dtype,
        cache_dtype=a.k_cache.dtype,
        compute_capability=compute_capability,
    )


# Jitted by itself: otherwise every layer of a model lowers the kernels again, 0.4 s each.
@functools.partial(jax.jit, static_argnums=(0, 1))
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _launch(config: decode_config.Config, interpret: Any, a: AttentionArguments) -> tuple[jax.Array, jax.Array]:
    return paged_decode.launch(
        a.q,
        a.k_cache,
        a.v_cache,
        a.block_tables,
        a.lengths,
        scale=a.scale,
        sliding_window=a.sliding_window,
        logits_soft_cap=a.logits_soft_cap,
        alibi_slopes=a.alibi_slopes,
        sinks=a.sinks,
        config=config,
        interpret=interpret,
    )


@_launch.__wrapped__.defjvp  # type: ignore[attr-defined]
def _launch_jvp(config: decode_config.Config, interpret: Any, primals: tuple, tangents: tuple) -> tuple:
    # The kernels have no backward pass: a step that is differentiated computes what it needs through XLA.
    return jax.jvp(functools.partial(_xla.attend, num_partitions=1), primals, tangents)


def _gpu() -> tuple[int, float]:
    """SMs and compute capability of the GPU that JAX uses by default."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise NotImplementedError(f"the Mosaic GPU kernels need an NVIDIA GPU; got {device.platform=}.")
    return int(device.core_count), float(device.compute_capability)
