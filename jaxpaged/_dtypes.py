"""Checks of dtypes."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp


def checked_dtype(name: str, dtype: Any, among: Iterable[Any] = ()) -> jnp.dtype:
    """The dtype. Raises `ValueError` for an unknown name, or if it is not one of `among`."""
    known = [jnp.dtype(each) for each in among]
    try:
        found = None if dtype is None else jnp.dtype(dtype)
    except TypeError:  # NumPy knows no such name
        found = None
    if found is None or (known and found not in known):
        names = (
            f"one of {', '.join(each.name for each in known)}" if known else 'a dtype such as "bfloat16" or "float32"'
        )
        raise ValueError(f"{name} must be {names}; got {name}={found.name if found else repr(dtype)}.")
    return found
