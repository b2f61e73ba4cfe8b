"""What each 8-bit form of a latent cache does to attention, and to the outputs of a small model.

    python -m benchmarks.models.latent_forms

Latents are drawn as DeepSeek V3 would make them, 512 numbers and 64 rotary ones: of an RMS norm with uneven weights,
and rotary keys of which two pairs of numbers are larger than the others ("outliers") and keep their direction, as they
do in trained models. Attention over 2048 tokens is computed in float64, of 16 heads whose logits of either part spread
by 2. The error of an output is that of its vector, over the vector's norm; the mean of all heads and 64 queries counts.

The model is SmolLM2-135M, in float32. It has no latents: its values and its rotated keys, 192 numbers each, are stored
as one latent of all heads. The log probabilities of the first tokens of Alice's Adventures in Wonderland
(`benchmarks/data/alice.txt`) are compared with those of a float32 cache.
"""

import argparse
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.harness import add_output, open_store
from benchmarks.models import perplexity
from jaxpaged import KVCache, rotary_frequencies, rotate_and_write_kv, split_rotary, widen_kv, write_kv
from lib.checkpoint import default_path, load_model, read_checkpoint
from lib.llama import Llama
from lib.llama_config import LlamaConfig

LATENT, ROTARY, HEADS, QUERIES, TOKENS = 512, 64, 16, 64, 2048
OUTLIERS = 1, 10, 30, 100, 1000
SPREAD = 0.5  # of the logarithms of the norm's weights
CHUNK = 512

Form = Callable[[jax.Array, int], jax.Array]  # f32 [tokens, latent + rotary], latent -> what is stored of them


