"""Trees of small arrays as one array: a transfer between host and device costs by the array, hardly by the byte."""

import itertools
from types import ModuleType
from typing import Any

import jax
import numpy as np


def pack(tree: Any, xp: ModuleType = np) -> Any:
    """Concatenates arrays of bool or 32-bit dtypes as int32 `[words]`. `xp`: `jnp` inside jit."""
    return xp.concatenate([_as_words(xp.asarray(leaf)).ravel() for leaf in jax.tree.leaves(tree)])


def num_words(tree: Any) -> int:
    """The length of the packed tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def unpack(words: Any, like: Any) -> Any:
    """Inverse of `pack`. `like` has the tree's shapes and dtypes. 32-bit NumPy leaves are views of `words`."""
    leaves, treedef = jax.tree.flatten(like)
    ends = itertools.accumulate(leaf.size for leaf in leaves)
    parts = [_as_dtype(words[end - leaf.size : end], leaf) for leaf, end in zip(leaves, ends, strict=True)]
    return jax.tree.unflatten(treedef, parts)


def _as_words(x: Any) -> Any:
    return x.astype(np.int32) if x.dtype == np.bool_ else x.view(np.int32)


def _as_dtype(words: Any, like: Any) -> Any:
    return (words != 0 if like.dtype == np.bool_ else words.view(like.dtype)).reshape(like.shape)
