"""Two models of Llama's shape for decode_step.py: examples/lib/llama.py, and a plain one with options.

A model is a pytree of weights and a function

    caches, logits = apply(weights, tokens, caches, allocator, slots)

of int32 tokens [seqs], one cache a layer, the allocator after the append and the slots [seqs] that it gave; logits are
[seqs, vocab_size].
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.harness import random
from jaxpaged import BlockAllocator, KVCache, paged_attention, rotary_frequencies, rotate_and_write_kv
from lib.llama import Llama
from lib.llama_config import LlamaConfig

Apply = Callable[
    [Any, jax.Array, tuple[KVCache, ...], BlockAllocator, jax.Array], tuple[tuple[KVCache, ...], jax.Array]
]


def llama_3_8b(num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128_256,
        context=8192,
        features=4096,
        hidden_features=14_336,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        norm_epsilon=1e-5,
        rotary_frequencies=rotary_frequencies(128, 500_000.0),
        tie_embeddings=False,
    )


def toy(num_layers: int) -> LlamaConfig:
    """The same in small, for a CPU."""
    return dataclasses.replace(
        llama_3_8b(num_layers),
        vocab_size=1000,
        features=128,
        hidden_features=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rotary_frequencies=rotary_frequencies(32),
    )


def fill(shapes: Any) -> Any:
    """Random bfloat16 weights for a tree of shapes; ones for vectors, which belong to the norms."""
    leaves, tree = jax.tree.flatten(shapes)
    filled = [
        jnp.ones(leaf.shape, jnp.bfloat16)
        if len(leaf.shape) == 1
        else random(seed, shape=tuple(leaf.shape), dtype="bfloat16") * jnp.bfloat16(0.02)
        for seed, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, filled)


def example_model(config: LlamaConfig) -> tuple[Any, Apply]:
    """examples/lib/llama.py as it stands."""
    abstract = nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    definition, shapes = nnx.split(abstract)

    def apply(weights: Any, tokens: jax.Array, caches: Any, allocator: BlockAllocator, slots: jax.Array) -> Any:
        return nnx.merge(definition, weights)(tokens[:, None], caches, allocator, slots[:, None])

    return fill(shapes), apply


@dataclasses.dataclass(frozen=True)
class Form:
    """How the plain model holds its weights."""

    fused: bool = True  # q, k and v in one matrix, gate and up in one
    out_first: bool = False  # [out, in], as checkpoints hold them, instead of [in, out]
    sums: bool = False  # with one sequence, products as sums over [out, in], which XLA fuses with what follows


def plain_model(config: LlamaConfig, form: Form) -> tuple[Any, Apply]:
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    q_out, kv_out, hidden = heads * head_dim, kv_heads * head_dim, config.hidden_features

    def matrix(features_in: int, features_out: int) -> jax.ShapeDtypeStruct:
        shape = (features_out, features_in) if form.out_first else (features_in, features_out)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def matrices(features_in: int, *features_out: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(matrix(features_in, n) for n in ((sum(features_out),) if form.fused else features_out))

    norm = jax.ShapeDtypeStruct((config.features,), jnp.bfloat16)
    layer_shapes = {
        "attention_norm": norm,
        "qkv": matrices(config.features, q_out, kv_out, kv_out),
        "out": matrix(q_out, config.features),
        "mlp_norm": norm,
        "gate_up": matrices(config.features, hidden, hidden),
        "down": matrix(hidden, config.features),
    }
    shapes = {
        "embedding": jax.ShapeDtypeStruct((config.vocab_size, config.features), jnp.bfloat16),
        "layers": [layer_shapes] * config.num_layers,
        "norm": norm,
        "head": matrix(config.features, config.vocab_size),
    }

    def project(x: jax.Array, weight: jax.Array) -> jax.Array:
        if form.sums and x.shape[0] == 1:
            return (weight.astype(jnp.float32) * x.astype(jnp.float32)).sum(axis=-1).astype(x.dtype)[None]
        return jnp.einsum("si,oi->so" if form.out_first else "si,io->so", x, weight)

    def project_all(x: jax.Array, weights: tuple[jax.Array, ...], *features_out: int) -> list[jax.Array]:
        if len(weights) > 1:
            return [project(x, weight) for weight in weights]
        ends = [sum(features_out[: i + 1]) for i in range(len(features_out) - 1)]
        return jnp.split(project(x, weights[0]), ends, axis=-1)

    def normalise(x: jax.Array, weight: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + config.norm_epsilon)
        return (wide * scale).astype(x.dtype) * weight

    def apply(weights: Any, tokens: jax.Array, caches: Any, allocator: BlockAllocator, slots: jax.Array) -> Any:
        x = weights["embedding"][tokens]
        positions = allocator.positions(1)[:, 0]
        new_caches = []
        for layer, cache in zip(weights["layers"], caches, strict=True):
            q, k, v = project_all(normalise(x, layer["attention_norm"]), layer["qkv"], q_out, kv_out, kv_out)
            q, k, v = (y.reshape(len(tokens), -1, head_dim) for y in (q, k, v))
            cache, q = rotate_and_write_kv(cache, q, k, v, slots, positions, config.rotary_frequencies)
            out = paged_attention(q, cache.k, cache.v, allocator.block_tables, allocator.lengths)
            x += project(out.reshape(len(tokens), q_out), layer["out"])
            gate, up = project_all(normalise(x, layer["mlp_norm"]), layer["gate_up"], hidden, hidden)
            x += project(jax.nn.silu(gate) * up, layer["down"])
            new_caches.append(cache)
        logits = project(normalise(x, weights["norm"]), weights["head"])
        return tuple(new_caches), logits.astype(jnp.float32)

    return fill(shapes), apply


MODELS: dict[str, Callable[[LlamaConfig], tuple[Any, Apply]]] = {
    "example": example_model,
    "fused": lambda config: plain_model(config, Form()),
    "separate": lambda config: plain_model(config, Form(fused=False)),
    "fused_sums": lambda config: plain_model(config, Form(out_first=True, sums=True)),
    "fused_out_first": lambda config: plain_model(config, Form(out_first=True)),
    "separate_out_first": lambda config: plain_model(config, Form(fused=False, out_first=True)),
}
