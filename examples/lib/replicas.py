"""Data parallel: equal models on different devices, and an engine for each."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
from flax import nnx
from jax.sharding import Mesh

import jaxpaged
from jaxpaged.grammar import Vocabulary
from lib.adapters import Factors, replace_adapter
from lib.engine_llama import create_engine
from lib.llama import Llama
from lib.llama_config import LlamaConfig
from lib.tensor_parallel import AXIS, make_mesh, repeated_kv_heads, shard_model, spread


@dataclasses.dataclass(frozen=True)
class Replica:
    """A model on its own devices.

    Attributes:
        config: the config of its caches.
        device: the first of its devices; None: JAX's default device.
        mesh: its mesh, if it is sharded over several devices.
    """

    model: Llama
    config: LlamaConfig
    device: jax.Device | None = None
    mesh: Mesh | None = None


def load_replicas(
    load: Callable[[], Llama], config: LlamaConfig, *, data_parallel: int, tensor_parallel: int = 1
) -> list[Replica]:
    """Loads a model once, and puts it on `data_parallel` times `tensor_parallel` devices. Raises `DevicesError`."""
    if data_parallel == 1:
        model, config, mesh = spread(load, config, tensor_parallel)
        return [Replica(model, config, mesh=mesh)]
    groups = make_mesh(data_parallel * tensor_parallel).devices.reshape(data_parallel, tensor_parallel)
    repeated_kv_heads(config, tensor_parallel)  # raises before the model is loaded
    with jax.default_device(jax.local_devices(backend="cpu")[0]):  # so that no GPU holds two models
        model = load()
        return [_put(model, config, list(devices)) for devices in groups]


def _put(model: Llama, config: LlamaConfig, devices: list[jax.Device]) -> Replica:
    first = devices[0]
    if len(devices) > 1:
        mesh = jax.make_mesh((len(devices),), (AXIS,), devices=devices)
        return Replica(shard_model(model, config, mesh), repeated_kv_heads(config, mesh.size), first, mesh)
    graph, weights = nnx.split(model)
    return Replica(nnx.merge(graph, jax.device_put(weights, first)), config, first)


def create_engines(
    replicas: Sequence[Replica],
    options: jaxpaged.EngineOptions,
    *,
    block_size: int,
    dtype: str,
    num_blocks: int | None = None,
    vocabulary: Vocabulary | None = None,
) -> list[jaxpaged.Engine]:
    """Creates an engine for each replica, with the arguments of `create_engine`. Each has its own seed.

    The first engine is compiled alone: on GPUs, JAX's persistent cache then has the program for the others.
    """
    precision = jax.config.jax_default_matmul_precision  # each thread has its own

    def create(index: int) -> jaxpaged.Engine:
        of_one, seed = replicas[index], (options.seed + index) % 2**32
        with jax.default_matmul_precision(precision) if precision else contextlib.nullcontext():
            return create_engine(
                of_one.model,
                of_one.config,
                dataclasses.replace(options, seed=seed),
                block_size=block_size,
                dtype=dtype,
                num_blocks=num_blocks,
                mesh=of_one.mesh,
                device=of_one.device,
                vocabulary=vocabulary,
            )

    first = create(0)
    with ThreadPoolExecutor() as threads:
        return [first, *threads.map(create, range(1, len(replicas)))]


def replace_adapters(replicas: Sequence[Replica], slot: int, factors: Factors) -> list[nnx.State]:
    """Writes another adapter to a slot of each model. Returns the models' weights. Raises `CheckpointError`."""
    return [replace_adapter(replica.model, slot, factors) for replica in replicas]
