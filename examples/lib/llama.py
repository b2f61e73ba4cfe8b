"""A Llama in Flax NNX on modules of `jaxpaged.nnx`, and by its config a Mistral, Qwen, Gemma, gpt-oss or DeepSeek."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import jaxpaged
import jaxpaged.nnx
from lib.llama_config import LlamaConfig
from lib.routed_experts import Experts, RoutedExperts


def sum_over(axis: str | None, x: jax.Array) -> jax.Array:
    return x if axis is None else jax.lax.psum(x, axis)


class Linear(nnx.Module):
    """x W^T + b, the weight [out, in] as checkpoints hold it.

    nnx.Linear holds it transposed. With the few rows of x in a decode step, XLA on a CPU reads it in this order about
    twice as fast (2 cores, float32, 1536 -> 576: 35 against 14 GB/s for 1 row, 15 against 8 for 8 rows).
    """

    def __init__(
        self, features_in: int, features_out: int, *, use_bias: bool = False, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        initialize = nnx.initializers.lecun_normal(in_axis=1, out_axis=0)
        self.weight = nnx.Param(initialize(rngs.params(), (features_out, features_in), dtype))
        self.bias = nnx.Param(jnp.zeros(features_out, dtype)) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., in] -> [..., out]
        y = jnp.einsum("oi,...i->...o", self.weight[...], x)
        return y if self.bias is None else y + jnp.broadcast_to(self.bias[...], y.shape)


class RMSNorm(nnx.Module):
    """x / rms(x) in float32, then times a weight in x's dtype, as Hugging Face computes it.

    nnx.RMSNorm multiplies by the weight before it rounds, for which XLA on a GPU takes two kernels instead of one. With
    `norm_plus_one` this one does too, because weight + 1 would lose bits in a narrow dtype.
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


