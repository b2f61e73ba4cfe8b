"""Trees of small arrays as one array: a transfer between host and device costs by the array, hardly by the byte."""

import itertools
from types import ModuleType
from typing import Any

import jax
import numpy as np

WORD = 4  # bytes


def pack(tree: Any, xp: ModuleType = np) -> Any:
    """Concatenates arrays of bool or of 8, 16 or 32 bits as int32 `[words]`. `xp`: `jnp` inside jit."""
    return xp.concatenate([_as_words(xp.asarray(leaf), xp) for leaf in jax.tree.leaves(tree)])


def num_words(tree: Any) -> int:
    """The length of the packed tree."""
    return sum(map(_num_words, jax.tree.leaves(tree)))


def unpack(words: Any, like: Any) -> Any:
    """Inverse of `pack`. `like` has the tree's shapes and dtypes. NumPy leaves other than bool are views of `words`."""
    leaves, treedef = jax.tree.flatten(like)
    ends = itertools.accumulate(map(_num_words, leaves))
    parts = [_as_dtype(words[end - _num_words(leaf) : end], leaf) for leaf, end in zip(leaves, ends, strict=True)]
    return jax.tree.unflatten(treedef, parts)


def _num_words(leaf: Any) -> int:
    return leaf.size if leaf.dtype == np.bool_ else -(-leaf.size * leaf.dtype.itemsize // WORD)


def _as_words(x: Any, xp: ModuleType) -> Any:
    if x.dtype == np.bool_:
        return x.astype(np.int32).ravel()
    if missing := _num_words(x) * WORD // x.dtype.itemsize - x.size:
        x = xp.pad(x.ravel(), (0, missing))
    return (x if x.dtype.itemsize == WORD else x.ravel()).view(np.int32).ravel()


def _as_dtype(words: Any, like: Any) -> Any:
    values = words != 0 if like.dtype == np.bool_ else words.view(like.dtype)
    return (values if values.size == like.size else values[: like.size]).reshape(like.shape)
