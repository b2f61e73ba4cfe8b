"""The public attention function: checks its arguments and calls an implementation."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._allocator.prefix_groups import PrefixGroups
from jaxpaged._attention.call import CallKeywords, check_call, check_partitions, known_int
from jaxpaged._attention.run import attend
from jaxpaged._by_kernel import Implementation, StaticHints
from jaxpaged._on_shards import on_shards
from pallas_kernels.common.interface import Call
from pallas_kernels.common.partition_plan import PartitionPlan


class ContextKeywords(TypedDict, total=False):
    """The options of `paged_attention` that do not depend on token positions."""

    scale: ArrayLike | None
    logits_soft_cap: ArrayLike | None
    k_scale: ArrayLike | None
    v_scale: ArrayLike | None
    value_dim: int | None
    num_partitions: int | None
    implementation: Implementation | None


class AttentionKeywords(CallKeywords, total=False):
    """The options that all callers of `paged_attention` pass on."""

    prefix_groups: PrefixGroups | None
    num_partitions: int | None
    implementation: Implementation | None


@overload
def paged_attention(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike | None,
    block_tables: ArrayLike,
    lengths: ArrayLike,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionKeywords],
) -> jax.Array: ...


@overload
def paged_attention(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike | None,
    block_tables: ArrayLike,
    lengths: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionKeywords],
) -> tuple[jax.Array, jax.Array]: ...


def paged_attention(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike | None,
    block_tables: ArrayLike,
    lengths: ArrayLike,
    *,
    query_starts: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    sliding_window: ArrayLike | None = None,
    logits_soft_cap: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    tree_mask: ArrayLike | None = None,
    prefix_groups: PrefixGroups | None = None,
    value_dim: int | None = None,
    num_partitions: int | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of the newest tokens of each sequence over its paged cache.

    For query head h at position n, its KV head g = `h // (heads // kv_heads)`, and t over the tokens that the query
    sees (all up to itself, or with a window the last `sliding_window` of these):

        x[t] = scale * dot(q[h], k[t, g])
        x[t] = cap * tanh(x[t] / cap)                with a soft cap
        x[t] = x[t] - slope[h] * (n - t)             with ALiBi
        lse = log(sum(exp(x[t])) + exp(sink[h]))     the last term with sinks
        out = sum(exp(x[t] - lse) * v[t, g])

    Only blocks with a token that some query sees are read. Table entries past the length or before the window, and
    cache slots past the length, may hold anything, including NaN. Softmax and sums are float32, and the output is
    rounded once. Ids are clamped to the pool and lengths to the capacity of a table row, so nothing outside the pool is
    read.

    Args:
        q: float32, bfloat16 or float16 `[seqs, heads, head_dim]`, the newest token of each sequence, or
            `[seqs, q_len, heads, head_dim]`, its newest `q_len` tokens with the newest last. If a sequence is shorter
            than q_len, the rows before its start are padding: their output is zero and their lse -inf.
        k_cache: `[blocks, block_size, kv_heads, head_dim]`, in a dtype that q may have, float8_e4m3fn, float8_e5m2 or
            int8.
        v_cache: `[blocks, block_size, kv_heads, value_dim]`, in the dtype of `k_cache`. None: a latent cache, see
            `value_dim`.
        block_tables: int32 `[seqs, max_blocks]`, block ids of each sequence in order.
        lengths: int32 `[seqs]`, tokens of each sequence, including those of `q`. For length 0 the output is zero and
            the lse -inf.
        query_starts: int32 `[seqs + 1]`, not descending. With it q is packed, `[tokens, heads, head_dim]`, and the
            newest tokens of sequence s are `query_starts[s] : query_starts[s + 1]`, possibly none. Rows before the
            first sequence and after the last are padding: their output is zero and their lse -inf. For a batch of
            single tokens the call without query_starts is faster, because "mosaic_gpu" computes packed tokens in items
            of up to 128 rows.
        scale: float or f32 `[]`; default `head_dim ** -0.5`, required for a latent cache. `scale`, `sliding_window` and
            `logits_soft_cap` may be traced.
        sliding_window: int or int32 `[]`, in tokens: each query sees itself and the `sliding_window - 1` tokens before
            it. "mosaic_gpu" chooses its partitions for the window only if it is a number, not a `jax.Array`.
        logits_soft_cap: float or f32 `[]`: `cap * tanh(logit / cap)`, after the scale and before ALiBi.
            1e30 or more, including infinity, means no cap.
        alibi_slopes: f32 `[heads]`, penalty per token of distance.
        sinks: f32 `[heads]`, one more logit per head in the denominator, which is part of the lse.
        k_scale: f32, factor of the stored keys: `[]`, one for all; `[kv_heads]`, one per KV head; or
            `[blocks, block_size, kv_heads]`, one per slot and KV head: `k_cache * k_scale[..., None]`. Scales of
            unused slots never affect the output. Pass `cache.k_scale`. An int8 cache needs both scales.
        v_scale: f32, factor of the stored values, with the same choice of shapes as `k_scale`.
        tree_mask: uint32 `[seqs, q_len, words]`, from `jaxpaged.tree_mask`, for calls without `query_starts`. Bit
            `j % 32` of word `j // 32` says whether a query sees the j-th of its sequence's q_len tokens. A query always
            sees itself and all tokens before the q_len newest, and never a later token. The bits need not form a tree.
            A token's position n is the number of tokens that it sees before itself. In a tree this is its position in
            its branch, so that windows and ALiBi work as on the branch alone; use the same positions for rotary
            embeddings. "mosaic_gpu" supports a tree of up to 64 rows (`q_len * heads / kv_heads`), fewer with a latent
            cache, without a window and ALiBi.
        prefix_groups: the result of `BlockAllocator.prefix_groups` after the `append`. Blocks that several sequences
            begin with are then read once for all of them. With a window or ALiBi every sequence reads its own blocks.
            Results differ by rounding, because both parts of an output are rounded to q's dtype before they are merged.
        value_dim: for a latent cache (multi-head latent attention) only: the values are the first `value_dim` numbers
            of the keys. q is absorbed, `[..., heads, latent + rotary]`, and the output is `[..., heads, latent]`. Pass
            `cache.value_dim`, and `scale`, which does not follow from the width.
        num_partitions: number of partitions of each sequence, which are computed in parallel and then merged. With a
            number, a sequence's output does not depend on the other sequences of the batch. None: 1 on a CPU; on a GPU
            enough to fill it, or a plan if some sequences may be much longer than others.
        return_lse: also return the lse.
        implementation: "mosaic_gpu": kernels for NVIDIA GPUs, with q in bfloat16 or float16 and a cache in q's dtype or
            8-bit. "xla": all arguments on all platforms. None: "mosaic_gpu" if JAX's default device is an NVIDIA GPU
            since Ampere, the call is lowered for it and the kernels support the arguments, otherwise "xla"; `explain`
            says which and why. On GPUs other than Hopper a self-test runs once before; if it fails, "xla" computes the
            call and a warning says so (see the guide). A named implementation never falls back.

    Returns:
        The output, in q's dtype and shape, but with the last axis of the values. With `return_lse` also the
        lse (natural logarithm), f32 `[seqs, heads]`, `[seqs, q_len, heads]` or `[tokens, heads]`.

    Raises:
        ValueError: no implementation supports these arguments; the message quotes what was received.
        NotImplementedError: the named implementation does not support them. Also when the call is lowered, if the
            kernels get arrays on several devices of an auto mesh outside of `jax.shard_map`, or if "mosaic_gpu" was
            named and the platform is not an NVIDIA GPU.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpaged
        >>> cache = jaxpaged.KVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=64)
        >>> q = jax.random.normal(jax.random.key(0), (1, 4, 64), jnp.bfloat16)
        >>> tables, lengths = jnp.array([[3, 5]]), jnp.array([20])
        >>> jaxpaged.paged_attention(q, cache.k, cache.v, tables, lengths).shape
        (1, 4, 64)

    References:
        Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023
        (https://arxiv.org/abs/2309.06180). Milakov and Gimelshein, Online normalizer calculation for softmax, 2018
        (https://arxiv.org/abs/1805.02867).
    """
    return planned_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        lengths,
        query_starts=query_starts,
        scale=scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        tree_mask=tree_mask,
        prefix_groups=prefix_groups,
        value_dim=value_dim,
        num_partitions=num_partitions,
        return_lse=return_lse,
        implementation=implementation,
    )


