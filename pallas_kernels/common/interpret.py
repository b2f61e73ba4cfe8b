"""Interpret mode: kernels on a CPU, without what only a GPU has. A function that needs a GPU names its twin there."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

_params: contextvars.ContextVar[Any] = contextvars.ContextVar("interpret", default=None)


@contextlib.contextmanager
def interpret_mode(params: Any) -> Iterator[None]:
    """Kernels that are launched here are interpreted; `params` as `interpret` of `plgpu.kernel`, None for a GPU."""
    token = _params.set(params)
    try:
        yield
    finally:
        _params.reset(token)


def interpreted() -> bool:
    """Whether the kernel that is launched, or whose body is traced, is interpreted."""
    return bool(_params.get())


def interpreted_by(twin: Callable[..., Any]) -> Callable[[Any], Any]:
    """Decorates a function that only a GPU has: in interpret mode `twin` gets its arguments."""

    def decorate[F: Callable[..., Any]](function: F) -> F:
        @functools.wraps(function)
        def either(*args: Any, **named: Any) -> Any:
            return (twin if interpreted() else function)(*args, **named)

        return either  # type: ignore[return-value]

    return decorate


def nothing(*_: Any) -> None:
    """The twin of what interpret mode does not need."""


def _two_buffers(first: Any, second: Any) -> Any:
    return [first, second]


@interpreted_by(_two_buffers)
def two_views(first: Any, second: Any) -> Any:
    """A buffer in SMEM, seen in two ways; in interpret mode, which has no views, two buffers."""
    return plgpu.RefUnion(first, second)


def in_this_mode[F: Callable[..., Any]](function: F) -> F:
    """The function in the mode of now, also if it is traced later, as under `jax.vmap`."""
    params = _params.get()

    @functools.wraps(function)
    def traced(*args: Any, **named: Any) -> Any:
        with interpret_mode(params):
            return function(*args, **named)

    return traced  # type: ignore[return-value]


def kernel(body: Callable[..., None], **how: Any) -> Any:
    """`plgpu.kernel`, in the mode of now."""
    return plgpu.kernel(in_this_mode(body), interpret=_params.get(), **how)