def stored(x: jax.Array, dtype: str, *, groups: int = 1) -> jax.Array:
    """x [tokens, width], with a scale for each token and each of `groups` equal parts of the width."""
    kind: Any = dict(num_kv_heads=groups, head_dim=x.shape[1] // groups, is_latent=True, dtype=dtype)
    cache = KVCache.create(num_blocks=x.shape[0], block_size=1, **kind)
    cache = write_kv(cache, x.reshape(x.shape[0], groups, -1), None, jnp.arange(x.shape[0]))
    return widen_kv(cache).k.reshape(x.shape)


def one_scale(dtype: str, x: jax.Array, latent: int) -> jax.Array:
    return stored(x, dtype)


def rotary_scale(dtype: str, x: jax.Array, latent: int) -> jax.Array:
    return jnp.concatenate([stored(x[:, :latent], dtype), stored(x[:, latent:], dtype)], axis=-1)


def rotary_in_two(dtype: str, x: jax.Array, latent: int) -> jax.Array:
    tokens, width = x.shape
    kind: Any = dict(num_kv_heads=1, head_dim=2 * width - latent, value_dim=latent, is_latent=True, dtype=dtype)
    cache = KVCache.create(num_blocks=tokens, block_size=1, **kind)
    q, k = split_rotary(cache, jnp.eye(width)[None], x[:, None])  # the products with units are the numbers
    cache = write_kv(cache, k, None, jnp.arange(tokens))
    return jnp.einsum("hd,td->th", q[0], widen_kv(cache).k[:, 0, 0], precision=jax.lax.Precision.HIGHEST)


def rotary_bfloat16(dtype: str, x: jax.Array, latent: int) -> jax.Array:
    return jnp.concatenate([stored(x[:, :latent], dtype, groups=4), stored(x[:, latent:], "bfloat16")], axis=-1)


FORMS: dict[str, tuple[int, Callable[..., jax.Array]]] = {  # and the bytes of 512 + 64 numbers
    "one scale": (576 + 4, one_scale),
    "a scale of the rotary part": (576 + 8, rotary_scale),
    "rotary numbers in two": (640 + 4, rotary_in_two),
    "4 scales, rotary part in bfloat16": (512 + 16 + 128, rotary_bfloat16),
}


def draw(outlier: float) -> tuple[np.ndarray, np.ndarray]:
    """Queries [queries, heads, width] and latents [tokens, width], float64."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(TOKENS, LATENT // 2)) @ rng.normal(size=(LATENT // 2, LATENT))
    weights = np.exp(SPREAD * rng.normal(size=LATENT))
    latent = hidden / np.sqrt((hidden**2).mean(axis=-1, keepdims=True)) * weights / np.sqrt((weights**2).mean())

    pairs = rng.normal(size=(TOKENS, ROTARY // 2, 2))
    for at in (ROTARY // 2 - 1, ROTARY // 2 - 4):  # which turn slowly
        angle = rng.uniform(0, 2 * np.pi)
        direction = math.sqrt(2) * np.asarray([np.cos(angle), np.sin(angle)])  # as long as two numbers are
        pairs[:, at] = outlier * (0.9 * direction + math.sqrt(1 - 0.9**2) * pairs[:, at])
    turns = np.exp(1j * np.arange(TOKENS)[:, None] * np.asarray(rotary_frequencies(ROTARY))[None])
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turns
    rotary = np.stack([turned.real, turned.imag], axis=-1).reshape(TOKENS, ROTARY)

    def queries(keys: np.ndarray) -> np.ndarray:
        q = rng.normal(size=(QUERIES, HEADS, keys.shape[1]))
        return q * (2 / np.einsum("qhd,td->qht", q, keys, optimize=True).std(axis=-1, keepdims=True))

    return np.concatenate([queries(latent), queries(rotary)], axis=-1), np.concatenate([latent, rotary], axis=-1)


def attention(q: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits and outputs, float64."""
    logits = np.einsum("qhd,td->qht", q, x, optimize=True)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    out = np.einsum("qht,td->qhd", weights, x[:, :LATENT], optimize=True)
    return logits, out / weights.sum(axis=-1, keepdims=True)


def errors_of_attention(form: Form, q: np.ndarray, x: np.ndarray) -> dict[str, float]:
    logits, out = attention(q, x)
    other_logits, other = attention(q, np.asarray(jax.jit(form, static_argnums=1)(jnp.asarray(x, jnp.float32), LATENT)))
    shift = other_logits - logits
    shift -= shift.mean(axis=-1, keepdims=True)  # which changes nothing
    norm = np.linalg.norm
    relative = norm(other - out, axis=-1) / norm(out, axis=-1)
    return {"logits": float(shift.std()), "output": float(relative.mean()), "worst_output": float(relative.max())}


def log_probabilities(model: Llama, config: LlamaConfig, tokens: np.ndarray, form: Form | None) -> np.ndarray:
    """Of each token but the first, given those before it."""
    graph, weights = nnx.split(model)
    length, heads, kv_heads, head_dim = len(tokens), config.num_heads, config.num_kv_heads, config.head_dim
    if length % CHUNK:
        raise ValueError(f"the tokens must be a multiple of {CHUNK}; got {length}.")
    positions = jnp.arange(length, dtype=jnp.int32)

    def rotated(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        kind: Any = dict(num_kv_heads=kv_heads, head_dim=head_dim, dtype="float32")
        cache = KVCache.create(num_blocks=length, block_size=1, **kind)
        cache, q = rotate_and_write_kv(cache, q, k, k, positions, positions, config.rotary_frequencies)
        return q, cache.k[:, 0]

    def attend(attention: Any, x: jax.Array, cache: Any) -> tuple[Any, jax.Array]:
        q, k, v = attention.settings.split(attention.qkv_proj(x))
        q, k = rotated(q.reshape(length, heads, head_dim), k.reshape(length, kv_heads, head_dim))
        if form is not None:
            whole = form(jnp.concatenate([v, k.reshape(v.shape)], axis=-1), v.shape[1])
            v, k = jnp.split(whole, 2, axis=-1)
        q = q.reshape(-1, CHUNK, kv_heads, heads // kv_heads, head_dim)
        k, v = (y.reshape(length, kv_heads, head_dim) for y in (k, v))

        def chunk(args: tuple[jax.Array, jax.Array]) -> jax.Array:
            q, at = args
            logits = jnp.einsum("qkgd,tkd->kgqt", q, k) * head_dim**-0.5
            logits = jnp.where((positions[None] <= at[:, None])[None, None], logits, -jnp.inf)
            return jnp.einsum("kgqt,tkd->qkgd", jax.nn.softmax(logits), v)

        out = jax.lax.map(chunk, (q, positions.reshape(-1, CHUNK)))
        return cache, attention.o_proj(out.reshape(length, -1))

    no_caches: Any = (None,) * config.num_layers

    @jax.jit
    def run(weights: nnx.State, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, weights)
        _, x = model.through_layers(tokens, no_caches, attend)

        def chunk(args: tuple[jax.Array, jax.Array]) -> jax.Array:
            x, targets = args
            return jnp.take_along_axis(jax.nn.log_softmax(model.logits(x)), targets[:, None], axis=1)[:, 0]

        chunks = x.reshape(-1, CHUNK, x.shape[-1]), jnp.roll(tokens, -1).reshape(-1, CHUNK)
        return jax.lax.map(chunk, chunks).ravel()[:-1]

    return np.asarray(run(weights, jnp.asarray(tokens)), np.float64)


def check_exact(model: Llama, config: LlamaConfig, tokens: np.ndarray) -> np.ndarray:
    """The log probabilities of float32, after a comparison of the first with those of a paged cache."""
    exact, first = log_probabilities(model, config, tokens, None), tokens[:CHUNK]
    caches = perplexity.create(config, 1 + CHUNK // perplexity.BLOCK_SIZE, "float32", None, None)
    np.testing.assert_allclose(perplexity.run(model, caches, first.tolist())[2], exact[: CHUNK - 1], atol=2e-3)
    return exact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float8_e4m3fn", "int8"])
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of the text, a multiple of {CHUNK}")
    add_output(parser)
    args = parser.parse_args()
    checkpoint = read_checkpoint(default_path())
    config, model = checkpoint.config, load_model(checkpoint, "float32")
    tokens = np.asarray(perplexity.read_text(checkpoint.tokenizer).measured[: args.tokens], np.int32)
    exact = check_exact(model, config, tokens)
    sizes: Any = dict(heads=HEADS, queries=QUERIES, attended=TOKENS, latent=LATENT, rotary=ROTARY, spread=SPREAD)
    store = open_store("latent_forms", args, model="SmolLM2-135M-Instruct", tokens=args.tokens, **sizes)

    def measure(name: str, bytes_per_token: int, form: Form) -> None:
        attended = {outlier: errors_of_attention(form, *draw(outlier)) for outlier in OUTLIERS}
        change = log_probabilities(model, config, tokens, form) - exact
        point: dict[str, Any] = {"bytes_per_token": bytes_per_token}
        point |= {f"outliers {outlier}": errors for outlier, errors in attended.items()}
        point |= {"mean_nats": float(np.abs(change).mean()), "perplexity": math.exp(-(exact + change).mean())}
        store.add(name, point)
        outputs = " ".join(f"{errors['output']:.4f}" for errors in attended.values())
        print(f"{name:>50} {bytes_per_token:5} B  {outputs}  {point['mean_nats']:.4f} nats", flush=True)

    measure("bfloat16", 2 * (LATENT + ROTARY), functools.partial(one_scale, "bfloat16"))
    for name, (bytes_per_token, form) in FORMS.items():
        for dtype in args.dtypes:
            measure(f"{dtype}, {name}", bytes_per_token, functools.partial(form, dtype))


if __name__ == "__main__":
    main()
