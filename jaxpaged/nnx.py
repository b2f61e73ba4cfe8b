"""Paged attention as a Flax NNX module, or instead of a model's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged._attention.attention_step import AttentionStep
from jaxpaged._cache.kv_cache import KVCache
from jaxpaged._cache.layers import CacheLayer
from jaxpaged._flax.attention import AttentionSettings, output_features, project_and_attend, sum_sharding
from jaxpaged._flax.latent_attention import LatentSettings, check_latent_call, latent_attention

__all__ = ["LatentAttention", "PagedAttention", "replace"]


class PagedAttention(nnx.Module):
    """Causal self-attention whose keys and values live in a paged cache.

    It projects, normalises and rotates q and k, writes k and v into the cache, attends, and projects back. The cache
    and the step are arguments, the new cache is a result: the module only holds weights.

    Parameters, and biases if the settings ask for them:

    - `qkv_proj.kernel` `[in_features, (num_heads + 2 * num_kv_heads) * head_dim]`: the columns of q, then of k, then of
      v. One product reads its weights faster than three. Build it from separate kernels with
      `jnp.concatenate([q, k, v], axis=-1)`, or keep `q_proj`, `k_proj` and `v_proj` with `fused=False`.
    - `o_proj.kernel` `[num_heads * head_dim, in_features]`.
    - `q_norm.scale`, `k_norm.scale` `[head_dim]`, with `norm_epsilon`.
    - `sinks` `[num_heads]`, with `use_sinks`.
    - `gate_proj.kernel` `[in_features, num_heads * head_dim]`, with `use_gate`.

    `heads_axis` is a mesh axis, or a name that Flax's `logical_axis_rules` map to one. It shards the projections to
    heads by their outputs, the output projection by its inputs and the sinks by heads, in their `out_sharding`.

    Args:
        in_features: width of the input and the output.
        settings: sizes, options, dtypes.
        rngs: for the parameters.

    Example:
        >>> import jax.numpy as jnp, jaxpaged, jaxpaged.nnx
        >>> from flax import nnx
        >>> settings = jaxpaged.AttentionSettings(
        ...     num_heads=4, num_kv_heads=2, head_dim=8, rotary_frequencies=jaxpaged.rotary_frequencies(8)
        ... )
        >>> attention = jaxpaged.nnx.PagedAttention(32, settings, rngs=nnx.Rngs(0))
        >>> cache = jaxpaged.KVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=8)
        >>> allocator = jaxpaged.BlockAllocator.create(num_blocks=8, block_size=16, num_seqs=1, max_blocks_per_seq=4)
        >>> allocator, slots, ok = allocator.append(jnp.array([5]), q_len=5)
        >>> step = jaxpaged.AttentionStep.create(allocator, slots)
        >>> cache, out = attention(jnp.ones((1, 5, 32)), cache, step)
        >>> out.shape
        (1, 5, 32)
    """

    def __init__(self, in_features: int, settings: AttentionSettings, *, rngs: nnx.Rngs):
        self.settings = s = settings

        def metadata(*axes: str | None) -> dict[str, Any]:
            return {} if s.heads_axis is None else {"out_sharding": axes}

        common: Any = dict(dtype=s.dtype, param_dtype=s.param_dtype, rngs=rngs)

        def to_heads(name: str) -> nnx.Linear:
            return nnx.Linear(
                in_features,
                output_features(s, name),
                use_bias=s.use_bias,
                kernel_metadata=metadata(None, s.heads_axis),
                bias_metadata=metadata(s.heads_axis),
                **common,
            )

        def norm() -> nnx.RMSNorm | None:
            return None if s.norm_epsilon is None else nnx.RMSNorm(s.head_dim, epsilon=s.norm_epsilon, **common)

        if s.fused:
            self.qkv_proj = to_heads("qkv_proj")
        else:
            self.q_proj, self.k_proj, self.v_proj = map(to_heads, ("q_proj", "k_proj", "v_proj"))
        self.q_norm, self.k_norm = norm(), norm()
        self.sinks = nnx.Param(jnp.zeros(s.num_heads, s.param_dtype), **metadata(s.heads_axis)) if s.use_sinks else None
        self.gate_proj = to_heads("gate_proj") if s.use_gate else None
        self.o_proj = nnx.Linear(
            s.features, in_features, use_bias=s.use_output_bias, kernel_metadata=metadata(s.heads_axis, None), **common
        )

    def __call__[C: (KVCache, CacheLayer)](
        self,
        x: jax.Array,
        cache: C,
        step: AttentionStep,
    ) -> tuple[C, jax.Array]:
        """Attends from the tokens of a step.

        Args:
            x: `[..., in_features]`, in the layout of the step: `[seqs, in_features]` for one token of each sequence,
                `[seqs, q_len, in_features]`, or packed `[tokens, in_features]`.
            cache: this layer's, of any dtype, or `CacheLayer(stack, i)`.
            step: the `AttentionStep`, of all layers, or `step.group(i)`.

        Returns:
            The new cache, in the form it came in, and the output, of x's shape.

        Raises:
            ValueError: shapes that do not fit.
        """
        cache, out = project_and_attend(
            self.settings,
            x,
            cache,
            step,
            project=lambda name: getattr(self, name)(x),
            norms=None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm),
            sinks=None if self.sinks is None else self.sinks[...],
        )
        return cache, self.o_proj(out, out_sharding=sum_sharding(out))


class LatentAttention(nnx.Module):
    """Multi-head latent attention (MLA), whose cache holds one latent vector and one rotary key a token.

        c = norm(x W_c),  r = rotate(x W_r)              what the cache holds, for all heads
        q_h = [(x W_q)_h W_K,h^T,  rotate(x W_r,h)]      absorbed: a query of c, not of the head's keys
        out = sum_h (softmax_t(scale q_h . [c_t, r_t]) c_t) W_V,h W_O,h

    Parameters are named as in a checkpoint of a DeepSeek model, but for `k_b_proj` and `v_b_proj`:

    - `q_proj.kernel` `[in_features, num_heads * (qk_nope_head_dim + qk_rope_head_dim)]`, or with `q_lora_rank`
      `q_a_proj`, `q_a_layernorm` and `q_b_proj`.
    - `kv_a_proj_with_mqa.kernel` `[in_features, kv_lora_rank + qk_rope_head_dim]`, `kv_a_layernorm.scale`
      `[kv_lora_rank]`.
    - `k_b_proj.kernel` `[kv_lora_rank, num_heads * qk_nope_head_dim]`, W_K, and `v_b_proj.kernel`
      `[kv_lora_rank, num_heads * v_head_dim]`, W_V. A checkpoint has both in `kv_b_proj`, first W_K and then W_V of
      each head; to multiply with a part of a matrix XLA would copy it in each step.
    - `o_proj.kernel` `[num_heads * v_head_dim, in_features]`.

    If a call has on average at least `settings.expanded_from` new tokens a sequence, these see each other through keys
    and values made for each head: fewer products, and memory for `2 * tokens * num_heads` of them in each layer. Older
    tokens are attended to as above. So are all tokens in other calls, and with a window, a tree, groups of prefixes
    or a number of partitions.

    The cache has `kv_lora_rank + qk_rope_head_dim` numbers a token. One of 8 bits may have
    `kv_lora_rank + 2 * qk_rope_head_dim`, and is more precise: see `jaxpaged.ops.split_rotary`.

    Args:
        in_features: width of the input and the output.
        settings: sizes, options, dtypes.
        rngs: for the parameters.

    Example:
        >>> import jax.numpy as jnp, jaxpaged, jaxpaged.nnx
        >>> from flax import nnx
        >>> sizes = dict(kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
        >>> frequencies = jaxpaged.rotary_frequencies(4)
        >>> settings = jaxpaged.LatentSettings(num_heads=4, **sizes, rotary_frequencies=frequencies)
        >>> attention = jaxpaged.nnx.LatentAttention(16, settings, rngs=nnx.Rngs(0))
        >>> blocks = dict(num_blocks=8, block_size=16)
        >>> cache = jaxpaged.KVCache.create(**blocks, is_latent=True, num_kv_heads=1, head_dim=36, value_dim=32)
        >>> allocator = jaxpaged.BlockAllocator.create(**blocks, num_seqs=1, max_blocks_per_seq=4)
        >>> allocator, slots, ok = allocator.append(jnp.array([5]), q_len=5)
        >>> step = jaxpaged.AttentionStep.create(allocator, slots)
        >>> cache, out = attention(jnp.ones((1, 5, 16)), cache, step)
        >>> out.shape
        (1, 5, 16)

    References:
        DeepSeek-AI, DeepSeek-V2, 2024 (https://arxiv.org/abs/2405.04434), section 2.1.
    """

    def __init__(self, in_features: int, settings: LatentSettings, *, rngs: nnx.Rngs):
        self.settings = s = settings
        common: Any = dict(dtype=s.dtype, param_dtype=s.param_dtype, rngs=rngs)

        def linear(features: int, features_out: int, *, use_bias: bool = False) -> nnx.Linear:
            return nnx.Linear(features, features_out, use_bias=use_bias, **common)

        def norm(features: int) -> nnx.RMSNorm:
            return nnx.RMSNorm(features, epsilon=s.norm_epsilon, **common)

        if s.q_lora_rank is None:
            self.q_proj = linear(in_features, s.query_features)
        else:
            self.q_a_proj = linear(in_features, s.q_lora_rank, use_bias=s.use_bias)
            self.q_a_layernorm = norm(s.q_lora_rank)
            self.q_b_proj = linear(s.q_lora_rank, s.query_features)
        self.kv_a_proj_with_mqa = linear(in_features, s.latent_features, use_bias=s.use_bias)
        self.kv_a_layernorm = norm(s.kv_lora_rank)
        self.k_b_proj = linear(s.kv_lora_rank, s.num_heads * s.qk_nope_head_dim)
        self.v_b_proj = linear(s.kv_lora_rank, s.num_heads * s.v_head_dim)
        self.o_proj = linear(s.num_heads * s.v_head_dim, in_features, use_bias=s.use_bias)

    def __call__[C: (KVCache, CacheLayer)](
        self,
        x: jax.Array,
        cache: C,
        step: AttentionStep,
    ) -> tuple[C, jax.Array]:
        """As `PagedAttention.__call__`; the cache is a latent one, `KVCache.create(is_latent=True, ...)`."""
        s = self.settings
        check_latent_call(s, x, cache, step)
        q = self.q_proj(x) if s.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        latent, shared_key = jnp.split(self.kv_a_proj_with_mqa(x), [s.kv_lora_rank], axis=-1)
        cache, out = latent_attention(
            s,
            q,
            self.kv_a_layernorm(latent),
            shared_key,
            self.k_b_proj.kernel[...],
            self.v_b_proj.kernel[...],
            cache,
            step,
        )
        return cache, self.o_proj(out)


def replace[M: nnx.Module](model: M, module_type: type, call: Callable[..., Any]) -> M:
    """Replaces each call `module(*args)` by `call(module, *args)`, for the modules of a type in a model.

    For models that are not edited: `module_type` is their attention, and `call` attends to the cache instead. Call it
    on what `nnx.merge` gave, inside the step: the weights keep their names, and the model itself its attention.

    Args:
        model: changed in place. Attributes, `nnx.List` and `nnx.Dict` are searched; the model itself and `nnx.data`
            are not.
        module_type: of the modules that are replaced.
        call: gets the module, which has the weights, and what the module was called with.

    Returns:
        The model.

    Raises:
        ValueError: none is found.

    Example:
        >>> import jax.numpy as jnp, jaxpaged.nnx
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
        >>> model = jaxpaged.nnx.replace(model, nnx.Linear, lambda linear, x: 0 * linear(x))
        >>> model(jnp.ones(2))
        Array([0., 0., 0.], dtype=float32)
    """
    owners = [
        (parent, name)
        for _, parent in nnx.iter_modules(model)
        for name, child in vars(parent).items()
        if isinstance(child, module_type)
    ]
    if not owners:
        raise ValueError(
            f"the model must have modules of the type; got none of {module_type.__name__} in attributes, nnx.List and "
            "nnx.Dict. The model itself, and what nnx.data holds, are not replaced."
        )
    for parent, name in owners:
        setattr(parent, name, _Replaced(getattr(parent, name), call))
    return model


class _Replaced(nnx.Module):
    def __init__(self, module: nnx.Module, call: Callable[..., Any]):
        self.module, self.call = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.module, *args, **kwargs)
