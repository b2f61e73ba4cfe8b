"""The model of examples/lib/llama.py with random bfloat16 weights, on one GPU or sharded over several."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.engine.model import example_model, fill
from benchmarks.harness import random
from lib.llama import Llama
from lib.llama_config import LlamaConfig
from lib.tensor_parallel import AXIS, shard_config

MOST_WEIGHTS = 30e9  # numbers; a larger model is never on one GPU as a whole


def is_large(config: LlamaConfig) -> bool:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(example_model(config)[1])) > MOST_WEIGHTS


def random_model(config: LlamaConfig) -> Llama:
    graph, shapes = example_model(config)
    return nnx.merge(graph, jax.block_until_ready(fill(shapes)))


def random_shards(config: LlamaConfig, mesh: Mesh) -> Llama:
    """As `shard_model` returns it; no device ever has the whole model."""
    graph, shapes = example_model(shard_config(config, mesh))
    leaves, tree = jax.tree.flatten(shapes)
    wholes = jax.tree.leaves(example_model(config)[1])
    pairs = enumerate(zip(leaves, wholes, strict=True))
    filled = [_fill_shards(seed, own.shape, whole.shape, mesh) for seed, (own, whole) in pairs]
    return nnx.merge(graph, jax.tree.unflatten(tree, filled))


def _fill_shards(seed: int, own: tuple[int, ...], whole: tuple[int, ...], mesh: Mesh) -> jax.Array:
    """A random array with the shape `own` on each device, where it differs from `whole`; ones for vectors."""
    pairs = list(zip(own, whole, strict=True))
    shape = tuple(size if size == of_whole else size * mesh.size for size, of_whole in pairs)
    spec = P(*(None if size == of_whole else AXIS for size, of_whole in pairs))
    return jax.block_until_ready(_filler(shape, NamedSharding(mesh, spec))(seed))


@functools.cache
def _filler(shape: tuple[int, ...], sharding: NamedSharding) -> Any:
    def create(seed: jax.Array) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape, jnp.bfloat16)
        return random(seed, shape=shape, dtype="bfloat16") * jnp.bfloat16(0.02)

    return jax.jit(create, out_shardings=sharding)
