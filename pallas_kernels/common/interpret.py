"""Interpret mode: kernels on a CPU. A function that needs a GPU names another function to run in its place in interpret
mode."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

_params: contextvars.ContextVar[Any] = contextvars.ContextVar("interpret", default=None)


@contextlib.contextmanager
def interpret_mode(params: Any) -> Iterator[None]:
    """Interprets kernels launched in this context. `params` is the `interpret` argument of `plgpu.kernel`; None means a
    GPU."""
    token = _params.set(params)
    try:
        yield
    finally:
        _params.reset(token)


def interpreted() -> bool:
    """Whether the kernel being launched or traced is interpreted."""
    return bool(_params.get())


def interpreted_by(twin: Callable[..., Any]) -> Callable[[Any], Any]:
    """Decorates a function that needs a GPU: in interpret mode `twin` is called with the same arguments."""

    def decorate[F: Callable[..., Any]](function: F) -> F:
        @functools.wraps(function)
        def either(*args: Any, **named: Any) -> Any:
            return (twin if interpreted() else function)(*args, **named)

        return either  # type: ignore[return-value]

    return decorate


def nothing(*_: Any) -> None:
    """Replaces a function that interpret mode does not need."""


def _two_buffers(first: Any, second: Any) -> Any:
    return [first, second]


@interpreted_by(_two_buffers)
def two_views(first: Any, second: Any) -> Any:
    """Two views of one buffer in SMEM. Interpret mode has no views and gets two buffers."""
    return plgpu.RefUnion(first, second)


def in_this_mode[F: Callable[..., Any]](function: F) -> F:
    """Binds the function to the current mode, even if it is traced later, as under `jax.vmap`."""
    params = _params.get()

    @functools.wraps(function)
    def traced(*args: Any, **named: Any) -> Any:
        with interpret_mode(params):
            return function(*args, **named)

    return traced  # type: ignore[return-value]


def kernel(body: Callable[..., None], **how: Any) -> Any:
    """`plgpu.kernel` in the current mode."""
    return plgpu.kernel(in_this_mode(body), interpret=_params.get(), **how)
