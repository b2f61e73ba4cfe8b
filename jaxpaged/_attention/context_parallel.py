"""Attention over caches that are sharded within blocks: each device attends to its own tokens, then one merge."""

from __future__ import annotations

import dataclasses
import functools
from typing import Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._attention.call import check_call
from jaxpaged._attention.merge import merge_attention
from jaxpaged._attention.public import ContextKeywords, paged_attention, whole_attention
from jaxpaged._attention.runs import cut_uniform, join_uniform
from jaxpaged._debug import unchecked
from jaxpaged._integers import as_int32
from pallas_kernels.common import merge_parts
from pallas_kernels.common.interface import Call

RUN_TOKENS = 128  # that attend together to the blocks before their run; longer runs read more of their own blocks alone


@unchecked
def context_parallel_attention(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike | None,
    block_tables: ArrayLike,
    lengths: ArrayLike,
    *,
    axis_name: str,
    sinks: ArrayLike | None = None,
    **options: Unpack[ContextKeywords],
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` of the newest tokens of each sequence, over tokens on all devices of a mesh axis.

    For use inside `jax.shard_map`. Every block is divided evenly among the n devices: device i holds the i-th
    `block_size / n` tokens, where `block_size` is the allocator's. Tables, lengths and allocator are the same on all
    devices. Make the cache with the allocator's block size, shard it with `PartitionSpec(None, axis_name)`, and write
    with `context_parallel_slots`. Another mesh axis may shard the heads of q, caches, sinks and scales.

    Each device attends to its own tokens. One `psum` of `n * (head_dim + 1) * 4` bytes per query and head then collects
    the outputs and lses; with several tokens per sequence, a `psum` of the lses and one of the weighted outputs.

    Several tokens per sequence are computed in runs of at most 128. The tokens of a run attend together to the blocks
    before the run, and separately to the blocks of the run. A GPU's kernels support up to 65,535 of them in a call.

    The layout is fixed when you create the cache. Two H200s are faster than one from about 15,000 tokens of
    a sequence on (32/8 heads, head_dim 128), and 1.6 times as fast for the last 512 tokens of a prompt of 32,768. For a
    smaller pool, use a mesh axis of one device.

    Args:
        q: `[seqs, heads, head_dim]` or `[seqs, q_len, heads, head_dim]`, as in `paged_attention`, the same on all
            devices of the axis.
        k_cache: this device's keys, `[blocks, block_size / n, kv_heads, head_dim]`.
        v_cache: this device's values, as `k_cache`.
        block_tables: int32 `[seqs, max_blocks]`, the allocator's tables.
        lengths: int32 `[seqs]`, the allocator's lengths, in tokens.
        axis_name: name of the mesh axis.
        sinks: f32 `[heads]`, as in `paged_attention`.
        options: `scale`, `logits_soft_cap`, `k_scale`, `v_scale`, `num_partitions` and `implementation` of
            `paged_attention`; the scales are this device's.

    Returns:
        The output, in q's shape and dtype, and the lse, f32 `[seqs, heads]` or `[seqs, q_len, heads]`; the same on
            all devices of the axis. Each device's output is rounded to q's dtype before the merge in float32.

    Raises:
        ValueError: as `paged_attention`.
        NotImplementedError: as `paged_attention`.

    Example:
        >>> import functools, jax, jax.numpy as jnp, jaxpaged
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("devices",))
        >>> cache = jaxpaged.KVCache.create(num_blocks=8, block_size=32, num_kv_heads=2, head_dim=64)
        >>> cache = jax.device_put(cache, NamedSharding(mesh, P(None, "devices")))
        >>> tables, lengths = jnp.array([[3, 5]]), jnp.array([40])
        >>> attend = functools.partial(jaxpaged.ops.context_parallel_attention, axis_name="devices")
        >>> specs = P(), P(None, "devices"), P(None, "devices"), P(), P()
        >>> attend = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
        >>> out, lse = attend(jnp.ones((1, 4, 64), jnp.bfloat16), cache.k, cache.v, tables, lengths)
        >>> out.shape
        (1, 4, 64)

    References:
        Dao et al., Flash-Decoding for long-context inference, 2023; here its parts are devices.
    """
    arrays = q, k_cache, v_cache, block_tables, lengths
    checked = "scale", "k_scale", "v_scale", "value_dim"
    call = check_call(*arrays, sinks=sinks, **{name: x for name, x in options.items() if name in checked})  # type: ignore[arg-type]
    # The lengths count the tokens of all devices and may exceed what this device's part of the blocks can hold.
    call = dataclasses.replace(call, lengths=as_int32(lengths))
    if sinks is not None:  # only the first device applies them
        sinks = jnp.where(jax.lax.axis_index(axis_name) == 0, sinks, -jnp.inf)
    if call.q.shape[1] == 1:
        own_lengths = _own_lengths(call.lengths, call.block_size, axis_name)
        arrays = call.q, call.k_cache, call.v_cache, call.block_tables, own_lengths
        out, lse = paged_attention(*arrays, sinks=sinks, return_lse=True, **options)
    else:
        out, lse = _attend_in_runs(call, axis_name, sinks, options)
    merged, lse = _merge(out, lse, axis_name)
    merged = merged.astype(out.dtype)
    return (merged[:, 0], lse[:, 0]) if jnp.ndim(q) == 3 else (merged, lse)


def context_parallel_slots(slots: ArrayLike, *, block_size: int, axis_name: str) -> jax.Array:
    """This device's slots of new tokens, for a cache that `context_parallel_attention` reads.

    Args:
        slots: int32 `[...]`, the allocator's slots.
        block_size: block size of this device's cache, `cache.k.shape[-3]`.
        axis_name: name of the mesh axis.

    Returns:
        int32 `[...]`; -1, which is not written, for tokens of other devices.
    """
    slots = as_int32(slots)
    size = block_size * jax.lax.axis_size(axis_name)
    offsets = slots % size - jax.lax.axis_index(axis_name) * block_size
    is_own = (slots >= 0) & (offsets >= 0) & (offsets < block_size)
    return jnp.where(is_own, slots // size * block_size + offsets, -1)


def _attend_in_runs(
    call: Call, axis_name: str, sinks: jax.Array | None, options: ContextKeywords
) -> tuple[jax.Array, jax.Array]:
    """Attention over this device's tokens: out [seqs, q_len, heads, head_dim] and lse f32 [seqs, q_len, heads].

    In the blocks of its run, the number of this device's tokens that a query sees depends on the query's position. So
    there are two calls: one without a causal mask on all blocks before the run, and one on the blocks of the run, with
    each token as a sequence.
    """
    seqs, q_len, heads, head_dim = call.q.shape
    block_size, caches = call.block_size, (call.k_cache, call.v_cache)
    size = block_size * jax.lax.axis_size(axis_name)
    num_runs = -(-q_len // RUN_TOKENS)
    run = -(-q_len // num_runs)
    lengths = jnp.clip(call.lengths, 0, min(call.block_tables.shape[1] * size, 2**31 - 1))
    positions = jnp.maximum(lengths[:, None] + jnp.arange(-num_runs * run, 0, dtype=jnp.int32)[None], -1)
    blocks_before = jnp.maximum(positions[:, ::run], 0) // size  # [seqs, num_runs]

    cut = cut_uniform(call, run)
    arrays = cut.q, *caches, cut.block_tables, (blocks_before * block_size).reshape(-1)
    before = whole_attention(*arrays, return_lse=True, **options)
    out, lse = (join_uniform(x, call) for x in before)

    # A run may reach into one more block than it fills.
    blocks_before = jnp.repeat(blocks_before, run, axis=1)[:, -q_len:, None]  # [seqs, q_len, 1]
    entries = blocks_before + jnp.arange(-(-(run - 1) // size) + 1, dtype=jnp.int32)[None, None]
    entries = jnp.minimum(entries, call.block_tables.shape[1] - 1)
    tables = jnp.take_along_axis(call.block_tables[:, None], entries, axis=2)
    run_lengths = _own_lengths(positions[:, -q_len:] + 1, block_size, axis_name) - blocks_before[..., 0] * block_size
    arrays = call.q.reshape(-1, heads, head_dim), *caches, tables.reshape(seqs * q_len, -1), run_lengths.reshape(-1)
    options = {"num_partitions": 1} | options  # each reads a few blocks
    own_out, own_lse = paged_attention(*arrays, sinks=sinks, return_lse=True, **options)
    return merge_attention(out, lse, own_out.reshape(out.shape), own_lse.reshape(lse.shape))


def _merge(out: jax.Array, lse: jax.Array, axis_name: str) -> tuple[jax.Array, jax.Array]:
    """Merges all devices' outputs `[seqs, q_len, heads, head_dim]`, in float32.

    By sums alone: on one host XLA sums with a kernel in a CUDA graph, and an `all_gather` would break the graph.
    """
    out, total = out.astype(jnp.float32), functools.partial(jax.lax.psum, axis_name=axis_name)
    if out.shape[1] == 1:  # one exchange, whose latency is most of its time
        parts = total(_among_zeros(jnp.concatenate([out, lse[..., None]], axis=-1), axis_name))
        return merge_parts.merge(parts[..., :-1], parts[..., -1], None)
    is_own = _among_zeros(jnp.ones_like(lse)[..., None], axis_name)
    weight, lse = merge_parts.merge(is_own, total(_among_zeros(lse, axis_name)), None)
    return total(weight * out), lse


def _among_zeros(x: jax.Array, axis_name: str) -> jax.Array:
    """`[n, *x.shape]`: x at this device's index, and zeros."""
    is_own = jnp.arange(jax.lax.axis_size(axis_name)) == jax.lax.axis_index(axis_name)
    return jnp.where(is_own.reshape(-1, *[1] * x.ndim), x[None], 0)


def _own_lengths(lengths: jax.Array, block_size: int, axis_name: str) -> jax.Array:
    """Number of each sequence's tokens on this device, int32 in the shape of `lengths`. They fill its first slots."""
    size = block_size * jax.lax.axis_size(axis_name)
    rest = lengths % size - jax.lax.axis_index(axis_name) * block_size
    return lengths // size * block_size + jnp.clip(rest, 0, block_size)
