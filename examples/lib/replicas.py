"""Data parallel: equal models on different devices, and an engine for each."""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh

import jaxpaged
from jaxpaged.grammar import Vocabulary
from lib.adapters import read_adapter, replace_adapter
from lib.engine_llama import create_engine
from lib.llama import Llama
from lib.llama_config import LlamaConfig
from lib.tensor_parallel import make_mesh, spread


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


def load_replica(load: Callable[[], Llama], config: LlamaConfig, *, tensor_parallel: int = 1) -> Replica:
    """Loads a model and puts it on the first `tensor_parallel` devices. Raises `DevicesError`."""
    model, config, mesh = spread(load, config, tensor_parallel)
    return Replica(model, config, mesh=mesh)


def load_replicas(load: Callable[[], Llama], config: LlamaConfig, *, data_parallel: int) -> list[Replica]:
    """Loads a model once, and puts it on each of `data_parallel` devices. Raises `DevicesError`."""
    if data_parallel == 1:
        return [load_replica(load, config)]
    devices = make_mesh(data_parallel).devices
    with jax.default_device(jax.local_devices(backend="cpu")[0]):  # so that no GPU holds two models
        graph, weights = nnx.split(load())
        return [Replica(nnx.merge(graph, jax.device_put(weights, device)), config, device) for device in devices]


def create_replica_engine(
    replica: Replica,
    options: jaxpaged.EngineOptions,
    *,
    block_size: int,
    dtype: str,
    num_blocks: int | None = None,
    vocabulary: Vocabulary | None = None,
) -> jaxpaged.Engine:
    """Creates a replica's engine, with the arguments of `create_engine`."""
    return create_engine(
        replica.model,
        replica.config,
        options,
        block_size=block_size,
        dtype=dtype,
        num_blocks=num_blocks,
        mesh=replica.mesh,
        device=replica.device,
        vocabulary=vocabulary,
    )


def create_engines(
    replicas: Sequence[Replica], options: jaxpaged.EngineOptions, *, block_size: int, dtype: str
) -> list[jaxpaged.Engine]:
    """Creates an engine for each replica. Each has its own seed.

    The first engine is compiled alone: on GPUs, JAX's persistent cache then has the program for the others.
    """
    precision = jax.config.jax_default_matmul_precision  # each thread has its own

    def create(index: int) -> jaxpaged.Engine:
        with jax.default_matmul_precision(precision) if precision else contextlib.nullcontext():
            own = with_own_seed(options, index)
            return create_replica_engine(replicas[index], own, block_size=block_size, dtype=dtype)

    first = create(0)
    with ThreadPoolExecutor() as threads:
        return [first, *threads.map(create, range(1, len(replicas)))]


def with_own_seed(options: jaxpaged.EngineOptions, index: int) -> jaxpaged.EngineOptions:
    """The options of one of several engines: each chooses other seeds for requests without one."""
    return dataclasses.replace(options, seed=(options.seed + index) % 2**32)


def load_adapter_into(slot: int, folder: Path, replica: Replica) -> Callable[[jaxpaged.Engine], None]:
    """Writes an adapter to a slot of the replica's model. Returns the change of its engine. Raises `CheckpointError`.

    For `EngineRunner.call`: only the path of the adapter goes to another process.
    """
    weights = replace_adapter(replica.model, slot, read_adapter(folder))
    return operator.methodcaller("update_weights", weights, adapters=[slot])
