"""Multi-head latent attention: settings, checks, and the computation between the projections."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._attention.attend import attend_to_history
from jaxpaged._attention.attention_step import AttentionStep, check_one_group
from jaxpaged._attention.dense_step import DenseStep
from jaxpaged._attention.merge import merge_attention
from jaxpaged._attention.public import paged_attention
from jaxpaged._attention.runs import owners
from jaxpaged._attention.writes import note_write
from jaxpaged._by_kernel import Implementation
from jaxpaged._cache.kv_cache import LARGEST, KVCache
from jaxpaged._cache.layers import CacheLayer, pools_of
from jaxpaged._cache.rotate import check_frequencies, rotate_all
from jaxpaged._cache.split_rotary import split_key, split_query
from jaxpaged._cache.write import write_kv
from jaxpaged._flax.attention import check_dtypes, check_tokens, store_floats


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSettings:
    """Sizes and options of `jaxpaged.nnx.LatentAttention`.

    The object is hashable: it stores sequences as tuples, and holds no arrays. The sizes have the names of a
    DeepSeek model's config.

    Attributes:
        num_heads: number of query heads, `num_attention_heads` in the config.
        kv_lora_rank: numbers in the latent vector, from which keys and values are computed.
        qk_nope_head_dim: numbers per head of q and k that are not rotated.
        qk_rope_head_dim: rotated numbers: per head in q, and in the one rotary key that all heads share.
        v_head_dim: numbers per head of a value.
        q_lora_rank: width of the compressed q. None: q is not compressed.
        rotary_frequencies: from `jaxpaged.rotary_frequencies(qk_rope_head_dim, ...)`.
        rotary_factor: factor of the rotated part of q and k: `jaxpaged.rotary_attention_factor(rope_scaling)`.
        interleaved: whether rotary pairs are neighbouring dimensions; see `jaxpaged.ops.rotate_and_write_kv`.
        norm_epsilon: epsilon of the RMS norms of the latent vector and of the compressed q.
        scale: factor of the logits. None: `(qk_nope_head_dim + qk_rope_head_dim) ** -0.5`. If the model's
            `rope_scaling` has `mscale_all_dim`, multiply by `(0.1 * mscale_all_dim * log(factor) + 1) ** 2`.
        use_bias: whether `q_a_proj`, `kv_a_proj_with_mqa` and `o_proj` have a bias.
        sliding_window: tokens that each query sees, itself included. None: all.
        num_partitions: partitions of each sequence. None: chosen automatically. A number turns `expanded_from` off.
        expanded_from: average number of new tokens per sequence from which a call uses per-head keys and values. The
            default is where they become faster with 16 heads on an H100.
        implementation: "mosaic_gpu", "xla", or None to choose.
        dtype: dtype of the computation. None: promoted from the input and the parameters.
        param_dtype: dtype of the parameters.

    Raises:
        ValueError: `rotary_frequencies` has no numbers or more than `qk_rope_head_dim // 2`, or a dtype is invalid.
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None
    rotary_frequencies: Sequence[float]
    rotary_factor: float = 1.0
    interleaved: bool = True
    norm_epsilon: float = 1e-6
    scale: float | None = None
    use_bias: bool = False
    sliding_window: int | None = None
    num_partitions: int | None = None
    expanded_from: int = 512  # [latent_prompts_h100 of benchmarks/results/decisions/]
    implementation: Implementation | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = "float32"

    def __post_init__(self) -> None:
        check_dtypes(self)
        store_floats(self, "rotary_frequencies")
        check_frequencies("rotary_frequencies", self.rotary_frequencies, self.qk_rope_head_dim)

    @property
    def query_features(self) -> int:
        return self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)

    @property
    def latent_features(self) -> int:
        """Width of a cached token: the latent vector and the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def latent_attention[C: (KVCache, CacheLayer)](
    settings: LatentSettings,
    q: jax.Array,  # [..., heads * (qk_nope_head_dim + qk_rope_head_dim)]
    latent: jax.Array,  # [..., kv_lora_rank], normalised
    shared_key: jax.Array,  # [..., qk_rope_head_dim]
    to_keys: jax.Array,  # [kv_lora_rank, heads * qk_nope_head_dim]
    to_values: jax.Array,  # [kv_lora_rank, heads * v_head_dim]
    cache: C,
    step: AttentionStep | DenseStep,
) -> tuple[C, jax.Array]:
    """Returns the new cache and the heads' output, [..., heads * v_head_dim].

        q . (W_K c) = (W_K^T q) . c,    sum_t p_t (W_V c_t) = W_V sum_t p_t c_t

    In the absorbed form (right) all heads read the latent vector c itself. If sequences have many new tokens, these
    attend to each other in the expanded form (left), which needs fewer operations; older tokens stay absorbed.
    """
    s = settings
    tokens: tuple[int, ...] = step.positions.shape
    q = q.reshape(*tokens, s.num_heads, -1)
    to_keys, to_values = (x.astype(q.dtype).reshape(s.kv_lora_rank, s.num_heads, -1) for x in (to_keys, to_values))
    plain, rotary = jnp.split(q, [s.qk_nope_head_dim], axis=-1)
    rotary, shared_key = _rotated(s, step.positions, rotary, shared_key[..., None, :])
    pools = pools_of(cache)
    is_split = pools.k.shape[-1] > s.latent_features
    stored = jnp.concatenate([latent[..., None, :], shared_key], axis=-1)
    if is_split:
        stored = split_key(cache, stored)
    scale = (s.qk_nope_head_dim + s.qk_rope_head_dim) ** -0.5 if s.scale is None else s.scale
    how: Any = dict(scale=scale, implementation=s.implementation)

    def by_head(products: str, x: jax.Array, weights: jax.Array) -> jax.Array:
        # Flattened: with a batch axis of size 1, XLA would transpose the result of each head.
        return jnp.einsum(products, x.reshape(-1, *x.shape[-2:]), weights).reshape(*tokens, s.num_heads, -1)

    def absorbed() -> jax.Array:
        whole = jnp.concatenate([by_head("thd,chd->thc", plain, to_keys), rotary], axis=-1)
        return split_query(pools, whole) if is_split else whole

    def values(out: jax.Array) -> jax.Array:
        return by_head("thc,chd->thd", out, to_values)

    if isinstance(step, DenseStep) or not _is_expanded(s, step):
        how |= dict(sliding_window=s.sliding_window, num_partitions=s.num_partitions)
        cache, out = step.attend(absorbed(), stored, None, cache, **how)
        return cache, values(out).reshape(*tokens, -1)

    check_one_group(step)
    slots, starts, allocator = step.slots, step.query_starts, step.allocator
    before, cache = cache, write_kv(cache, stored, None, slots)
    note_write(before, cache, step.group_index)
    shared_key = jnp.broadcast_to(shared_key, (*tokens, s.num_heads, s.qk_rope_head_dim))
    keys = jnp.concatenate([jnp.einsum("...c,chd->...hd", latent, to_keys), shared_key], axis=-1)
    q = jnp.concatenate([plain, rotary], axis=-1)
    counts = _new_tokens(allocator, slots, starts)
    new = _among_new_tokens(q, keys, values(latent[..., None, :]), counts, starts, **how)
    history = allocator.lengths - counts

    def with_history() -> jax.Array:
        out, lse = attend_to_history(absorbed(), cache, allocator, history, query_starts=starts, **how)
        return merge_attention(*new, values(out), lse)[0]

    out = jax.lax.cond((history > 0).any(), with_history, lambda: new[0])
    return cache, out.reshape(*tokens, -1)


def _rotated(settings: LatentSettings, positions: jax.Array, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rotated parts of q and k. q gets the square of the factor, because the cache holds keys without it."""
    q, k = rotate_all((q, k), positions, settings.rotary_frequencies, interleaved=settings.interleaved, start=0)
    factor = settings.rotary_factor
    return q if factor == 1.0 else q * jnp.asarray(factor**2, q.dtype), k


