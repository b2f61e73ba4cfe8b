"""What is compiled as a whole, also where a caller has no `jax.jit`."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def one_program[F: Callable[..., Any]](*static: str) -> Callable[[F], F]:
    """The function as one program: outside of `jax.jit`, JAX would compile and start each of its operations by itself.
    Inside, they are operations of the caller's program.

    Args:
        static: names of arguments that are no arrays.
    """
    return functools.partial(jax.jit, static_argnames=static, inline=True)  # type: ignore[return-value]
