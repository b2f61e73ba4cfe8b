"""A small Llama in Flax NNX, its attention swapped for `jaxpaged.nnx.PagedAttention`."""

import dataclasses
from typing import Any

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


def fused_parts(config: LlamaConfig) -> dict[str, dict[str, int]]:
    """Which projections the model holds as one: by its name, their names in a checkpoint and how wide they are.

    A checkpoint holds each part `[outputs, features]`. One after the other they are
        qkv_proj      [(num_heads + 2 * num_kv_heads) * head_dim, features], here transposed, as nnx.Linear holds it
        gate_up_proj  [2 * hidden_features, features]
    """
    kv_outputs = config.num_kv_heads * config.head_dim
    return {
        "qkv_proj": {"q_proj": config.num_heads * config.head_dim, "k_proj": kv_outputs, "v_proj": kv_outputs},
        "gate_up_proj": {"gate_proj": config.hidden_features, "up_proj": config.hidden_features},
    }


def sum_over(axis: str | None, x: jax.Array) -> jax.Array:
    return x if axis is None else jax.lax.psum(x, axis)


class Linear(nnx.Module):
    """x W^T + b, the weight [out, in] as checkpoints hold it.

    nnx.Linear holds it the other way round. With the few rows of x of a decode step, XLA on a CPU reads it this way
    about twice as fast (2 cores, float32, 1536 -> 576: 35 against 14 GB/s for 1 row, 15 against 8 for 8 rows).
    """

    def __init__(
        self, features_in: int, features_out: int, *, use_bias: bool = False, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        initialize = nnx.initializers.lecun_normal(in_axis=1, out_axis=0)
        self.weight = nnx.Param(initialize(rngs.params(), (features_out, features_in), dtype))
        self.bias = nnx.Param(jnp.zeros(features_out, dtype)) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., in] -> [..., out]
        y = jnp.einsum("oi,...i->...o", self.weight[...], x)
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """x / rms(x) in float32, then times a weight in x's dtype, as Hugging Face computes it.

    nnx.RMSNorm multiplies with the weight before it rounds: that takes XLA on a GPU two kernels instead of one.
    """

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones(config.features, dtype))
        self.epsilon = config.norm_epsilon

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., features]
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + self.epsilon)
        return wide.astype(x.dtype) * jnp.broadcast_to(self.scale[...], x.shape)


class MLP(nnx.Module):
    def __init__(self, config: LlamaConfig, *, axis: str | None, dtype: DTypeLike, rngs: nnx.Rngs):
        def linear(features_in: int, features_out: int) -> Linear:
            return Linear(features_in, features_out, use_bias=config.mlp_bias, dtype=dtype, rngs=rngs)

        self.gate_up_proj = linear(config.features, 2 * config.hidden_features)
        self.down_proj = linear(config.hidden_features, config.features)
        self.axis = axis

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return sum_over(self.axis, self.down_proj(nnx.silu(gate) * up))


class Layer(nnx.Module):
    def __init__(self, config: LlamaConfig, *, axis: str | None, dtype: DTypeLike, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config, dtype=dtype)
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
        self.post_attention_layernorm = RMSNorm(config, dtype=dtype)
        self.mlp = MLP(config, axis=axis, dtype=dtype, rngs=rngs)
        self.axis = axis

    def __call__(
        self,
        x: jax.Array,
        cache: jaxpaged.KVCache,
        allocator: jaxpaged.BlockAllocator,
        slots: jax.Array,
        **which: Any,  # of packed tokens, trees and shared prefixes
    ) -> tuple[jaxpaged.KVCache, jax.Array]:
        cache, attended = self.self_attn(self.input_layernorm(x), cache, allocator, slots, **which)
        x = x + sum_over(self.axis, attended)
        return cache, x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    """Parameter names are those of a Hugging Face checkpoint, but for two of each layer that stand for several there.

    Fewer and larger products read the weights of a decode step faster; `fused_parts` says what goes where.

    With an `axis` it is one device's part of a model that lies over this mesh axis, for use inside `jax.shard_map`:
    `tensor_parallel.py` cuts the config and the weights.
    """

    def __init__(self, config: LlamaConfig, *, axis: str | None = None, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.axis = axis
        self.embed_tokens = nnx.Embed(config.vocab_size, config.features, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(config, axis=axis, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config, dtype=dtype)
        self.lm_head = (
            None if config.tie_embeddings else Linear(config.features, config.vocab_size, dtype=dtype, rngs=rngs)
        )

    def __call__(
        self,
        tokens: jax.Array,  # int32 [seqs, q_len], the newest of each sequence, the last one last; or packed, [tokens]
        caches: tuple[jaxpaged.KVCache, ...],  # one a layer
        allocator: jaxpaged.BlockAllocator,  # after the append that made room for the tokens
        slots: jax.Array,  # int32, one a token
        *,
        query_starts: jax.Array | None = None,  # int32 [seqs + 1], of packed tokens: where each sequence's begin
        positions: jax.Array | None = None,  # int32, one a token, and
        tree_mask: jax.Array | None = None,  # of `jaxpaged.tree_mask`: of tokens that are a tree
        shared_prefix: jax.Array | None = None,  # int32 [] or [groups]: tokens that sequences begin with alike
        num_logits: int | None = None,
    ) -> tuple[tuple[jaxpaged.KVCache, ...], jax.Array]:
        """Returns the new caches and the logits after each sequence's last token, f32 [seqs, vocab_size].

        With `num_logits` those after its last so many tokens, f32 [seqs, num_logits, vocab_size].
        """
        which = dict(query_starts=query_starts, positions=positions, tree_mask=tree_mask, shared_prefix=shared_prefix)
        x = self.embed(tokens)
        new_caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            cache, x = layer(x, cache, allocator, slots, **which)
            new_caches.append(cache)
        if query_starts is not None:
            x = x[jnp.maximum(query_starts[1:] - 1, 0)]
        else:
            x = x[:, -num_logits:] if num_logits else x[:, -1]
        # Not embed_tokens.attend: x @ embedding.T transposes the embedding at every step on a CPU.
        head = self.embed_tokens.embedding if self.lm_head is None else self.lm_head.weight
        logits = jnp.einsum("vf,...f->...v", head[...], self.norm(x), preferred_element_type=jnp.float32)
        if self.axis is not None:
            logits = jax.lax.all_gather(logits, self.axis, axis=-1, tiled=True)
        return tuple(new_caches), logits

    @property
    def vocab_size(self) -> int:
        return self.embed_tokens.num_embeddings * (1 if self.axis is None else jax.lax.axis_size(self.axis))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """[..., features]. Of several devices, each has some rows, and zeros for the tokens of the others."""
        if self.axis is None:
            return self.embed_tokens(tokens)
        num_rows = self.embed_tokens.num_embeddings
        rows = tokens - jax.lax.axis_index(self.axis) * num_rows
        own = self.embed_tokens(jnp.clip(rows, 0, num_rows - 1))
        is_own = ((rows >= 0) & (rows < num_rows))[..., None]
        return jax.lax.psum(jnp.where(is_own, own, jnp.zeros_like(own)), self.axis)
