"""How attention calls its kernels."""

from collections.abc import Callable
from typing import Any

import jax

from jaxpaged._by_kernel import by_kernel

PARTITIONED = (
    "the Mosaic GPU kernels got arrays on several devices, and their types do not say what lies where. XLA cannot "
    "partition a kernel: it would gather the whole cache on each device. Put the arrays on an explicit mesh, which is "
    "what jax.make_mesh makes by default; or call paged_attention inside jax.shard_map over the KV heads, or inside "
    'jax.sharding.explicit_axes; or pass implementation="xla", which XLA partitions.'
)

Attend = Callable[..., tuple[jax.Array, jax.Array]]


def call_kernel(kernel: Attend, by_xla: Attend | None, *arguments: Any) -> tuple[jax.Array, jax.Array]:
    """`kernel(*arguments)`; lowered for other platforms than CUDA `by_xla(*arguments)`, or where that is None
    `NotImplementedError`. That too where XLA would partition the call."""
    return by_kernel(kernel, by_xla or _refuse, *arguments, refusal=PARTITIONED)


def _refuse(*_: Any) -> tuple[jax.Array, jax.Array]:
    raise NotImplementedError(
        'implementation="mosaic_gpu" is for NVIDIA GPUs, and this call is lowered for another platform. '
        'Leave it out, or pass "xla".'
    )
