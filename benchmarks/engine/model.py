"""A plain model of Llama's shape over packed tokens, with random weights, for benchmarks/engine/throughput.py."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models.llama_step import LlamaConfig, fill, llama_3_8b, toy
from jaxpaged import StepAttention, rotary_frequencies
from jaxpaged._engine.slices import Apply

CONFIGS = {
    "8b": llama_3_8b(32),
    "1b": dataclasses.replace(
        llama_3_8b(16),
        features=2048,
        hidden_features=8192,
        head_dim=64,
        rotary_frequencies=rotary_frequencies(64, 500_000.0),
        tie_embeddings=True,
    ),
    "135m": dataclasses.replace(
        llama_3_8b(30),
        vocab_size=49_152,
        features=576,
        hidden_features=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rotary_frequencies=rotary_frequencies(64, 10_000.0),
        tie_embeddings=True,
    ),
    "toy": toy(2),
}


def random_weights(config: LlamaConfig) -> Any:
    """bfloat16, q, k and v in one matrix `[in, out]`, gate and up in another."""

    def matrix(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    attended, kv_features = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = {
        "attention_norm": matrix(config.features),
        "qkv": matrix(config.features, attended + 2 * kv_features),
        "out": matrix(attended, config.features),
        "mlp_norm": matrix(config.features),
        "gate_up": matrix(config.features, 2 * config.hidden_features),
        "down": matrix(config.hidden_features, config.features),
    }
    weights = {
        "embedding": matrix(config.vocab_size, config.features),
        "layers": [layer] * config.num_layers,
        "norm": matrix(config.features),
    }
    return fill(weights if config.tie_embeddings else weights | {"head": matrix(config.features, config.vocab_size)})


def packed_model(config: LlamaConfig, **attention_options: Any) -> Apply:
    def normalise(x: jax.Array, weight: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + config.norm_epsilon)
        return (wide * scale).astype(x.dtype) * weight[None]

    def apply(weights: Any, tokens: jax.Array, positions: jax.Array, caches: Any, attend: StepAttention) -> Any:
        x = weights["embedding"][tokens]
        heads, kv_heads = config.num_heads, config.num_kv_heads
        new_caches = []
        for layer, cache in zip(weights["layers"], caches, strict=True):
            qkv = (normalise(x, layer["attention_norm"]) @ layer["qkv"]).reshape(len(tokens), -1, config.head_dim)
            q, k, v = jnp.split(qkv, (heads, heads + kv_heads), axis=1)
            frequencies = config.rotary_frequencies
            cache, out = attend(q, k, v, cache, rotary_frequencies=frequencies, **attention_options)
            new_caches.append(cache)
            x += out.reshape(len(tokens), -1) @ layer["out"]
            gate, up = jnp.split(normalise(x, layer["mlp_norm"]) @ layer["gate_up"], 2, axis=-1)
            x += (jax.nn.silu(gate) * up) @ layer["down"]
        newest = normalise(attend.newest(x), weights["norm"])
        logits = (
            newest @ weights["head"] if "head" in weights else jnp.einsum("sf,vf->sv", newest, weights["embedding"])
        )
        return tuple(new_caches), logits

    return apply
