"""State that `jax.export` can write into an exported function, and read back from it."""

import json
from typing import Any

from jax import export


def exportable[T: type](cls: T) -> T:
    """Class decorator, over a dataclass that JAX knows as a pytree: a function that takes or returns it serialises.

    What is static in it, plain numbers and strings, is written as JSON.
    """

    def write(static: Any) -> bytes:
        return json.dumps(static).encode()

    def read(written: bytes) -> tuple:
        return tuple(json.loads(written))

    export.register_pytree_node_serialization(
        cls, serialized_name=f"jaxpaged.{cls.__name__}", serialize_auxdata=write, deserialize_auxdata=read
    )
    return cls
