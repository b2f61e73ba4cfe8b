"""Checks and conversions for integer arguments: sizes, and arrays of ids, slots, lengths and counts."""

import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

INT32 = np.iinfo(np.int32)


def as_int32(values: ArrayLike) -> jax.Array:
    """Returns a JAX array unchanged, and NumPy and Python integers as int32.

    Numbers beyond int32 saturate. A cast would turn 2^32 + 3, which is outside any pool, into 3, which is not. The
    caller checks the dtype of the result.
    """
    if isinstance(values, jax.Array):
        return values
    array = np.asarray(values)
    return jnp.asarray(saturated(array) if np.issubdtype(array.dtype, np.integer) else array)


def saturated(array: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """Integers of any dtype as int32; numbers out of range become the nearest int32."""
    held = jnp.iinfo(array.dtype)
    least, most = max(int(held.min), INT32.min), min(int(held.max), INT32.max)
    return array.clip(least, most).astype(np.int32)


def known_values(values: ArrayLike) -> np.ndarray | None:
    """The values of an array as NumPy, or None for a tracer or an array on devices of other processes."""
    if isinstance(values, jax.core.Tracer) or (isinstance(values, jax.Array) and not values.is_fully_addressable):
        return None
    return np.asarray(values)


def checked_array(
    name: str, values: ArrayLike, *shape: int | str, dtype: DTypeLike = jnp.int32, which: str = ""
) -> jax.Array:
    """Checks the shape and dtype of an array argument, and returns it as `as_int32` does.

    Args:
        name: name of the argument, for the message.
        values: the array.
        shape: expected axes: a length, or the name of an axis of any length.
        dtype: expected dtype.
        which: meaning of the elements, for the message.

    Raises:
        ValueError: the shape or dtype differs.
    """
    array = as_int32(values)
    is_right = array.dtype == dtype and array.ndim == len(shape)
    if not is_right or any(n != m for n, m in zip(shape, array.shape, strict=True) if not isinstance(n, str)):
        wanted = f"{jnp.dtype(dtype).name} [{', '.join(map(str, shape))}]" + (which and f", {which}")
        raise ValueError(f"{name} must be {wanted}; got {array.dtype} {list(array.shape)}.")
    return array


def checked_query_starts(query_starts: ArrayLike, num_seqs: int) -> jax.Array:
    """Checks `query_starts`, int32 `[num_seqs + 1]`: the index of each sequence's first packed token, and the end."""
    which = "one more than the allocator's sequences"
    return checked_array("query_starts", query_starts, num_seqs + 1, which=which)


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raises `ValueError` unless `num_heads` is a multiple of `num_kv_heads`."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads; got {num_heads=}, {num_kv_heads=}.")


def checked_size(name: str, size: Any, least: int = 1, most: int | None = None) -> int:
    """Checks a static size and returns it as a Python int. With x64 on, a NumPy int would turn int32 arrays into int64.

    Raises:
        ValueError: the size is not an int, or is outside `least` to `most`.
    """
    try:
        if isinstance(size, bool):
            raise TypeError
        number = operator.index(size)
    except TypeError:
        raise ValueError(f"{name} must be an int; got {name}={size!r}.") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}; got {name}={size}.")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}; got {name}={size}.")
    return number


def checked_tuple(name: str, values: Any) -> tuple[Any, ...]:
    """Checks that an argument is iterable and returns it as a tuple. Raises `ValueError`."""
    if not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a sequence; got {name}={values!r}.")
    return tuple(values)
