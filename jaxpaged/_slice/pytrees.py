"""Pytrees of arrays that must be alike."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged._cache.kv_cache import KVCache


def difference(before: Any, after: Any) -> str | None:
    """What first differs in structure, shape or dtype, in words; None if nothing does."""
    found = [dict(jax.tree.flatten_with_path(tree)[0]) for tree in (before, after)]
    for path in [*found[0], *found[1]]:
        ours, theirs = (_text(leaves, path) for leaves in found)
        if ours != theirs:
            return f"{jax.tree_util.keystr(path) or 'it'} was {ours} and is {theirs}"
    structures: list[Any] = [jax.tree.structure(tree) for tree in (before, after)]
    if structures[0] == structures[1]:
        return None
    if type(before) is type(after):
        return "containers in it or their static fields differ, such as the train or eval mode of a Flax module"
    return f"it was a {type(before).__name__} and is a {type(after).__name__}"


def _text(leaves: dict[Any, Any], path: Any) -> str:
    return f"{jnp.result_type(leaves[path])}{list(np.shape(leaves[path]))}" if path in leaves else "not there"


def in_same_containers(before: Any, after: Any) -> Any:
    """The leaves of `after` in the containers of `before`: lists become tuples. Unchanged if their paths differ."""
    paths = [[path for path, _ in jax.tree.leaves_with_path(tree)] for tree in (before, after)]
    return jax.tree.unflatten(jax.tree.structure(before), jax.tree.leaves(after)) if paths[0] == paths[1] else after


def caches_in(caches: Any) -> list[KVCache]:
    """The caches of a model, out of the containers in which they are."""
    return jax.tree.leaves(caches, is_leaf=lambda x: isinstance(x, KVCache))
