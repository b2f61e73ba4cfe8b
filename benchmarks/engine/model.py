"""A plain model of Llama's shape over packed tokens, with random weights, for benchmarks/engine/throughput.py; with
latent attention of DeepSeek-V2-Lite's shape too."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxpaged.nnx
from benchmarks.models.llama_step import LlamaConfig, fill, llama_3_8b, toy
from jaxpaged import LatentSettings, LayerGroups, StepAttention, rotary_frequencies
from jaxpaged._engine.slices import Apply
from lib.llama_config import LatentConfig

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
    # The place of its experts is taken by an MLP as wide as the eight that a token meets.
    "v2lite": dataclasses.replace(
        llama_3_8b(27),
        vocab_size=102_400,
        features=2048,
        hidden_features=8 * 1408,
        num_heads=16,
        rotary_frequencies=rotary_frequencies(64),
        latent=LatentConfig(
            latent_dim=512, rotary_dim=64, value_dim=128, query_rank=None, rotary_factor=1.0, interleaved=True
        ),
    ),
    "toy": toy(2),
    "toy_latent": dataclasses.replace(
        toy(2),
        rotary_frequencies=rotary_frequencies(8),
        latent=LatentConfig(
            latent_dim=32, rotary_dim=8, value_dim=32, query_rank=None, rotary_factor=1.0, interleaved=True
        ),
    ),
}
# Of models whose keys and values are of each head.
PLAIN = tuple(name for name, config in CONFIGS.items() if config.latent is None)


def random_weights(config: LlamaConfig) -> Any:
    """bfloat16, q, k and v in one matrix `[in, out]`, gate and up in another."""

    def matrix(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    attended, kv_features = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention: Any = {
        "qkv": matrix(config.features, attended + 2 * kv_features),
        "out": matrix(attended, config.features),
    }
    if config.latent is not None:
        attention = {"attention": _latent_attention(config)[1]}
    layer = attention | {
        "attention_norm": matrix(config.features),
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


def _latent_attention(config: LlamaConfig, **options: Any) -> Any:
    """The module without its parameters, and their shapes."""
    assert config.latent is not None
    settings = LatentSettings(
        **dataclasses.asdict(config.latent),
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        rotary_frequencies=config.rotary_frequencies,
        dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16,
        **options,
    )

    def make() -> jaxpaged.nnx.LatentAttention:
        return jaxpaged.nnx.LatentAttention(config.features, settings, rngs=nnx.Rngs(0))

    return nnx.split(nnx.eval_shape(make))


def packed_model(config: LlamaConfig, groups: LayerGroups | None = None, **attention_options: Any) -> Apply:
    """`groups`: of its layers, which then share caches."""
    windows = config.windows or (None,) * config.num_layers
    places = [(i, None) for i in range(config.num_layers)] if groups is None else groups.layers
    latent = None if config.latent is None else _latent_attention(config, **attention_options)[0]

    def normalise(x: jax.Array, weight: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + config.norm_epsilon)
        return (wide * scale).astype(x.dtype) * weight[None]

    def apply(weights: Any, tokens: jax.Array, positions: jax.Array, caches: Any, attend: StepAttention) -> Any:
        x = weights["embedding"][tokens]
        heads, kv_heads = config.num_heads, config.num_kv_heads
        new_caches = list(caches)
        for layer, window, (index, group) in zip(weights["layers"], windows, places, strict=True):
            cache = new_caches[index]
            normalised = normalise(x, layer["attention_norm"])
            if latent is not None:
                cache, out = attend.call(nnx.merge(latent, layer["attention"]), normalised, cache)
                x += out
            else:
                qkv = (normalised @ layer["qkv"]).reshape(len(tokens), -1, config.head_dim)
                q, k, v = jnp.split(qkv, (heads, heads + kv_heads), axis=1)
                options = dict(rotary_frequencies=config.rotary_frequencies, group=group, sliding_window=window)
                cache, out = attend(q, k, v, cache, **options | attention_options)
                x += out.reshape(len(tokens), -1) @ layer["out"]
            new_caches[index] = cache
            gate, up = jnp.split(normalise(x, layer["mlp_norm"]) @ layer["gate_up"], 2, axis=-1)
            x += (jax.nn.silu(gate) * up) @ layer["down"]
        newest = normalise(attend.newest(x), weights["norm"])
        logits = (
            newest @ weights["head"] if "head" in weights else jnp.einsum("sf,vf->sv", newest, weights["embedding"])
        )
        return tuple(new_caches), logits

    return apply