@on_shards
def planned_attention(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike | None,
    block_tables: ArrayLike,
    lengths: ArrayLike,
    *,
    plan: PartitionPlan | None = None,
    prefix_groups: PrefixGroups | None = None,
    num_partitions: int | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
    **options: Unpack[CallKeywords],
) -> Any:
    """`paged_attention` with the partition plan of a step. Without one the call makes its own if that pays."""
    call, hints = check(
        (q, k_cache, v_cache, block_tables, lengths),
        num_partitions=num_partitions,
        plan=plan,
        implementation=implementation,
        **options,
    )
    out, lse = attend(call, hints, prefix_groups)
    if options.get("query_starts") is None and jnp.ndim(q) == 3:
        out, lse = out[:, 0], lse[:, 0]
    return (out, lse) if return_lse else out


@on_shards
def whole_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array | None,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    query_starts: jax.Array | None = None,
    return_lse: Literal[True],  # for `on_shards`
    **options: Unpack[ContextKeywords],
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` of queries that all see every token of `lengths`; their own tokens are not among these."""
    call, hints = check((q, k_cache, v_cache, block_tables, lengths), query_starts=query_starts, **options)
    return attend(dataclasses.replace(call, causal=False), hints, None)


def check(
    arrays: tuple[ArrayLike, ArrayLike, ArrayLike | None, ArrayLike, ArrayLike],
    *,
    num_partitions: int | None = None,
    plan: PartitionPlan | None = None,
    implementation: Implementation | None = None,
    **options: Unpack[CallKeywords],
) -> tuple[Call, StaticHints]:
    """The checked arguments, and the static hints that are lost when arguments become arrays."""
    if implementation not in (None, "mosaic_gpu", "xla"):
        raise ValueError(f'implementation must be None, "mosaic_gpu" or "xla"; got {implementation=}.')
    num_partitions = check_partitions(num_partitions)
    call = dataclasses.replace(check_call(*arrays, **options), plan=plan)
    window = known_int(options.get("sliding_window"))
    return call, StaticHints(num_partitions=num_partitions, window=window, implementation=implementation)