def _is_expanded(settings: LatentSettings, step: AttentionStep) -> bool:
    """Whether new tokens attend to each other through per-head keys and values."""
    if step.slots.ndim == 1 and step.query_starts is None:
        return False
    num_partitions = step.num_partitions if settings.num_partitions is None else settings.num_partitions
    special = step.tree_mask, step.prefix_groups, settings.sliding_window, num_partitions
    per_seq = step.slots.size // step.allocator.lengths.shape[0]
    return per_seq >= settings.expanded_from and all(x is None for x in special)


def _new_tokens(allocator: BlockAllocator, slots: jax.Array, starts: jax.Array | None) -> jax.Array:
    """Number of new tokens of each sequence that use the expanded form, int32 [seqs]; 0 for a single new token.

    In a uniform call, a row entry with a slot outside the pool is padding, even if the sequence has an older token at
    that position.
    """
    if starts is None:
        is_new = (slots >= 0) & (slots < allocator.num_blocks * allocator.block_size)
        num_new = is_new.sum(axis=1, dtype=jnp.int32)
    else:
        num_new = jnp.diff(starts)
    return jnp.where(num_new > 1, jnp.clip(allocator.lengths, 0, num_new), 0)


def _among_new_tokens(
    q: jax.Array,  # [..., heads, key width]
    k: jax.Array,  # the same
    v: jax.Array,  # [..., heads, value width]
    counts: jax.Array,  # int32 [seqs]
    starts: jax.Array | None,
    **how: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attention among the last `counts` tokens of each sequence, packed or uniform: the output and the lse.

    Writes the tokens to a temporary cache, where they are sequences without a history. Keys and values are padded to
    one width, as the prefill kernel needs.
    """
    (*rows, heads, _), seqs = k.shape, counts.shape[0]
    value_dim, tokens, width = v.shape[-1], math.prod(rows), max(k.shape[-1], v.shape[-1])
    most = tokens if starts is not None else rows[-1]  # new tokens of a sequence
    block_size = next((size for size in (64, 32, 16) if seqs * size <= tokens), 8)

    if starts is None:
        ends = (jnp.arange(seqs, dtype=jnp.int32) + 1) * most
        seq_ids = jnp.arange(tokens, dtype=jnp.int32) // most
    else:
        ends, seq_ids = starts[1:], owners(starts, tokens=tokens)
    num_blocks = -(-counts // block_size)
    first_blocks = jnp.cumsum(num_blocks, dtype=jnp.int32) - num_blocks
    their = jnp.minimum(seq_ids, seqs - 1)
    index = jnp.arange(tokens, dtype=jnp.int32) - (ends - counts)[their]  # among the sequence's new tokens
    is_new = (index >= 0) & (index < counts[their]) & (seq_ids < seqs)
    slots = jnp.where(is_new, first_blocks[their] * block_size + index, -1)

    q, k, v = (jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]) for x in (q, k, v))
    blocks: Any = dict(num_blocks=tokens // block_size + seqs, block_size=block_size)
    cache = KVCache.create(**blocks, num_kv_heads=heads, head_dim=width, dtype=k.dtype)
    cache = write_kv(cache, k, v, slots.reshape(rows))
    tables = first_blocks[:, None] + jnp.arange(-(-most // block_size), dtype=jnp.int32)[None]
    out, lse = paged_attention(q, cache.k, cache.v, tables, counts, query_starts=starts, return_lse=True, **how)
    return out[..., :value_dim], lse


def check_latent_call(settings: LatentSettings, x: jax.Array, cache: KVCache | CacheLayer, step: AttentionStep) -> None:
    """Raises `ValueError` if the inputs of a latent module do not match."""
    check_tokens(x, cache, step)
    if cache is None:
        raise ValueError("a latent layer needs a cache, with `dense_step` too; got None.")
    pools, s = pools_of(cache), settings
    widths = [s.latent_features]
    if pools.k.dtype in LARGEST:
        widths.append(s.latent_features + s.qk_rope_head_dim)  # see `jaxpaged.ops.split_rotary`
    if pools.k.shape[-2] != 1 or pools.k.shape[-1] not in widths or pools.value_dim != s.kv_lora_rank:
        raise ValueError(
            f"the cache must be a latent one of {s.latent_features} numbers and values of {s.kv_lora_rank} for this "
            f"module; got {pools.k.shape=}, {pools.value_dim=}. Create it with KVCache.create(is_latent=True, "
            f"num_kv_heads=1, head_dim={s.latent_features}, value_dim={s.kv_lora_rank}, ...)."
        )
