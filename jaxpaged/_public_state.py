"""Every public pytree is serialised by `jax.export`, and prints as one line of shapes."""

import dataclasses
import json
from typing import Any

from jax import export


def public_state[T: type](cls: T) -> T:
    """Class decorator for a dataclass that is a registered pytree.

    Exported functions may have it as argument and result. Its static fields must be serialisable as JSON.
    """

    def write(static: Any) -> bytes:
        return json.dumps(static).encode()

    def read(written: bytes) -> tuple:
        return _as_tuples(json.loads(written))

    export.register_pytree_node_serialization(
        cls, serialized_name=f"jaxpaged.{cls.__name__}", serialize_auxdata=write, deserialize_auxdata=read
    )
    cls.__repr__ = short_repr  # type: ignore[assignment, method-assign]
    return cls


def _as_tuples(static: Any) -> Any:
    """Lists as tuples: JSON has only lists, and static fields must be hashable."""
    return tuple(map(_as_tuples, static)) if isinstance(static, list) else static


def short_repr(state: Any) -> str:
    """`KVCache(k=float32[8,16,2,64], ...)`: shapes and dtypes instead of values, so tracers look the same.

    A static field that is None is left out."""
    values = {
        field.name: getattr(state, field.name)
        for field in dataclasses.fields(state)
        if not (field.metadata.get("static") and getattr(state, field.name) is None)
    }
    fields = (f"{name}={_short(value)}" for name, value in values.items())
    return f"{type(state).__name__}({', '.join(fields)})"


def _short(value: Any) -> str:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return repr(value)  # static, another pytree, or whatever jax.tree.map put here
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"
