"""Tensor parallelism: shards a model's heads and hidden features over one mesh axis.

A layer has two pairs of matrix products, in attention and in the MLP. The first product of a pair is sharded along its
outputs, the second along its inputs, and llama.py sums over the devices after each pair. Everything else, including the
allocator, is replicated. If there are more devices than KV heads, several devices hold the same KV head, next to each
other, and each has some of its query heads.

Each device has the whole vocabulary. With a part of it, devices would gather their logits, which XLA cannot do inside a
CUDA graph, while it can sum there: the host would run each step.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpaged
from lib.llama import Llama
from lib.llama_config import LlamaConfig, parts_of

AXIS = "devices"
CACHE = P(None, None, AXIS)  # [blocks, block_size, kv_heads, ...]; a latent cache is on every device
# Arguments of `prefill` and `decode` in generation.py that are not arrays.
STATIC = ("graph", "eos_ids", "sampling", "share_reads")
# Sizes of the model and of its experts that are divided by the number of devices.
SHARDED = ("num_heads", "num_kv_heads", "hidden_features")
SHARDED_OF_EXPERTS = ("hidden_features", "shared_features")


class DevicesError(ValueError):
    """The model cannot be sharded over the devices; the message is one sentence for the user."""


def make_mesh(num_devices: int) -> Mesh:
    """Raises `DevicesError`."""
    devices = jax.devices()
    if num_devices > len(devices):
        raise DevicesError(f"JAX sees {len(devices)} devices; {num_devices} were asked for.")
    return jax.make_mesh((num_devices,), (AXIS,), devices=devices[:num_devices])


def repeated_kv_heads(config: LlamaConfig, num_devices: int) -> LlamaConfig:
    """The config of the same model with at least one KV head for each device. Raises `DevicesError`."""
    if num_devices == 1:
        return config
    if config.num_experts:
        raise DevicesError("The model is a gpt-oss, whose experts do not go over several devices here.")
    if misfit := _find_misfit(config, num_devices):
        fitting = " or ".join(str(n) for n in range(1, num_devices) if _find_misfit(config, n) is None)
        raise DevicesError(f"The model's {misfit} do not go evenly over {num_devices} devices; use {fitting}.")
    return dataclasses.replace(config, num_kv_heads=max(config.num_kv_heads, num_devices))  # latent: never read


def _find_misfit(config: LlamaConfig, num_devices: int) -> str | None:
    """The name and value of a size that cannot be divided by the number of devices."""
    sizes = {name: getattr(config, name) for name in SHARDED}
    if config.routing is not None:
        sizes |= {f"{name} of experts": getattr(config.routing, name) for name in SHARDED_OF_EXPERTS}
    if num_devices % config.num_kv_heads == 0:
        del sizes["num_kv_heads"]  # each is repeated
    return next((f"{name}={size}" for name, size in sizes.items() if size % num_devices), None)


def _sharded(config: Any, names: tuple[str, ...], num_devices: int) -> Any:
    return dataclasses.replace(config, **{name: getattr(config, name) // num_devices for name in names})


def shard_config(config: LlamaConfig, mesh: Mesh) -> LlamaConfig:
    """The config with one device's sizes. Raises `DevicesError`."""
    own = _sharded(repeated_kv_heads(config, mesh.size), SHARDED, mesh.size)
    if own.routing is not None:
        own = dataclasses.replace(own, routing=_sharded(own.routing, SHARDED_OF_EXPERTS, mesh.size))
    return dataclasses.replace(own, axis=AXIS)


def shard_model(model: Llama, config: LlamaConfig, mesh: Mesh) -> Llama:
    """The model with one device's sizes, and with weights sharded over all devices. `model` may be on a CPU."""
    own, dtype = shard_config(config, mesh), model.embed_tokens.embedding.dtype
    graph, shard = nnx.split(nnx.eval_shape(lambda: Llama(own, dtype=dtype, rngs=nnx.Rngs(0))))
    repeats = own.num_kv_heads * mesh.size // config.num_kv_heads
    cut = functools.partial(_cut, config=config, repeats=repeats, mesh=mesh)
    pairs = zip(nnx.to_flat_state(nnx.state(model)), nnx.to_flat_state(shard), strict=True)
    leaves = [(path, leaf.replace(cut(path, leaf[...], part.shape))) for (path, leaf), (_, part) in pairs]
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def spread(load: Callable[[], Llama], config: LlamaConfig, num_devices: int) -> tuple[Llama, LlamaConfig, Mesh | None]:
    """Loads and shards the model. Returns it, the config of its caches, and the mesh, None for one device.

    Raises `DevicesError`.
    """
    if num_devices == 1:
        return load(), config, None
    mesh = make_mesh(num_devices)
    of_caches = repeated_kv_heads(config, num_devices)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):  # so that no GPU holds the whole model
        model = shard_model(load(), config, mesh)
    return model, of_caches, mesh


