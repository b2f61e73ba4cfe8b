"""Interpret mode: kernels on a CPU, without what only a GPU has. What must differ there asks `interpreted()`."""

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


def kernel(body: Callable[..., None], **how: Any) -> Any:
    """`plgpu.kernel`, in the mode of now also if the body is traced later, as under `jax.vmap`."""
    params = _params.get()

    @functools.wraps(body)
    def traced(*refs: Any, **scratch_refs: Any) -> None:
        with interpret_mode(params):
            body(*refs, **scratch_refs)

    return plgpu.kernel(traced, interpret=params, **how)
