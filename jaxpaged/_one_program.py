"""Functions that run as one program outside of `jax.jit`."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def one_program[F: Callable[..., Any]](*static: str) -> Callable[[F], F]:
    """Decorator: outside of `jax.jit` the function is one program, instead of one program per operation. Inside, its
    operations are part of the caller's program.

    Args:
        static: names of static arguments.
    """
    return functools.partial(jax.jit, static_argnames=static, inline=True)  # type: ignore[return-value]
