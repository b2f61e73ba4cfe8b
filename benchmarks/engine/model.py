"""The models of the benchmarks, with random weights: Llama's shape over packed tokens, optionally with latent attention
in DeepSeek-V2-Lite's shape, and gpt-oss's shape in the model of examples/lib/llama.py."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxpaged.nnx
from benchmarks.harness import random
from jaxpaged import AttentionStep, LatentSettings, rotary_attention_factor, rotary_frequencies
from lib.llama import Llama
from lib.llama_config import Clipped, LatentConfig, LlamaConfig

LLAMA_3_8B = LlamaConfig(
    vocab_size=128_256,
    context=8192,
    features=4096,
    hidden_features=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    norm_epsilon=1e-5,
    rotary_frequencies=rotary_frequencies(128, 500_000.0),
    tie_embeddings=False,
)
TOY = dataclasses.replace(  # for a CPU
    LLAMA_3_8B,
    vocab_size=1000,
    features=128,
    hidden_features=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rotary_frequencies=rotary_frequencies(32),
)


def qwen_3(features: int, hidden_features: int, num_layers: int, num_heads: int) -> LlamaConfig:
    """The shape of a dense Qwen3 model, without its norms of q and k."""
    return dataclasses.replace(
        LLAMA_3_8B,
        vocab_size=151_936,
        features=features,
        hidden_features=hidden_features,
        num_layers=num_layers,
        num_heads=num_heads,
        rotary_frequencies=rotary_frequencies(128, 1_000_000.0),
        tie_embeddings=True,
    )


YARN = dict(  # gpt-oss's rotary embedding, with Hugging Face's names
    rope_type="yarn",
    rope_theta=150_000.0,
    factor=32.0,
    original_max_position_embeddings=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
)
GPT_OSS_20B = LlamaConfig(
    vocab_size=201_088,
    context=131_072,
    features=2880,
    hidden_features=2880,
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    norm_epsilon=1e-5,
    rotary_frequencies=rotary_frequencies(64, scaling=YARN, max_length=131_072),
    attention_bias=True,
    output_bias=True,
    tie_embeddings=False,
    windows=(128, None) * 12,
    scale=64**-0.5 * rotary_attention_factor(YARN) ** 2,
    use_sinks=True,
    num_experts=32,
    experts_per_token=4,
    clipped=Clipped(alpha=1.702, limit=7.0),
)

CONFIGS = {
    "8b": LLAMA_3_8B,
    "70b": dataclasses.replace(LLAMA_3_8B, features=8192, hidden_features=28_672, num_layers=80, num_heads=64),
    "0.6b": qwen_3(1024, 3072, 28, 16),
    "1.7b": qwen_3(2048, 6144, 28, 16),
    "4b": qwen_3(2560, 9728, 36, 32),
    "1b": dataclasses.replace(
        LLAMA_3_8B,
        num_layers=16,
        features=2048,
        hidden_features=8192,
        head_dim=64,
        rotary_frequencies=rotary_frequencies(64, 500_000.0),
        tie_embeddings=True,
    ),
    # An MLP as wide as the eight experts that a token uses replaces the experts.
    "v2lite": dataclasses.replace(
        LLAMA_3_8B,
        num_layers=27,
        vocab_size=102_400,
        features=2048,
        hidden_features=8 * 1408,
        num_heads=16,
        rotary_frequencies=rotary_frequencies(64),
        latent=LatentConfig(
            kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=None, rotary_factor=1.0, interleaved=True
        ),
    ),
    "gpt_oss_20b": GPT_OSS_20B,
    "toy": TOY,
    "toy_latent": dataclasses.replace(
        TOY,
        rotary_frequencies=rotary_frequencies(8),
        latent=LatentConfig(
            kv_lora_rank=32, qk_rope_head_dim=8, v_head_dim=32, q_lora_rank=None, rotary_factor=1.0, interleaved=True
        ),
    ),
    "toy_gpt_oss": dataclasses.replace(
        GPT_OSS_20B,
        vocab_size=1000,
        features=128,
        hidden_features=192,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rotary_frequencies=rotary_frequencies(32),
        windows=(16, None),
        scale=None,
        num_experts=8,
        experts_per_token=3,
    ),
}
# Models without latent attention
PLAIN = tuple(name for name, config in CONFIGS.items() if config.latent is None)


def fill(shapes: Any) -> Any:
    """Random bfloat16 weights for a tree of shapes, which may have shardings; ones for the norms."""
    leaves, tree = jax.tree.flatten_with_path(shapes)
    filled = [
        jnp.ones(leaf.shape, jnp.bfloat16, device=leaf.sharding)
        if "norm" in jax.tree_util.keystr(path)
        else random(seed, shape=tuple(leaf.shape), dtype="bfloat16", sharding=leaf.sharding) * jnp.bfloat16(0.02)
        for seed, (path, leaf) in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, filled)


def shortened(config: LlamaConfig, num_layers: int) -> LlamaConfig:
    """The model's first layers."""
    windows = None if config.windows is None else config.windows[:num_layers]
    return dataclasses.replace(config, num_layers=num_layers, windows=windows)


