"""A model of several layers, some with windows, that supports adapters, and its twin in float64."""

import functools

import jax.numpy as jnp
import numpy as np

from jaxpaged import layer_groups
from tests import toy_model
from tests.toy_model import FREQUENCIES, HEAD_DIM, VOCAB, create_cache

FEATURES, HEADS, KV_HEADS, SEATS, ADAPTERS = 24, 4, 2, 5, 2


def random_weights(num_layers, seed=0):
    shapes = {
        "embedding": (VOCAB, FEATURES),
        "adapters": (1 + ADAPTERS, FEATURES),  # the first row is for requests without an adapter
        "qkv": (num_layers, FEATURES, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
        "out": (num_layers, HEADS * HEAD_DIM, FEATURES),
        "head": (FEATURES, VOCAB),
    }
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape) * 0.5, jnp.float32) for name, shape in shapes.items()}


def apply(windows, weights, tokens, positions, caches, step):
    x, caches = weights["embedding"][tokens] + weights["adapters"][1 + step.adapters], list(caches)
    for i, (window, (index, group)) in enumerate(zip(windows, layer_groups(windows).layers, strict=True)):
        heads = (x @ weights["qkv"][i]).reshape(len(tokens), -1, HEAD_DIM)
        q, k, v = jnp.split(heads, (HEADS, HEADS + KV_HEADS), axis=1)
        options = dict(sliding_window=window, rotary_frequencies=FREQUENCIES)
        caches[index], out = step.group(group).attend(q, k, v, caches[index], **options)
        x += jnp.tanh(out.reshape(len(tokens), -1) @ weights["out"][i])
    return caches, x, {"where": jnp.stack([tokens, positions], axis=1), "is_even": tokens % 2 == 0}


def logits_of(windows, weights, tokens, adapter=None):
    """The logits after each token of a text, [tokens, vocab], by NumPy and without a cache."""
    positions = np.arange(len(tokens))
    distance = positions[:, None] - positions
    turn = np.exp(1j * np.outer(positions, np.asarray(FREQUENCIES)))[:, None]
    weights = {name: np.asarray(x, np.float64) for name, x in weights.items()}
    x = weights["embedding"][tokens] + weights["adapters"][0 if adapter is None else 1 + adapter]
    for qkv, out, window in zip(weights["qkv"], weights["out"], windows, strict=True):
        q, k, v = np.split((x @ qkv).reshape(len(tokens), -1, HEAD_DIM), (HEADS, HEADS + KV_HEADS), axis=1)
        turned = [(y[..., : HEAD_DIM // 2] + 1j * y[..., HEAD_DIM // 2 :]) * turn for y in (q, k)]
        q, k = (np.concatenate([y.real, y.imag], axis=-1) for y in turned)
        k, v = (np.repeat(y, HEADS // KV_HEADS, axis=1) for y in (k, v))
        scores = np.exp(np.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5)
        scores = np.where((distance >= 0) & (distance < (window or len(tokens))), scores, 0)
        attended = np.einsum("hqk,khd->qhd", scores / scores.sum(axis=-1, keepdims=True), v)
        x = x + np.tanh(attended.reshape(len(tokens), -1) @ out)
    return x @ weights["head"]


def create_engine(windows, *, num_blocks, **options):
    groups = layer_groups(windows)
    caches = [create_cache(num_blocks, num_kv_heads=KV_HEADS) for _ in range(groups.num_caches)]
    model = dict(model=functools.partial(apply, windows), weights=random_weights(len(windows)), cache=caches)
    return toy_model.create_engine(**model, windows=groups.windows, max_num_seqs=SEATS, **options)