def _cut(
    path: tuple, weight: jax.Array, shape: tuple[int, ...], *, config: LlamaConfig, repeats: int, mesh: Mesh
) -> jax.Array:
    """Shards a weight over the mesh, along the axis in which one device's `shape` differs from the weight's."""
    *_, module, kind = map(str, path)
    axis = next((i for i, (size, own) in enumerate(zip(weight.shape, shape, strict=True)) if size != own), None)
    if axis is None:
        if module in ("o_proj", "down_proj"):  # a bias, which each device adds
            weight = (weight / mesh.size).astype(weight.dtype)
        return jax.device_put(weight, NamedSharding(mesh, P()))
    parts = parts_of(kind if module == "experts" else module, weight.shape[axis], config)
    copies = [repeats if name in ("k_proj", "v_proj") else 1 for name in parts]
    shards = _split(weight, axis=axis, parts=tuple(zip(parts.values(), copies, strict=True)), num_devices=mesh.size)
    where, devices = NamedSharding(mesh, P(*[None] * axis, AXIS)), mesh.devices.flat
    whole = (*weight.shape[:axis], shape[axis] * mesh.size, *weight.shape[axis + 1 :])
    sharded = jax.make_array_from_single_device_arrays(
        whole, where, [jax.device_put(shard, device) for shard, device in zip(shards, devices, strict=True)]
    )
    return sharded.block_until_ready()  # so that shards of only one weight wait on the model's device


@functools.partial(jax.jit, static_argnames=("axis", "parts", "num_devices"))
def _split(
    weight: jax.Array, *, axis: int, parts: tuple[tuple[int, int], ...], num_devices: int
) -> tuple[jax.Array, ...]:
    """One shard per device, with the device's features of each part next to each other.

    `parts` are sizes along the axis, each with the number of adjacent devices that hold the same features.
    """

    def shard(device: int) -> jax.Array:
        own, begin = [], 0
        for size, copies in parts:
            size_of_device = size * copies // num_devices
            first = begin + device // copies * size_of_device
            own.append(jax.lax.slice_in_dim(weight, first, first + size_of_device, axis=axis))
            begin += size
        return jnp.concatenate(own, axis)

    return tuple(map(shard, range(num_devices)))


def create_on(mesh: Mesh, create: Callable[[], jaxpaged.KVCache]) -> jaxpaged.KVCache:
    """Creates a cache directly in shards, so that no device ever holds the whole cache."""
    is_latent = jax.eval_shape(create).value_dim is not None
    return jax.jit(create, out_shardings=NamedSharding(mesh, P() if is_latent else CACHE))()


def replicate(mesh: Mesh, tree: Any) -> Any:
    """Copies arrays to every device, except arrays that are already on the mesh."""

    def put(x: jax.Array) -> jax.Array:
        is_there = isinstance(x.sharding, NamedSharding) and x.sharding.mesh == mesh
        return x if is_there else jax.device_put(x, NamedSharding(mesh, P()))

    return jax.tree.map(put, tree)


def on_mesh(mesh: Mesh, program: Any) -> Any:
    """Runs `prefill` or `decode` of generation.py on all devices. The types of the arrays say how each is sharded."""
    names = tuple(inspect.signature(program).parameters)

    @functools.wraps(program.__wrapped__)
    def run(*arguments: Any) -> Any:
        arrays = dict(zip(names, arguments, strict=True))
        settings = {name: arrays.pop(name) for name in STATIC if name in names}
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, arrays["state"])
        of_one_device = lambda arrays: program.__wrapped__(**arrays, **settings)  # noqa: E731
        return jax.shard_map(of_one_device, mesh=mesh, out_specs=specs, check_vma=False)(arrays)

    return jax.jit(run, static_argnames=[name for name in STATIC if name in names], donate_argnames="state")
