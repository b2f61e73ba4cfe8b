"""Arrays on an explicit mesh: their types tell the sharding, so that each device can work on its shards."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

# The axis of heads or KV heads in arrays of these names. Other arrays have no such axis.
HEADS_AXES = dict(q=-2, k=-2, v=-2, k_cache=-2, v_cache=-2, k_scale=-1, v_scale=-1, alibi_slopes=-1, sinks=-1)
# Arrays of attention whose first axis is sequences.
OF_SEQS = ("q", "block_tables", "lengths", "tree_mask")


def on_shards[F: Callable[..., Any]](function: F) -> F:
    """Wraps a function so that arrays on an explicit mesh are passed through `jax.shard_map`: XLA never partitions a
    kernel, nor anything as large as the cache.

    Arrays may be sharded over heads, like the KV heads of the cache; arrays of attention also over sequences.
    Replicated arrays are cut if the function needs a shard. Other shardings raise `ValueError`. The results are sharded
    like the first argument. Without arrays on an explicit mesh, this calls the function itself.
    """
    parameters = tuple(inspect.signature(function).parameters)

    # Outside of a trace, a bare shard_map would run operation by operation. The jit compiles it once.
    @functools.partial(jax.jit, static_argnums=(1, 2))
    def run(arrays: Any, settings: Any, tree: Any) -> Any:
        leaves = (array if setting is None else setting[1] for array, setting in zip(arrays, settings, strict=True))
        arguments = jax.tree.unflatten(tree, leaves)
        mesh: Any = _explicit_mesh(arguments)
        specs = _find_specs(arguments)
        out_specs = specs[parameters[0]]
        if arguments.get("return_lse"):
            out_specs = out_specs, P(*out_specs[:-1])

        def on_one_shard(parts: Any) -> Any:
            return function(**_map(_either, parts, arguments))

        parts = _map(lambda leaf: leaf if _is_array(leaf) else None, arguments)
        parts = jax.tree.map_with_path(functools.partial(_cut, mesh), parts, specs, is_leaf=_is_none)
        axes = set(mesh.explicit_axes)
        return jax.shard_map(on_one_shard, mesh=mesh, out_specs=out_specs, axis_names=axes, check_vma=False)(parts)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _explicit_mesh((args, kwargs)) is None:
            return function(*args, **kwargs)
        given = dict(zip(parameters, args, strict=False)) | kwargs
        arguments = {
            name: np.asarray(value) if isinstance(value, list | tuple) else value for name, value in given.items()
        }
        leaves, tree = jax.tree.flatten(arguments, is_leaf=_is_none)
        arrays = [leaf if _is_array(leaf) else None for leaf in leaves]
        # The type is part of the key: 4.0 equals 4, but is no valid window.
        settings = tuple(None if _is_array(leaf) else (type(leaf), _hashable(leaf)) for leaf in leaves)
        return run(arrays, settings, tree)

    return call  # type: ignore[return-value]


def is_whole(array: Any) -> bool:
    """Whether the array is replicated on an explicit mesh. Inside `jax.shard_map` it is the array of one device."""
    mesh: Any = jax.typeof(array).sharding.mesh
    return all(mesh.shape[axis] == 1 for axis in jax.tree.leaves(_spec(array)))


def _map(function: Callable[..., Any], *trees: Any) -> Any:
    return jax.tree.map(function, *trees, is_leaf=_is_none)


def _either(array: Any, setting: Any) -> Any:
    return setting if array is None else array


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _is_array(leaf: Any) -> bool:
    # NumPy scalars stay numbers: a window that is known before tracing is a static hint.
    return isinstance(leaf, jax.Array) or (isinstance(leaf, np.ndarray) and leaf.ndim > 0)


def _hashable(setting: Any) -> Any:
    return setting[()] if isinstance(setting, np.ndarray) else setting


def _explicit_mesh(arguments: Any) -> AbstractMesh | None:
    arrays = (leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array))
    meshes = (jax.typeof(array).sharding.mesh for array in arrays)
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def _name(path: Any) -> str:
    return path[-1].key if isinstance(path[-1], jax.tree_util.DictKey) else path[-1].name


def _spec(array: Any) -> tuple[Any, ...]:
    return tuple(jax.typeof(array).sharding.spec)


def _find_specs(arguments: Mapping[str, Any]) -> Any:
    """The sharding of each array that puts heads on the device of their KV heads."""
    k_cache = arguments["k_cache"] if "k_cache" in arguments else jax.tree.leaves(arguments["cache"])[0]
    # A single KV head (multi-query or latent attention) is replicated; query heads are sharded.
    heads = _spec(arguments["q"] if k_cache.shape[-2] == 1 and "q" in arguments else k_cache)[-2]
    has_seqs = "q" in arguments and arguments.get("query_starts") is None
    seqs = _spec(arguments["q"])[0] if has_seqs else None
    if seqs is not None and arguments.get("prefix_groups") is not None:
        raise ValueError(
            "prefix_groups needs all sequences on every device; got q sharded as "
            f"{P(*_spec(arguments['q']))}. Leave it out, or make it and call paged_attention inside jax.shard_map."
        )

    def find_spec(path: Any, leaf: Any) -> P:
        axes: list[Any] = [None] * np.ndim(leaf)
        sharded = [(HEADS_AXES[_name(path)], heads)] if _name(path) in HEADS_AXES else []
        if has_seqs and _name(path) in OF_SEQS:
            sharded.append((0, seqs))
        for axis, mesh_axis in sharded:
            # An axis of size 1 is broadcast over heads or sequences.
            if -np.ndim(leaf) <= axis < np.ndim(leaf) and (leaf.shape[axis] > 1 or _spec(leaf)[axis] is not None):
                axes[axis] = mesh_axis
        return P(*axes)

    return jax.tree.map_with_path(find_spec, dict(arguments))


def _cut(mesh: AbstractMesh, path: Any, array: Any, spec: P) -> Any:
    if array is None or _spec(array) == tuple(spec):
        return array
    if any(axis is not None for axis in _spec(array)):
        raise ValueError(
            f"{_name(path)} must be sharded as {spec}, only over the KV heads of the cache and the sequences of q; "
            f"got {P(*_spec(array))}. Move it with jax.sharding.reshard."
        )
    return jax.sharding.reshard(array, NamedSharding(mesh, spec))