class MLP(nnx.Module):
    def __init__(
        self, config: LlamaConfig, hidden_features: int, *, axis: str | None, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        def linear(features_in: int, features_out: int) -> Linear:
            return Linear(features_in, features_out, use_bias=config.mlp_bias, dtype=dtype, rngs=rngs)

        self.gate_up_proj = linear(config.features, 2 * hidden_features)
        self.down_proj = linear(hidden_features, config.features)
        self.activation = nnx.silu if config.activation == "silu" else nnx.gelu
        self.axis = axis

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return sum_over(self.axis, self.down_proj(self.activation(gate) * up))


class MixtureOfExperts(nnx.Module):
    """The sum of the `experts_per_token` experts with the largest logits, weighted with their softmax."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.router = Linear(config.features, config.num_experts, use_bias=True, dtype=dtype, rngs=rngs)
        sizes = config.num_experts, config.features, config.hidden_features
        self.experts = Experts(*sizes, clipped=config.clipped, dtype=dtype, rngs=rngs)
        self.experts_per_token = config.experts_per_token

    def __call__(self, x: jax.Array) -> jax.Array:
        logits = self.router(x)
        largest, chosen = jax.lax.top_k(logits, self.experts_per_token)
        is_chosen = jax.nn.one_hot(chosen, logits.shape[-1], dtype=x.dtype)
        return self.experts(x, jnp.einsum("...k,...ke->...e", nnx.softmax(largest), is_chosen))


Attention = jaxpaged.nnx.PagedAttention | jaxpaged.nnx.LatentAttention


def _attention(config: LlamaConfig, i: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> jaxpaged.nnx.PagedAttention:
    window = None if config.windows is None else config.windows[i]
    frequencies = config.rotary_frequencies
    if window is not None and config.window_frequencies is not None:
        frequencies = config.window_frequencies
    settings = jaxpaged.AttentionSettings(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rotary_frequencies=frequencies,
        use_bias=config.attention_bias,
        use_output_bias=config.output_bias,
        norm_epsilon=config.norm_epsilon if config.use_qk_norm else None,
        use_sinks=config.use_sinks,
        scale=config.scale,
        sliding_window=window,
        logits_soft_cap=config.logits_soft_cap,
        dtype=dtype,
        param_dtype=dtype,
    )
    attention = jaxpaged.nnx.PagedAttention(config.features, settings, rngs=rngs)
    if config.use_qk_norm:  # RMSNorm of this file instead of nnx.RMSNorm
        attention.q_norm = RMSNorm(config.head_dim, config, dtype=dtype)  # type: ignore[assignment]
        attention.k_norm = RMSNorm(config.head_dim, config, dtype=dtype)  # type: ignore[assignment]
    return attention


def _latent_attention(config: LlamaConfig, i: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> jaxpaged.nnx.LatentAttention:
    assert config.latent is not None
    settings = jaxpaged.LatentSettings(
        **dataclasses.asdict(config.latent),
        num_heads=config.num_heads,
        qk_nope_head_dim=config.head_dim,
        rotary_frequencies=config.rotary_frequencies,
        scale=config.scale,
        use_bias=config.attention_bias,
        dtype=dtype,
        param_dtype=dtype,
    )
    return jaxpaged.nnx.LatentAttention(config.features, settings, rngs=rngs)


def _mlp(config: LlamaConfig, i: int, *, axis: str | None, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Module:
    if config.num_experts:
        return MixtureOfExperts(config, dtype=dtype, rngs=rngs)
    routing = config.routing
    if routing is None or i < routing.first_layer:
        return MLP(config, config.hidden_features, axis=axis, dtype=dtype, rngs=rngs)
    shared = MLP(config, routing.shared_features, axis=axis, dtype=dtype, rngs=rngs)
    return RoutedExperts(routing, config.features, shared, axis=axis, dtype=dtype, rngs=rngs)


class Layer(nnx.Module):
    def __init__(self, config: LlamaConfig, i: int, *, axis: str | None, dtype: DTypeLike, rngs: nnx.Rngs):
        def norm(features: int) -> RMSNorm:
            return RMSNorm(features, config, dtype=dtype)

        self.input_layernorm = norm(config.features)
        make_attention = _latent_attention if config.latent is not None else _attention
        self.self_attn: Attention = make_attention(config, i, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = norm(config.features)
        if config.use_post_norms:
            self.pre_feedforward_layernorm = norm(config.features)
            self.post_feedforward_layernorm = norm(config.features)
        self.use_post_norms = config.use_post_norms
        self.mlp = _mlp(config, i, axis=axis, dtype=dtype, rngs=rngs)
        self.axis = axis

    def __call__(
        self, x: jax.Array, cache: jaxpaged.KVCache, step: jaxpaged.AttentionStep
    ) -> tuple[jaxpaged.KVCache, jax.Array]:
        cache, attended = self.self_attn(self.input_layernorm(x), cache, step)
        attended = sum_over(self.axis, attended)
        if self.use_post_norms:  # the same name, but this norm is of attention's output
            x = x + self.post_attention_layernorm(attended)
            return cache, x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        x = x + attended
        return cache, x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    """Parameters are named as in a Hugging Face checkpoint, except for two fused projections in each layer.

    Fewer and larger products read the weights of a decode step faster; `parts_of` lists them.

    With an `axis`, it is one device's shard of a model over this mesh axis, for use inside `jax.shard_map`:
    `tensor_parallel.py` shards the config and the weights.
    """

    def __init__(self, config: LlamaConfig, *, axis: str | None = None, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.axis = axis
        self.embed_tokens = nnx.Embed(config.vocab_size, config.features, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.embedding_scale = config.embedding_scale
        self.layers = nnx.List([Layer(config, i, axis=axis, dtype=dtype, rngs=rngs) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.features, config, dtype=dtype)
        self.final_soft_cap = config.final_soft_cap
        self.lm_head = (
            None if config.tie_embeddings else Linear(config.features, config.vocab_size, dtype=dtype, rngs=rngs)
        )

    def __call__(
        self,
        tokens: jax.Array,  # int32, in the layout of the step
        caches: Sequence[jaxpaged.KVCache],  # one a layer
        step: jaxpaged.AttentionStep,
    ) -> tuple[tuple[jaxpaged.KVCache, ...], jax.Array]:
        """The new caches and the last layer's output, [..., features], of which `logits` is the head."""
        x = self.embed(tokens)
        new_caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            cache, x = layer(x, cache, step)
            new_caches.append(cache)
        return tuple(new_caches), x

    def logits(self, x: jax.Array) -> jax.Array:  # [..., features] -> f32 [..., vocab_size]
        # Not embed_tokens.attend: x @ embedding.T transposes the embedding at every step on a CPU.
        head = self.embed_tokens.embedding if self.lm_head is None else self.lm_head.weight
        logits = jnp.einsum("vf,...f->...v", head[...], self.norm(x), preferred_element_type=jnp.float32)
        if self.final_soft_cap is not None:
            logits = self.final_soft_cap * jnp.tanh(logits / self.final_soft_cap)
        return logits if self.axis is None else jax.lax.all_gather(logits, self.axis, axis=-1, tiled=True)

    @property
    def vocab_size(self) -> int:
        return self.embed_tokens.num_embeddings * (1 if self.axis is None else jax.lax.axis_size(self.axis))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """[..., features]."""
        x = self._rows(tokens)
        return x if self.embedding_scale == 1 else x * jnp.asarray(self.embedding_scale, x.dtype)

    def _rows(self, tokens: jax.Array) -> jax.Array:
        """On several devices, each has some rows, and gives zeros for the tokens of the others."""
        if self.axis is None:
            return self.embed_tokens(tokens)
        num_rows = self.embed_tokens.num_embeddings
        rows = tokens - jax.lax.axis_index(self.axis) * num_rows
        own = self.embed_tokens(jnp.clip(rows, 0, num_rows - 1))
        is_own = ((rows >= 0) & (rows < num_rows))[..., None]
        return jax.lax.psum(jnp.where(is_own, own, jnp.zeros_like(own)), self.axis)
