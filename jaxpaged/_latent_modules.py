"""Multi-head latent attention: the settings of the NNX and the Linen module, and what lies between the projections."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._attention.attend import attend
from jaxpaged._attention.choose import Implementation
from jaxpaged._cache.kv_cache import KVCache
from jaxpaged._cache.layers import CacheLayer
from jaxpaged._cache.rotate import rotate_and_write_kv
from jaxpaged._integers import as_int32
from jaxpaged._modules import check_tokens, find_positions, pools_of
from pallas_kernels.decode.partition_plan import PartitionPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSettings:
    """What `jaxpaged.nnx.LatentAttention` and `jaxpaged.linen.LatentAttention` compute, and which parameters they have.

    Hashable, and without arrays. In brackets the name in the config of a DeepSeek model.

    Attributes:
        num_heads: query heads (num_attention_heads).
        latent_dim: numbers of the latent vector, of which keys and values are made (kv_lora_rank).
        head_dim: numbers of a key and query without a position (qk_nope_head_dim).
        rotary_dim: numbers of the key that all heads share, and of a query, which are rotated (qk_rope_head_dim).
        value_dim: numbers of a value (v_head_dim).
        query_rank: numbers to which q is compressed (q_lora_rank); None: it is not.
        rotary_frequencies: from `jaxpaged.rotary_frequencies(rotary_dim, ...)`.
        rotary_factor: of the rotated part of q and of k: `jaxpaged.rotary_attention_factor`.
        interleaved: whether neighbours are rotated as a pair, see `rotate_and_write_kv`.
        norm_epsilon: of the RMS norms of the latent vector and of the compressed q.
        scale: of the logits; None: `(head_dim + rotary_dim) ** -0.5`. YaRN's models multiply it.
        use_bias: whether the projections of x and of the heads' output have a bias.
        sliding_window: in tokens, as in `jaxpaged.paged_attention`, like the next two.
        num_partitions: of each sequence.
        implementation: of the attention.
        dtype: of the computation; None: the one that input and parameters promote to.
        param_dtype: of the parameters.

    Raises:
        ValueError: more frequencies than can be rotated.
    """

    num_heads: int
    latent_dim: int
    head_dim: int
    rotary_dim: int
    value_dim: int
    query_rank: int | None
    rotary_frequencies: tuple[float, ...]
    rotary_factor: float = 1.0
    interleaved: bool = True
    norm_epsilon: float = 1e-6
    scale: float | None = None
    use_bias: bool = False
    sliding_window: int | None = None
    num_partitions: int | None = None
    implementation: Implementation | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = "float32"

    def __post_init__(self) -> None:
        if not 0 < 2 * len(self.rotary_frequencies) <= self.rotary_dim:
            raise ValueError(
                f"rotary_frequencies must hold up to rotary_dim // 2 numbers; got {len(self.rotary_frequencies)} for "
                f"rotary_dim={self.rotary_dim}. Make them with jaxpaged.rotary_frequencies(rotary_dim)."
            )

    @property
    def query_features(self) -> int:
        return self.num_heads * (self.head_dim + self.rotary_dim)

    @property
    def up_features(self) -> int:
        """Of all heads' keys without a position and values, which the latent vector is projected up to."""
        return self.num_heads * (self.head_dim + self.value_dim)

    @property
    def latent_features(self) -> int:
        """Of the projection of x to the latent vector and the shared key; the width of the cache."""
        return self.latent_dim + self.rotary_dim


def absorbed_attention[C: (KVCache, CacheLayer)](
    settings: LatentSettings,
    q: jax.Array,  # [..., heads * (head_dim + rotary_dim)]
    latent: jax.Array,  # [..., latent_dim], normalised
    shared_key: jax.Array,  # [..., rotary_dim]
    up: jax.Array,  # [latent_dim, heads * (head_dim + value_dim)]
    cache: C,
    allocator: BlockAllocator,
    slots: jax.Array,  # int32 [...]
    query_starts: ArrayLike | None,
    positions: ArrayLike | None,
    *,
    plan: PartitionPlan | None,
    tree_mask: ArrayLike | None,
    shared_prefix: ArrayLike | None,
) -> tuple[C, jax.Array]:
    """The new cache, and [..., heads * value_dim].

        q . (W_K c) = (W_K^T q) . c,    sum_t p_t (W_V c_t) = W_V sum_t p_t c_t

    So all heads read the latent vector c itself, and no key or value of a head is ever made.
    """
    s = settings
    q = q.reshape(*slots.shape, s.num_heads, -1)
    up = up.astype(q.dtype).reshape(s.latent_dim, s.num_heads, -1)
    to_keys, to_values = up[..., : s.head_dim], up[..., s.head_dim :]
    plain, rotary = jnp.split(q, [s.head_dim], axis=-1)
    if s.rotary_factor != 1.0:  # of q and of k: the cache holds keys without it
        rotary = rotary * jnp.asarray(s.rotary_factor**2, rotary.dtype)
    q = jnp.concatenate([jnp.einsum("...hd,chd->...hc", plain, to_keys), rotary], axis=-1)
    k = jnp.concatenate([latent, shared_key], axis=-1)[..., None, :]
    at = find_positions(allocator, slots, query_starts) if positions is None else as_int32(positions)
    cache, q = rotate_and_write_kv(cache, q, k, None, slots, at, s.rotary_frequencies, interleaved=s.interleaved)
    out = attend(
        q,
        cache,
        allocator,
        query_starts=query_starts,
        scale=(s.head_dim + s.rotary_dim) ** -0.5 if s.scale is None else s.scale,
        sliding_window=s.sliding_window,
        num_partitions=s.num_partitions,
        plan=plan,
        tree_mask=tree_mask,
        shared_prefix=shared_prefix,
        implementation=s.implementation,
    )
    out = jnp.einsum("...hc,chd->...hd", out, to_values)
    return cache, out.reshape(*slots.shape, -1)


def check_latent_call(
    settings: LatentSettings,
    x: jax.Array,
    cache: KVCache | CacheLayer,
    slots: jax.Array,
    query_starts: ArrayLike | None,
) -> None:
    """Raises `ValueError` if a module's inputs do not fit together."""
    check_tokens(x, cache, slots, query_starts)
    pools, s = pools_of(cache), settings
    if pools.k.shape[-2:] != (1, s.latent_features) or pools.latent_values != s.latent_dim:
        raise ValueError(
            f"the cache must be a latent one of {s.latent_features} numbers and values of {s.latent_dim} for this "
            f"module; got {pools.k.shape=}, {pools.latent_values=}. Create it with KVCache.create(is_latent=True, "
            f"num_kv_heads=1, head_dim={s.latent_features}, value_dim={s.latent_dim}, ...)."
        )
