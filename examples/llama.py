"""A small Llama in Flax NNX, its attention swapped for `jaxpaged.nnx.PagedAttention`."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import jaxpaged
import jaxpaged.nnx


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int
    context: int  # the most tokens of a sequence, prompt and continuation
    features: int
    hidden_features: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rotary_frequencies: tuple[float, ...]
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = True


class MLP(nnx.Module):
    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        def linear(features_in: int, features_out: int) -> nnx.Linear:
            return nnx.Linear(
                features_in, features_out, use_bias=config.mlp_bias, dtype=dtype, param_dtype=dtype, rngs=rngs
            )

        self.gate_proj = linear(config.features, config.hidden_features)
        self.up_proj = linear(config.features, config.hidden_features)
        self.down_proj = linear(config.hidden_features, config.features)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        def norm() -> nnx.RMSNorm:
            return nnx.RMSNorm(config.features, epsilon=config.norm_epsilon, dtype=dtype, param_dtype=dtype, rngs=rngs)

        self.input_layernorm = norm()
        self.self_attn = jaxpaged.nnx.PagedAttention(
            config.features,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_frequencies=config.rotary_frequencies,
            use_bias=config.attention_bias,
            use_output_bias=config.attention_bias,
            dtype=dtype,
            param_dtype=dtype,
            rngs=rngs,
        )
        self.post_attention_layernorm = norm()
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: jax.Array, cache: jaxpaged.KVCache, allocator: jaxpaged.BlockAllocator, slots: jax.Array
    ) -> tuple[jaxpaged.KVCache, jax.Array]:
        cache, attended = self.self_attn(self.input_layernorm(x), cache, allocator, slots)
        x = x + attended
        return cache, x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    """Parameter names are those of a Hugging Face checkpoint."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.embed_tokens = nnx.Embed(config.vocab_size, config.features, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.features, epsilon=config.norm_epsilon, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.lm_head = (
            None
            if config.tie_embeddings
            else nnx.Linear(
                config.features, config.vocab_size, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs
            )
        )

    def __call__(
        self,
        tokens: jax.Array,  # int32 [seqs, q_len], the newest of each sequence, the last one last
        caches: tuple[jaxpaged.KVCache, ...],  # one a layer
        allocator: jaxpaged.BlockAllocator,  # after the append that made room for the tokens
        slots: jax.Array,  # int32 [seqs, q_len], from that append
    ) -> tuple[tuple[jaxpaged.KVCache, ...], jax.Array]:
        """Returns the new caches and the logits after each sequence's last token, f32 [seqs, vocab_size]."""
        x = self.embed_tokens(tokens)
        new_caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            cache, x = layer(x, cache, allocator, slots)
            new_caches.append(cache)
        x = self.norm(x[:, -1])
        logits = self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)
        return tuple(new_caches), logits.astype(jnp.float32)
