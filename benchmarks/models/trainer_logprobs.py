"""How far an engine's logprobs are from those of a training program of the same model.

    python -m benchmarks.models.trainer_logprobs

SmolLM2-135M continues short prompts at temperature 1. The same tokens then go through the program that a trainer runs:
`jax.value_and_grad` of their mean logprob, all sequences packed into one row, attention through XLA. The numbers are
the mean and the largest difference of a token's logprob, in nats. Other ways to compute the same are compared with
that program too, to tell what makes them differ. One row is of a training program with the engine's attention.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.harness import add_output, open_store
from benchmarks.models.perplexity import short_prompts
from jaxpaged import BlockAllocator, EngineOptions, KVCache, SamplingParams
from jaxpaged._cache.rotate import cos_sin, rotate
from lib.checkpoint import default_path, load_model, read_checkpoint
from lib.engine_llama import create_engine
from lib.llama import Llama
from lib.llama_config import LlamaConfig

SEATS, BLOCK_SIZE, CHUNK_TOKENS = 8, 16, 56


@dataclasses.dataclass(frozen=True)
class Packed:
    """Sequences in one row."""

    tokens: np.ndarray  # int32 [tokens]
    positions: np.ndarray  # int32 [tokens], in its sequence
    sequences: np.ndarray  # int32 [tokens]
    is_new: np.ndarray  # bool [tokens], whether the token was sampled

    @classmethod
    def of(cls, prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> "Packed":
        texts = [prompt + more for prompt, more in zip(prompts, completions, strict=True)]
        positions = np.concatenate([np.arange(len(text)) for text in texts])
        sequences = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
        starts = np.array([len(prompt) for prompt in prompts])
        tokens = np.concatenate(texts)
        is_new = positions >= starts[sequences]
        return cls(tokens.astype(np.int32), positions.astype(np.int32), sequences.astype(np.int32), is_new)


def logprobs(graph: Any, weights: nnx.State, packed: Packed, *, is_paged: bool = False) -> jax.Array:
    """Of each token of a packed row but the first, float32 `[tokens - 1]`; what begins a sequence has any.

    `is_paged`: with the attention of an engine, over a cache.
    """
    model = nnx.merge(graph, weights)
    same = packed.sequences[:, None] == packed.sequences[None]
    mask = same & (packed.positions[:, None] >= packed.positions[None])

    def attend(attention: Any, x: jax.Array, cache: None) -> tuple[None, jax.Array]:
        s = attention.settings
        q, k, v = (part.reshape(len(x), -1, s.head_dim) for part in s.split(attention.qkv_proj(x)))
        cos, sin = cos_sin(jnp.asarray(packed.positions), jnp.asarray(s.rotary_frequencies, jnp.float32))
        q, k = (rotate(part, cos, sin, interleaved=False, start=0).astype(x.dtype) for part in (q, k))
        out = jax.nn.dot_product_attention(q[None], k[None], v[None], mask=jnp.asarray(mask)[None, None])[0]
        return cache, attention.o_proj(out.reshape(len(x), -1))

    caches: Sequence[Any] = [None] * len(model.layers)
    if is_paged:
        caches, attend = paged(model, packed)
    _, x = model.through_layers(jnp.asarray(packed.tokens), caches, attend)
    given = jnp.asarray(packed.tokens)[1:, None]
    return jnp.take_along_axis(jax.nn.log_softmax(model.logits(x)[:-1]), given, axis=1)[:, 0]


def paged(model: Llama, packed: Packed) -> tuple[list[KVCache], Any]:
    """Caches, and attention over them as in a step of an engine that computes all tokens."""
    lengths = np.bincount(packed.sequences)
    most = -(-int(lengths.max()) // BLOCK_SIZE)
    allocator = BlockAllocator.create(
        num_blocks=1 + len(lengths) * most, block_size=BLOCK_SIZE, num_seqs=len(lengths), max_blocks_per_seq=most
    )
    allocator, _, _ = allocator.append(jnp.asarray(lengths, jnp.int32), q_len=int(lengths.max()))
    slots = allocator.slots(jnp.asarray(packed.sequences), jnp.asarray(packed.positions))
    starts = jnp.asarray(np.append(0, np.cumsum(lengths)), jnp.int32)

    def attend(attention: Any, x: jax.Array, cache: KVCache) -> tuple[KVCache, jax.Array]:
        return attention(x, cache, allocator, slots, query_starts=starts)

    def create(attention: Any) -> KVCache:
        s = attention.settings
        sizes = dict(num_kv_heads=s.num_kv_heads, head_dim=s.head_dim, dtype=s.dtype)
        return KVCache.create(num_blocks=allocator.num_blocks, block_size=BLOCK_SIZE, **sizes)

    return [create(layer.self_attn) for layer in model.layers], attend


def trained(model: Llama, packed: Packed, *, is_paged: bool = False) -> np.ndarray:
    """The logprobs that the training program computes on the way to its gradient."""
    graph, weights = nnx.split(model)

    @jax.jit
    def step(weights: nnx.State) -> tuple[jax.Array, nnx.State]:
        def loss(weights: nnx.State) -> tuple[jax.Array, jax.Array]:
            found = logprobs(graph, weights, packed, is_paged=is_paged)
            return -jnp.where(packed.is_new[1:], found, 0).sum() / packed.is_new.sum(dtype=np.float32), found

        (_, found), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
        return found, jax.tree.map(lambda w, g: w - jnp.asarray(1e-3, w.dtype) * g, weights, gradient)

    return np.asarray(step(weights)[0])[packed.is_new[1:]]


def scored(model: Llama, packed: Packed, **options: Any) -> np.ndarray:
    """Of the same packed row, without a gradient."""
    graph, weights = nnx.split(model)
    run = jax.jit(functools.partial(logprobs, graph, packed=packed, **options))
    return np.asarray(run(weights))[packed.is_new[1:]]


def measure(
    load: Callable[[str], tuple[Llama, LlamaConfig]], dtype: str, prompts: list[list[int]], num_new: int
) -> dict[str, dict[str, float]]:
    """Differences from the training program's logprobs, by what is compared."""
    model, config = load(dtype)
    params = [SamplingParams(max_tokens=num_new, temperature=1.0, seed=i, logprobs=True) for i in range(len(prompts))]
    found, differences = {}, {}
    for name, exact in (("engine", False), ("exact engine", True)):
        for layer in model.layers:
            partitions = 1 if exact else None
            layer.self_attn.settings = dataclasses.replace(layer.self_attn.settings, num_partitions=partitions)
        engine = create_engine(
            model,
            config,
            EngineOptions(
                max_num_seqs=SEATS,
                max_model_len=max(map(len, prompts)) + num_new,
                chunk_tokens=CHUNK_TOKENS,
                widths=(),
                batch_invariant=exact,
            ),
            block_size=BLOCK_SIZE,
            dtype=dtype,
        )
        sampled = [output.outputs[0] for output in engine.generate(prompts, params)]
        texts = [completion.token_ids for completion in sampled]
        found[name] = texts, np.concatenate([completion.logprobs for completion in sampled])
    for name, (texts, of_engine) in found.items():
        packed = Packed.of(prompts, texts)
        expected = trained(model, packed)
        differences[name] = summary(of_engine, expected)
    differences["the engine's attention"] = summary(scored(model, packed, is_paged=True), expected)
    # The same attention on both sides: what is left comes from the widths of products.
    differences["exact engine, both with its attention"] = summary(of_engine, trained(model, packed, is_paged=True))
    differences["without the gradient"] = summary(scored(model, packed), expected)
    alone = [scored(model, Packed.of([prompt], [text])) for prompt, text in zip(prompts, texts, strict=True)]
    differences["one sequence at a time"] = summary(np.concatenate(alone), expected)
    if dtype != "float32":
        differences["in float32"] = summary(trained(load("float32")[0], packed), expected)
    return differences


def summary(logprobs: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    difference = np.abs(np.asarray(logprobs, np.float64) - expected)
    if not (np.isfinite(difference).all() and difference.mean() < 1):
        raise AssertionError(f"these are no logprobs of the same tokens: they differ by {difference.mean()} on average")
    return {"tokens": len(difference), "mean_nats": float(difference.mean()), "most_nats": float(difference.max())}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=32)
    add_output(parser)
    args = parser.parse_args(arguments)
    checkpoint = read_checkpoint(default_path())
    prompts = sorted(short_prompts()[0], key=len)[: args.prompts]

    def load(dtype: str) -> tuple[Llama, LlamaConfig]:
        return load_model(checkpoint, dtype), checkpoint.config

    store = open_store(
        "trainer_logprobs", args, model="SmolLM2-135M-Instruct", prompts=len(prompts), new_tokens=args.new_tokens
    )
    for dtype in args.dtypes:
        for name, result in measure(load, dtype, prompts, args.new_tokens).items():
            store.add(f"{name} {dtype}", {"dtype": dtype, "what": name} | result)
            print(f"{dtype:>9} {name:24} mean {result['mean_nats']:.1e}, at most {result['most_nats']:.1e}", flush=True)


if __name__ == "__main__":
    main()
