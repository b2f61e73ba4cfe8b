"""The definition of paged attention: float32, slow, and as plain as the equation."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxpaged._attention.call import CallKeywords, check_call
from jaxpaged._attention.runs import cut_packed, join_packed, place_runs
from jaxpaged._attention.tree import from_rows, query_positions
from jaxpaged._one_program import one_program
from pallas_kernels.common.interface import AttentionOptions, Call


@overload
def paged_attention_reference(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike | None,
    block_tables: ArrayLike,
    lengths: ArrayLike,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[CallKeywords],
) -> jax.Array: ...


@overload
def paged_attention_reference(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike | None,
    block_tables: ArrayLike,
    lengths: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[CallKeywords],
) -> tuple[jax.Array, jax.Array]: ...


def paged_attention_reference(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike | None,
    block_tables: ArrayLike,
    lengths: ArrayLike,
    *,
    return_lse: bool = False,
    **options: Unpack[CallKeywords],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The definition of `paged_attention`, in float32 at the highest precision.

    It has the arguments and options of `jaxpaged.paged_attention`, except those that do not change the result:
    `implementation`, `num_partitions` and `prefix_groups`. Use it in tests: it gathers all blocks of every sequence and
    holds `[seqs, heads, q_len, max_blocks * block_size]` logits.

    Returns:
        The output, and with `return_lse` also the lse, shaped as in `jaxpaged.paged_attention`. Both are float32; the
        output is not rounded to q's dtype.

    Raises:
        ValueError: as `jaxpaged.paged_attention`.
    """
    call = check_call(q, k_cache, v_cache, block_tables, lengths, **options)
    out, lse = _attend(call) if call.query_starts is None else _attend_packed(call)
    if call.query_starts is None and jnp.ndim(q) == 3:
        out, lse = out[:, 0], lse[:, 0]
    return (out, lse) if return_lse else out


@one_program()
def _attend_packed(call: Call) -> tuple[jax.Array, jax.Array]:
    runs = place_runs(call, 1)
    return join_packed(*_attend(cut_packed(call, runs)), call, runs)


@one_program()
def _attend(a: Call) -> tuple[jax.Array, jax.Array]:
    seqs, max_blocks = a.block_tables.shape
    token_positions = jnp.arange(max_blocks * a.block_size, dtype=jnp.int32)  # [tokens]
    tree = from_rows(a.tree_mask, a.lengths)
    positions = query_positions(a, tree)  # [seqs, q_len]
    distance = positions[:, :, None] - token_positions[None, None]  # [seqs, q_len, tokens]
    if tree is not None:
        ordinals = jnp.broadcast_to(token_positions[None], (seqs, token_positions.size))
        distance = tree.distances(positions, ordinals)
    visible = (distance >= 0) & (positions >= 0)[:, :, None]
    if a.options.sliding_window is not None:
        visible &= distance < a.options.sliding_window

    # The table entry of a block that no query sees may be garbage, so it is not followed.
    followed = visible.any(axis=1).reshape(seqs, max_blocks, a.block_size).any(axis=-1)
    ids = jnp.where(followed, jnp.clip(a.block_tables, 0, a.k_cache.shape[0] - 1), 0)

    def gather(cache: jax.Array, cache_scale: jax.Array | None) -> jax.Array:  # -> [seqs, tokens, heads, head_dim]
        seen = visible.any(axis=1)[:, :, None, None]
        values = cache[ids].astype(jnp.float32)  # [seqs, max_blocks, block_size, kv_heads, head_dim]
        values = jnp.where(seen, values.reshape(seqs, -1, *cache.shape[2:]), 0.0)
        if cache_scale is not None:
            factor = jnp.broadcast_to(cache_scale, cache.shape[:3])[ids].reshape(*values.shape[:3], 1)
            values *= jnp.where(seen, factor, 0.0)
        return values

    k = gather(a.k_cache, a.options.k_scale)
    v = k[..., : a.value_dim] if a.v_cache is None else gather(a.v_cache, a.options.v_scale)
    q = jnp.where((positions >= 0)[..., None, None], a.q, jnp.zeros_like(a.q)).astype(jnp.float32)
    return dense_attention(q, k, v, distance, visible, a.options)


def dense_attention(
    q: jax.Array,  # float32 [seqs, q_len, heads, head_dim]
    k: jax.Array,  # float32 [seqs, tokens, kv_heads, head_dim]
    v: jax.Array,  # float32 [seqs, tokens, kv_heads, value_dim]
    distance: jax.Array,  # int32 [seqs, q_len, tokens], from each token to the query
    visible: jax.Array,  # bool [seqs, q_len, tokens]
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """Returns the output and the lse. The window is already part of `visible`, and scales have been applied to k and
    v."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = options.scale * jnp.einsum("sqhd,sthd->shqt", q, k, precision=lax.Precision.HIGHEST)
    if options.logits_soft_cap is not None:
        logits = options.logits_soft_cap * jnp.tanh(logits / options.logits_soft_cap)
    if options.alibi_slopes is not None:
        logits -= options.alibi_slopes[None, :, None, None] * distance[:, None].astype(jnp.float32)
    logits = jnp.where(visible[:, None], logits, -jnp.inf)

    sees_any = visible.any(axis=-1)[:, None]  # [seqs, 1, q_len]
    columns = logits
    if options.sinks is not None:
        column = jnp.broadcast_to(options.sinks[None, :, None, None], (*logits.shape[:3], 1))
        columns = jnp.concatenate([logits, column], axis=-1)
    lse = jax.nn.logsumexp(columns, axis=-1)  # [seqs, heads, q_len]
    weights = jnp.where(sees_any[..., None], jnp.exp(logits - jnp.where(sees_any, lse, 0.0)[..., None]), 0.0)
    out = jnp.einsum("shqt,sthd->sqhd", weights, v, precision=lax.Precision.HIGHEST)
    return out, jnp.where(sees_any, lse, -jnp.inf).swapaxes(1, 2)
