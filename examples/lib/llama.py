"""A Llama model in Flax NNX with the modules of `jaxpaged.nnx`. Its config also covers Mistral, Mixtral, Qwen,
Gemma, gpt-oss and DeepSeek."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import jaxpaged
import jaxpaged.nnx
from lib.llama_config import LlamaConfig
from lib.mlp import Linear, create_mlp
from lib.sums import sum_over


class RMSNorm(nnx.Module):
    """x / rms(x) in float32, rounded to x's dtype and then multiplied by a weight, as in Hugging Face's models.

    nnx.RMSNorm multiplies before it rounds, for which XLA needs two kernels on a GPU instead of one. With
    `norm_plus_one` this module does so too, because weight + 1 would lose bits in a narrow dtype.
    """

    def __init__(self, features: int, config: LlamaConfig, *, dtype: DTypeLike):
        self.plus_one = config.norm_plus_one
        self.scale = nnx.Param(jnp.full(features, 0 if self.plus_one else 1, dtype))
        self.epsilon = config.norm_epsilon

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., features]
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + self.epsilon)
        scale = jnp.broadcast_to(self.scale[...], x.shape)
        if self.plus_one:
            return (wide * (scale.astype(jnp.float32) + 1)).astype(x.dtype)
        return wide.astype(x.dtype) * scale


Attention = jaxpaged.nnx.PagedAttention | jaxpaged.nnx.LatentAttention


def create_attention(config: LlamaConfig, i: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> Attention:
    """The attention of layer i."""
    common: dict[str, Any] = dict(
        num_heads=config.num_heads,
        rotary_frequencies=config.rotary_frequencies,
        scale=config.scale,
        use_bias=config.attention_bias,
        dtype=dtype,
        param_dtype=dtype,
    )
    if config.latent is not None:
        sizes = dataclasses.asdict(config.latent) | dict(qk_nope_head_dim=config.head_dim)
        return jaxpaged.nnx.LatentAttention(config.features, jaxpaged.LatentSettings(**sizes, **common), rngs=rngs)
    window = None if config.windows is None else config.windows[i]
    if window is not None and config.window_frequencies is not None:
        common["rotary_frequencies"] = config.window_frequencies
    settings = jaxpaged.AttentionSettings(
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        use_output_bias=config.output_bias,
        norm_epsilon=config.norm_epsilon if config.use_qk_norm else None,
        use_sinks=config.use_sinks,
        sliding_window=window,
        logits_soft_cap=config.logits_soft_cap,
        **common,
    )
    attention = jaxpaged.nnx.PagedAttention(config.features, settings, rngs=rngs)
    if config.use_qk_norm:  # RMSNorm of this file instead of nnx.RMSNorm
        attention.q_norm = RMSNorm(config.head_dim, config, dtype=dtype)  # type: ignore[assignment]
        attention.k_norm = RMSNorm(config.head_dim, config, dtype=dtype)  # type: ignore[assignment]
    return attention


class Layer(nnx.Module):
    def __init__(self, config: LlamaConfig, i: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        norm = functools.partial(RMSNorm, config.features, config, dtype=dtype)
        self.input_layernorm = norm()
        self.self_attn = create_attention(config, i, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = norm()
        if config.use_post_norms:
            self.pre_feedforward_layernorm = norm()
            self.post_feedforward_layernorm = norm()
        self.use_post_norms = config.use_post_norms
        self.mlp = create_mlp(config, i, dtype=dtype, rngs=rngs)
        self.axis = config.axis

    def __call__(
        self, x: jax.Array, cache: jaxpaged.KVCache, step: jaxpaged.AttentionStep
    ) -> tuple[jaxpaged.KVCache, jax.Array]:
        cache, attended = self.self_attn(self.input_layernorm(x), cache, step)
        attended = sum_over(self.axis, attended)
        if self.use_post_norms:  # here the norm of this name applies to attention's output
            x = x + self.post_attention_layernorm(attended)
            return cache, x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        x = x + attended
        return cache, x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    """A decoder-only model. Parameters have the names of Hugging Face checkpoints, except for fused projections.

    Each layer has two of them, which `parts_of` lists: fewer and larger products are faster in a decode step.

    If the config has an `axis`, the model is one device's shard, for use inside `jax.shard_map`. `tensor_parallel.py`
    shards the config and the weights.
    """

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.embed_tokens = nnx.Embed(config.vocab_size, config.features, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.embedding_scale = config.embedding_scale
        self.layers = nnx.List([Layer(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.features, config, dtype=dtype)
        self.final_soft_cap = config.final_soft_cap
        self.lm_head = (
            None if config.tie_embeddings else Linear(config.features, config.vocab_size, dtype=dtype, rngs=rngs)
        )

    def __call__(
        self,
        tokens: jax.Array,  # int32, in the layout of the step
        caches: Sequence[jaxpaged.KVCache],  # one per layer
        step: jaxpaged.AttentionStep,
    ) -> tuple[tuple[jaxpaged.KVCache, ...], jax.Array]:
        """Returns the new caches and the last layer's output, [..., features]. `logits` applies the head."""
        x = self.embed(tokens)
        new_caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            cache, x = layer(x, cache, step)
            new_caches.append(cache)
        return tuple(new_caches), x

    def logits(self, x: jax.Array) -> jax.Array:  # [..., features] -> f32 [..., vocab_size]
        # Not embed_tokens.attend: its x @ embedding.T transposes the embedding in every step on a CPU.
        head = self.embed_tokens.embedding if self.lm_head is None else self.lm_head.weight
        logits = jnp.einsum("vf,...f->...v", head[...], self.norm(x), preferred_element_type=jnp.float32)
        if self.final_soft_cap is not None:
            logits = self.final_soft_cap * jnp.tanh(logits / self.final_soft_cap)
        return logits

    def embed(self, tokens: jax.Array) -> jax.Array:
        """[..., features]."""
        x = self.embed_tokens(tokens)
        return x if self.embedding_scale == 1 else x * jnp.asarray(self.embedding_scale, x.dtype)
