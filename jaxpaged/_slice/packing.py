"""Trees of small arrays as one: what crosses between host and device costs by the array, hardly by the byte."""

import itertools
import math
from types import ModuleType
from typing import Any

import jax
import numpy as np


def pack(tree: Any, xp: ModuleType = np) -> Any:
    """Arrays of 32 bits and of bool, behind one another as int32 `[words]`. `xp`: `jnp` inside of jit."""
    return xp.concatenate([xp.ravel(_as_words(xp.asarray(leaf))) for leaf in jax.tree.leaves(tree)])


def num_words(tree: Any) -> int:
    """Of the tree, packed."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def unpack(words: Any, like: Any) -> Any:
    """The tree that was packed; `like` has its shapes and dtypes. NumPy's arrays are views."""
    leaves, treedef = jax.tree.flatten(like)
    ends = itertools.accumulate(math.prod(leaf.shape) for leaf in leaves)
    parts = [_as_dtype(words[end - math.prod(leaf.shape) : end], leaf) for leaf, end in zip(leaves, ends, strict=True)]
    return jax.tree.unflatten(treedef, parts)


def _as_words(x: Any) -> Any:
    return x.astype(np.int32) if x.dtype == np.bool_ else x.view(np.int32)


def _as_dtype(words: Any, like: Any) -> Any:
    return (words != 0 if like.dtype == np.bool_ else words.view(like.dtype)).reshape(like.shape)
