"""The public attention function: checks, then one implementation."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._allocator.prefix_groups import PrefixGroups
from jaxpaged._attention.call import CallKeywords, check_call
from jaxpaged._attention.options import check_partitions, known_int
from jaxpaged._attention.run import attend
from jaxpaged._by_kernel import Implementation, StaticHints
from jaxpaged._on_shards import on_shards
from pallas_kernels.common.interface import Call
from pallas_kernels.common.partition_plan import PartitionPlan


class ContextKeywords(TypedDict, total=False):
    """The options of `paged_attention` that do not depend on the positions of tokens."""

    scale: ArrayLike | None
    logits_soft_cap: ArrayLike | None
    k_scale: ArrayLike | None
    v_scale: ArrayLike | None
    value_dim: int | None
    num_partitions: int | None
    implementation: Implementation | None


class AttentionKeywords(CallKeywords, total=False):
    """The options that every caller of `paged_attention` passes on."""

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

    For query head h at position n, with t over the tokens that it sees (those up to itself, and with a window the last
    `sliding_window` of them), and its KV head g, `h // (heads // kv_heads)`:

        x[t] = scale * dot(q[h], k[t, g])
        x[t] = cap * tanh(x[t] / cap)                with a soft cap
        x[t] = x[t] - slope[h] * (n - t)             with ALiBi
        lse = log(sum(exp(x[t])) + exp(sink[h]))     the last term with sinks
        out = sum(exp(x[t] - lse) * v[t, g])

    Only blocks with tokens that some query sees are read. Table entries past the length or before the window, and
    cache slots past the length, may hold anything, NaN included. Softmax and sums are float32; the output is rounded
    once. Ids are clamped to the pool, and lengths to what a table row can hold: nothing outside the pool is read.

    Args:
        q: float32, bfloat16 or float16 `[seqs, heads, head_dim]`, the newest token of each sequence, or
            `[seqs, q_len, heads, head_dim]`, its newest `q_len`, the newest last. A row before the start of a
            sequence shorter than q_len is padding: its output is zero, its lse -inf.
        k_cache: `[blocks, block_size, kv_heads, head_dim]`, in q's dtype, another of those, or float8_e4m3fn,
            float8_e5m2 or int8.
        v_cache: as `k_cache`, `[blocks, block_size, kv_heads, value_dim]`. None: a latent cache, see `value_dim`.
        block_tables: int32 `[seqs, max_blocks]`, the ids of each sequence's blocks in order.
        lengths: int32 `[seqs]`, tokens in each sequence, the ones of `q` included. Length 0 gives zeros, lse -inf.
        query_starts: int32 `[seqs + 1]`, not descending. With it q is `[tokens, heads, head_dim]`, and the newest
            tokens of sequence s are `query_starts[s] : query_starts[s + 1]`, any number of them, 0 and 1 included.
            Rows before the first and past the last are padding: zeros, lse -inf. A batch of single tokens is faster
            without it: "mosaic_gpu" works on items of up to 128 rows.
        scale: float or f32 `[]`; `head_dim ** -0.5` by default, except for a latent cache. May be traced, as may the
            next two.
        sliding_window: int or int32 `[]`, in tokens: each query sees itself and the `sliding_window - 1` before it.
            Only a number, not a `jax.Array`, lets "mosaic_gpu" choose its partitions for the window.
        logits_soft_cap: float or f32 `[]`: `cap * tanh(logit / cap)`, after the scale and before ALiBi.
            1e30 and more, infinity included, means no cap.
        alibi_slopes: f32 `[heads]`, the penalty per token of distance.
        sinks: f32 `[heads]`, one more logit a head in the denominator; it is part of the lse.
        k_scale: the factor of the stored keys, f32: `[]`, one for all; `[kv_heads]`, one for each KV head; or
            `[blocks, block_size, kv_heads]`, one for each slot and KV head: `k_cache * k_scale[..., None]`. Scales of
            unused slots never reach the output. Pass `cache.k_scale`. An int8 cache needs both scales.
        v_scale: the factor of the stored values, shaped as `k_scale` may be.
        tree_mask: uint32 `[seqs, q_len, words]`, of `jaxpaged.tree_mask`, in calls without `query_starts`: bit `j % 32`
            of word `j // 32` says whether a query sees the j-th of its sequence's q_len tokens. It always sees itself
            and all tokens before these, never one behind itself. Any bits will do, whatever the tokens that a query
            sees see themselves. A token's position n is the number of tokens that it sees before itself: in a tree its
            position in its branch, so that windows and ALiBi work as they would on the branch alone. Give the same
            positions to the rotary embedding. "mosaic_gpu" takes a tree of up to 64 rows, `q_len * heads / kv_heads`,
            of a latent cache fewer, without a window and ALiBi.
        prefix_groups: what `BlockAllocator.prefix_groups` returns after the `append`: blocks that several sequences
            begin with are then read once for all of them. With a window or ALiBi every sequence reads its own blocks.
            Results differ by rounding: the two parts of an output are rounded to q's dtype before they are added up.
        value_dim: for a latent cache only, whose values are the first `value_dim` numbers of the keys: multi-head
            latent attention. q is absorbed, `[..., heads, latent + rotary]`, and the output `[..., heads, latent]`.
            Pass `cache.value_dim`, and `scale`, which does not follow from the width.
        num_partitions: into how many parts each sequence is cut; they are computed side by side and then merged. With
            a number, a sequence's output does not depend on its batch neighbours. None: 1 on a CPU; on a GPU enough to
            fill it, or a plan if some sequences may be much longer than others.
        return_lse: also return the lse.
        implementation: "mosaic_gpu", kernels for NVIDIA GPUs, with q in bfloat16 or float16 and a cache in q's dtype or
            of 8 bits; "xla", anything anywhere; None: "mosaic_gpu" if JAX's default device is an NVIDIA GPU since
            Ampere, the call is lowered for it and the kernels take these arguments, otherwise "xla": `explain` says
            which, and why. On other GPUs than Hopper a self-test comes first, once, and if it fails
            "xla" computes, with a warning: see the guide. A named implementation never falls back.

    Returns:
        The output, of q's shape and dtype, its last axis that of the values; with `return_lse` also the lse, natural
        logarithm, f32 `[seqs, heads]`, `[seqs, q_len, heads]` or `[tokens, heads]`.

    Raises:
        ValueError: no implementation could take these arguments; the message quotes what was received.
        NotImplementedError: the named implementation cannot take them. Also when the call is lowered, if the kernels
            get arrays on several devices of an auto mesh outside of `jax.shard_map`, or "mosaic_gpu" was named and the
            platform is no NVIDIA GPU.

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
    """`paged_attention` by the partition plan of a step; None: it makes its own if that pays."""
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
    query_starts: jax.Array | None,
    scale: ArrayLike,
    k_scale: jax.Array | None,
    value_dim: int | None,
    implementation: Implementation | None,
    return_lse: Literal[True],  # for `on_shards`
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` of queries that see all of `lengths`, where no query's own token is."""
    call, hints = check(
        (q, k_cache, v_cache, block_tables, lengths),
        query_starts=query_starts,
        scale=scale,
        k_scale=k_scale,
        value_dim=value_dim,
        implementation=implementation,
    )
    return attend(dataclasses.replace(call, causal=False), hints, None)


def check(
    arrays: tuple[ArrayLike, ArrayLike, ArrayLike | None, ArrayLike, ArrayLike],
    *,
    num_partitions: int | None = None,
    plan: PartitionPlan | None = None,
    implementation: Implementation | None = None,
    **options: Unpack[CallKeywords],
) -> tuple[Call, StaticHints]:
    """The checked arguments, and what is known of them before they become arrays."""
    if implementation not in (None, "mosaic_gpu", "xla"):
        raise ValueError(f'implementation must be None, "mosaic_gpu" or "xla"; got {implementation=}.')
    num_partitions = check_partitions(num_partitions)
    call = dataclasses.replace(check_call(*arrays, **options), plan=plan)
    window = known_int(options.get("sliding_window"))
    return call, StaticHints(num_partitions=num_partitions, window=window, implementation=implementation)