def random_weights(config: LlamaConfig) -> Any:
    """bfloat16, q, k and v in one matrix `[in, out]`, gate and up in another. With experts: of `example_model`."""
    if config.num_experts:
        return fill(example_model(config)[1])

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


def example_model(config: LlamaConfig, **attention_options: Any) -> tuple[nnx.GraphDef[Llama], nnx.State]:
    """The model of examples/lib/llama.py without its parameters, and their shapes."""
    model = nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    for layer in model.layers:
        attention = layer.self_attn
        attention.settings = dataclasses.replace(attention.settings, **attention_options)
    return nnx.split(model)


def _latent_attention(config: LlamaConfig, **options: Any) -> Any:
    """The module without its parameters, and their shapes."""
    assert config.latent is not None
    settings = LatentSettings(
        **dataclasses.asdict(config.latent),
        num_heads=config.num_heads,
        qk_nope_head_dim=config.head_dim,
        rotary_frequencies=config.rotary_frequencies,
        dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16,
        **options,
    )

    def make() -> jaxpaged.nnx.LatentAttention:
        return jaxpaged.nnx.LatentAttention(config.features, settings, rngs=nnx.Rngs(0))

    return nnx.split(nnx.eval_shape(make))


def packed_model(config: LlamaConfig, **attention_options: Any) -> Any:
    """The `apply` of an engine, with one cache per layer."""
    latent = None if config.latent is None else _latent_attention(config, **attention_options)[0]
    normalise = functools.partial(_normalise, config)

    def apply(weights: Any, tokens: jax.Array, positions: jax.Array, caches: Any, step: AttentionStep) -> Any:
        x = weights["embedding"][tokens]
        heads, kv_heads = config.num_heads, config.num_kv_heads
        new_caches = []
        for layer, cache in zip(weights["layers"], caches, strict=True):
            normalised = normalise(x, layer["attention_norm"])
            if latent is not None:
                new_cache, out = nnx.merge(latent, layer["attention"])(normalised, cache, step)
                x += out
            else:
                qkv = (normalised @ layer["qkv"]).reshape(len(tokens), -1, config.head_dim)
                q, k, v = jnp.split(qkv, (heads, heads + kv_heads), axis=1)
                frequencies = config.rotary_frequencies
                new_cache, out = step.attend(q, k, v, cache, rotary_frequencies=frequencies, **attention_options)
                x += out.reshape(len(tokens), -1) @ layer["out"]
            new_caches.append(new_cache)
            gate, up = jnp.split(normalise(x, layer["mlp_norm"]) @ layer["gate_up"], 2, axis=-1)
            x += (jax.nn.silu(gate) * up) @ layer["down"]
        return tuple(new_caches), x

    return apply


def packed_head(config: LlamaConfig) -> Any:
    """The `head` of an engine."""

    def head(weights: Any, hidden: jax.Array) -> jax.Array:
        x = _normalise(config, hidden, weights["norm"])
        return x @ weights["head"] if "head" in weights else jnp.einsum("sf,vf->sv", x, weights["embedding"])

    return head


def _normalise(config: LlamaConfig, x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + config.norm_epsilon)
    return (wide * scale).astype(x.dtype) * weight[None]
