"""Traces paged decode and prefill for GPUs that are not there."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.common import partition_plan
from pallas_kernels.common.interface import AttentionOptions, Call, Shapes
from pallas_kernels.decode import config as decode_config
from pallas_kernels.decode import kernel as decode_kernel
from pallas_kernels.latent import config as latent_config
from pallas_kernels.latent import kernel as latent_kernel
from pallas_kernels.prefill import config as prefill_config
from pallas_kernels.prefill import kernel as prefill_kernel
from pallas_kernels.prefill.portable import config as portable_config
from pallas_kernels.prefill.portable import kernel as portable_kernel

# Of the decode kernel, beside the scales.
OPTIONS = ("sliding_window", "logits_soft_cap", "alibi_slopes", "sinks")


def option_types(shape, heads):
    return {
        "scale": shape((), jnp.float32),
        "sliding_window": shape((), jnp.int32),
        "logits_soft_cap": shape((), jnp.float32),
        "alibi_slopes": shape((heads,), jnp.float32),
        "sinks": shape((heads,), jnp.float32),
    }


def scale_types(shape, cache, scales):
    """Of k_scale and v_scale: tensor, head, token_head or None."""
    shapes = {"tensor": (), "head": cache.shape[2:3], "token_head": cache.shape[:3]}
    named = zip(("k_scale", "v_scale"), scales, strict=True)
    return {name: shape(shapes[scale], jnp.float32) for name, scale in named if scale is not None}


def traced_prefill(
    *,
    kv_heads=2,
    head_dim=128,
    block_size=16,
    group=4,
    dtype=jnp.bfloat16,
    causal=True,
    options=(),
    cache_dtype=None,
    scales=(None, None),
    sharding=None,
    portable_for=None,
    **changes,  # of the default config
):
    """The traced call of the prefill kernel on 300 tokens of 3 sequences; of the portable one for a GPU of the compute
    capability `portable_for`, if it is given."""
    shape, heads, tokens = functools.partial(jax.ShapeDtypeStruct, sharding=sharding), kv_heads * group, 300
    q, cache = (
        shape((tokens, heads, head_dim), dtype),
        shape((64, block_size, kv_heads, head_dim), cache_dtype or dtype),
    )
    if portable_for is None:
        config = prefill_config.default_config(Shapes.of(q, cache, cache), num_sms=132)
    else:
        config = portable_config.default_config(Shapes.of(q, cache, cache), compute_capability=portable_for)
    config = dataclasses.replace(config, causal=causal, **changes)
    kernel = prefill_kernel if portable_for is None else portable_kernel
    types = option_types(shape, heads)

    @jax.jit
    def launch(*arrays, **named):
        *arrays, starts = arrays
        call = Call(*arrays, AttentionOptions(**named), head_dim, query_starts=starts, causal=causal)
        return kernel.launch(call, config)

    arrays = q, cache, cache, shape((3, 32), jnp.int32)
    sizes = shape((3,), jnp.int32), shape((4,), jnp.int32)
    named = {name: types[name] for name in ("scale", *options)} | scale_types(shape, cache, scales)
    return launch.trace(*arrays, *sizes, **named)


def traced_decode(
    *,
    seqs=2,
    kv_heads=2,
    capacity=1024,
    head_dim=128,
    value_dim=None,
    is_latent=False,
    block_size=16,
    group=4,
    q_len=1,
    dtype=jnp.bfloat16,
    num_partitions=1,
    options=(),
    cache_dtype=None,
    scales=(None, None),
    compute_capability=9.0,
    total_partitions=None,  # of a plan
    sharding=None,
    **changes,  # of the default config
):
    """The traced call of the decode kernel, for a GPU of that compute capability, and its configuration."""
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    cache = shape((64, block_size, kv_heads, head_dim), cache_dtype or dtype)
    width = value_dim or head_dim
    values = None if is_latent else shape((*cache.shape[:3], width), cache.dtype)
    q = shape((seqs, q_len, kv_heads * group, head_dim), dtype)
    config = decode_config.default_config(
        Shapes.of(q, cache, values, value_dim, q_len=q_len),
        pairs=seqs * kv_heads,
        capacity=capacity,
        num_sms=132,
        compute_capability=compute_capability,
        num_partitions=num_partitions,
        planned=total_partitions is not None,
    )
    config = dataclasses.replace(config, at_once=total_partitions, **changes)
    types = option_types(shape, kv_heads * group) | {"tree_bits": shape((seqs, q_len, -(-q_len // 32)), jnp.uint32)}

    @jax.jit
    def launch(*arrays, **named):
        plan = None
        if total_partitions is not None:
            plan = partition_plan.make(arrays[-1], None, q_len=q_len, total_partitions=total_partitions)
        return decode_kernel.launch(Call(*arrays, AttentionOptions(**named), width, plan=plan), config)

    arrays = q, cache, values, shape((seqs, capacity // block_size), jnp.int32), shape((seqs,), jnp.int32)
    named = {name: types[name] for name in ("scale", *options)} | scale_types(shape, cache, scales)
    return launch.trace(*arrays, **named), config


def traced_latent(*, heads=128, block_size=64, num_partitions=1, dtype=jnp.bfloat16, sharding=None):
    """The traced call of the kernel for latents."""
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    arrays = (
        shape((2, 1, heads, 576), dtype),
        shape((64, block_size, 1, 576), dtype),
        None,
        shape((2, 1024 // block_size), jnp.int32),
        shape((2,), jnp.int32),
        shape((), jnp.float32),
    )

    @jax.jit
    def launch(*arrays):
        *arrays, scale = arrays
        return latent_kernel.launch(Call(*arrays, AttentionOptions(scale), 512), latent_config.Config(num_partitions))

    return launch.trace(*arrays)


def mosaic_for(compute_capability):
    """Mosaic GPU lowers for this GPU; by default, without a GPU, for a Hopper one."""
    arch = divmod(round(10 * compute_capability), 10)
    return mock.patch.object(utils, "_infer_arch", return_value=arch)  # there is no public way to say
