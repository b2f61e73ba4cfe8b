"""The model of examples/lib/llama.py with random bfloat16 weights, on one GPU or sharded over several."""

import math

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.engine.model import example_model, fill
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
    graph, shards = example_model(shard_config(config, mesh))

    def over_mesh(own: jax.ShapeDtypeStruct, whole: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        is_cut = [size != of_whole for size, of_whole in zip(own.shape, whole.shape, strict=True)]
        shape = tuple(size * mesh.size if cut else size for size, cut in zip(own.shape, is_cut, strict=True))
        sharding = NamedSharding(mesh, P(*(AXIS if cut else None for cut in is_cut)))
        return jax.ShapeDtypeStruct(shape, own.dtype, sharding=sharding)

    shapes = jax.tree.map(over_mesh, shards, example_model(config)[1])
    with jax.set_mesh(mesh):
        return nnx.merge(graph, jax.block_until_ready(fill(shapes)))
