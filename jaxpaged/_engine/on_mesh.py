"""Engines on several devices: each device runs the slice on its shards of caches and weights."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpaged import _device
from jaxpaged._cache.kv_cache import caches_in

SUMS_BY_NCCL = "--xla_gpu_experimental_use_collective_kernels="


def find_mesh(tree: Any) -> Mesh | None:
    """The mesh of the arrays, if there are several devices."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) and sharding.mesh.size > 1:
            return sharding.mesh
    return None


def warn_of_old_nccl() -> None:
    """Warns if the sums of a model on several GPUs will fail, which loses the engine."""
    if SUMS_BY_NCCL not in os.environ.get("XLA_FLAGS", "") and (found := _device.old_nccl()) is not None:
        package, version = found
        warnings.warn(
            f"NCCL {version} is too old for the sums of jax {jax.__version__} over GPUs: pip install -U {package}. If "
            f"another package needs this version, set XLA_FLAGS={SUMS_BY_NCCL}",
            stacklevel=4,  # the line that makes the engine
        )


def whole_beside(caches: Any, mesh: Mesh | None) -> Sharding:
    """The sharding of an array that is replicated on the devices of the caches. `mesh`: their mesh, if any."""
    if mesh is not None:
        return NamedSharding(mesh, P())
    (device,) = caches_in(caches)[0].k.sharding.device_set
    return SingleDeviceSharding(device)


def replicate(mesh: Mesh, tree: Any) -> Any:
    """Replicates all arrays that are not on the mesh yet."""

    def put(x: Any) -> jax.Array:
        sharding = getattr(x, "sharding", None)
        is_there = isinstance(sharding, NamedSharding) and sharding.mesh == mesh
        return x if is_there else jax.device_put(x, NamedSharding(mesh, P()))

    return jax.tree.map(put, tree)


def on_each_device(mesh: Mesh, function: Callable[..., Any], weights: Any, state: Any) -> Callable[..., Any]:
    """`new_state, report = function(weights, state, last_report, inbox)` on each device, with the shardings of these
    weights and this state."""
    of_weights, of_state = (jax.tree.map(lambda x: x.sharding.spec, tree) for tree in (weights, state))
    # Replicated values stay equal because they are computed from equal values, which `check_vma` cannot prove.
    return jax.shard_map(
        function, mesh=mesh, in_specs=(of_weights, of_state, P(), P()), out_specs=(of_state, P()), check_vma=False
    )
