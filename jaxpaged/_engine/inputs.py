"""Checks of the weights and caches that an engine is given."""

import math
import numbers
from typing import Any

import jax

from jaxpaged._cache.kv_cache import KVCache, caches_in


def own(weights: Any) -> Any:
    """A copy of the pytree with the same arrays: Flax optimisers replace the arrays in their own containers."""
    if (deleted := find_deleted(weights)) is not None:
        raise ValueError(
            f"weights must not be deleted arrays; the one at {deleted} was deleted, as jit does with donated arrays. "
            "Pass the weights that your learner returned."
        )
    for path, leaf in jax.tree.leaves_with_path(weights):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, numbers.Number):
            raise ValueError(
                f"weights must be a pytree of arrays; got {leaf!r} at {jax.tree_util.keystr(path) or 'its root'}. "
                "Split an Equinox module, `weights, static = eqx.partition(module, eqx.is_array)`, and call "
                "`eqx.combine(weights, static)` in apply."
            )
    return jax.tree.map(lambda x: x, weights)


def find_deleted(weights: Any) -> str | None:
    """The path of the first deleted array (for instance, a donated one), or None if no array is deleted."""
    for path, leaf in jax.tree.leaves_with_path(weights):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            return jax.tree_util.keystr(path) or "its root"
    return None


def bytes_on_a_device(weights: Any) -> int:
    """Bytes of the weights on one device."""

    def of(leaf: Any) -> int:
        if isinstance(leaf, jax.Array):
            return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        return int(getattr(leaf, "nbytes", 0))  # a number has none

    return sum(map(of, jax.tree.leaves(weights)))


def pool_sizes(caches: Any) -> tuple[int, int]:
    """Blocks and block size of the caches of a model."""
    found = caches_in(caches)
    if not found or not all(isinstance(cache, KVCache) for cache in found):
        raise ValueError(f"caches must be a pytree of KVCaches; got {jax.tree.structure(caches)}.")
    paths: dict[int, str] = {}
    for path, leaf in jax.tree.leaves_with_path(caches):
        name = f"caches{jax.tree_util.keystr(path)}"
        if leaf.is_deleted():
            raise ValueError("these caches were donated, perhaps to another engine; make new ones for each.")
        if (other := paths.setdefault(id(leaf), name)) != name:
            raise ValueError(
                f"each cache must have arrays of its own, because all are donated; {other} and {name} are one array. "
                "Make a cache for each layer: `[KVCache.create(...) for _ in range(num_layers)]`."
            )
    sizes = {cache.k.shape[-4:-2] for cache in found}
    if len(sizes) > 1:
        raise ValueError(f"all caches must have the same [blocks, block_size]; got {sorted(sizes)}.")
    num_blocks, block_size = sizes.pop()
    if num_blocks < 2:
        raise ValueError(f"caches must have a block besides the null block, so at least 2; got {num_blocks=}.")
    return num_blocks, block_size


def keys_and_values(caches: Any) -> list[jax.Array]:
    """The arrays that hold keys and values, without their scales."""
    return [pool for cache in caches_in(caches) for pool in (cache.k, cache.v) if pool is not None]
