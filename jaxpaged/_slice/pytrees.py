"""Comparison of pytrees, and parts of their arrays."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def difference(before: Any, after: Any) -> str | None:
    """Describes the first difference in structure, shape or dtype; None if there is no difference."""
    both = [dict(jax.tree.flatten_with_path(tree)[0]) for tree in (before, after)]
    for path in [*both[0], *both[1]]:
        old, new = (_text(leaves, path) for leaves in both)
        if old != new:
            return f"{jax.tree_util.keystr(path) or 'it'} was {old} and is {new}"
    structures: list[Any] = [jax.tree.structure(tree) for tree in (before, after)]
    if structures[0] == structures[1]:
        return None
    if type(before) is type(after):
        return "containers in it or their static fields differ, such as the train or eval mode of a Flax module"
    return f"it was a {type(before).__name__} and is a {type(after).__name__}"


def _text(leaves: dict[Any, Any], path: Any) -> str:
    return f"{jnp.result_type(leaves[path])}{list(np.shape(leaves[path]))}" if path in leaves else "not there"


def at[T](index: Any, tree: T) -> T:
    """The tree with `array[index]` of each array."""
    return jax.tree.map(operator.itemgetter(index), tree)


def describe(x: Any) -> str:
    """The dtype and shape of an array, or the type of another object."""
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, jax.Array) else type(x).__name__


def in_same_containers(before: Any, after: Any) -> Any:
    """The leaves of `after` in the containers of `before`: lists become tuples. Unchanged if their paths differ."""
    paths = [[path for path, _ in jax.tree.leaves_with_path(tree)] for tree in (before, after)]
    return jax.tree.unflatten(jax.tree.structure(before), jax.tree.leaves(after)) if paths[0] == paths[1] else after
