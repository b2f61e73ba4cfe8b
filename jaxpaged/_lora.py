"""Low-rank adapters (LoRA) of a linear layer, another one for each token."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged import _device
from jaxpaged._by_kernel import by_kernel
from jaxpaged._integers import as_int32
from pallas_kernels.lora.config import Config, default_config, limit

PARTITIONED = (
    "the kernel of lora got arrays on several devices, and XLA cannot partition it. Call it inside jax.shard_map, or "
    'pass implementation="xla".'
)
GATHERED = 4  # tokens for each adapter: up to so many, their adapters are gathered. [adapters_h100]


def lora(x: ArrayLike, a: ArrayLike, b: ArrayLike, ids: ArrayLike, *, implementation: str | None = None) -> jax.Array:
    """What each token's adapter adds to the output of a linear layer.

        out[t] = (x[t] @ a[ids[t]].T) @ b[ids[t]], and 0 where ids[t] < 0

    The factor that PEFT calls scaling, `lora_alpha / r`, is part of `b`. Adapters of smaller ranks are filled up with
    zeros.

    Up to four tokens for each adapter are multiplied with their own adapters, which are gathered. More are multiplied
    with all adapters, in two products, between which the others' are masked. That reads each adapter once and takes
    `adapters * rank` times `features + outputs` multiplications a token. An adapter that is not finite then spoils the
    outputs of all.

    Args:
        x: `[tokens, features]`, the layer's input.
        a: `[adapters, rank, features]`.
        b: `[adapters, rank, outputs]`.
        ids: int32 `[tokens]`, the adapter of each token, as in `StepAttention.adapters`; -1: none.
        implementation: None and "xla" are what is said above. "mosaic_gpu" is a kernel that multiplies each token with
            its own adapter only. It is unfinished: it has never run on a GPU, and its speed is unknown. It takes
            bfloat16 and float16, ranks of 16, 32 and 64, multiples of 256 features and of 64 outputs, and computes
            gradients by XLA.

    Returns:
        `[tokens, outputs]`, in x's dtype.

    Raises:
        ValueError: shapes that do not fit.
        NotImplementedError: "mosaic_gpu" is named, and there is no NVIDIA GPU since Ampere, or the kernel does not take
            the arrays.

    Example:
        >>> import jax.numpy as jnp, jaxpaged
        >>> x, a, b = jnp.ones((3, 4)), jnp.ones((2, 1, 4)), jnp.array([[[1.0, 2.0]], [[3.0, 0.0]]])
        >>> jaxpaged.lora(x, a, b, jnp.array([1, -1, 0])).tolist()
        [[12.0, 0.0], [0.0, 0.0], [4.0, 8.0]]
    """
    x, a, b, ids = jnp.asarray(x), jnp.asarray(a), jnp.asarray(b), as_int32(ids)
    tokens, features = x.shape if x.ndim == 2 else (None, None)
    fits = a.ndim == b.ndim == 3 and a.shape[:2] == b.shape[:2] and a.shape[2] == features
    if not fits or ids.shape != (tokens,):
        raise ValueError(
            "pass x [tokens, features], a [adapters, rank, features], b [adapters, rank, outputs] and ids [tokens]; "
            f"got {list(x.shape)}, {list(a.shape)}, {list(b.shape)} and {list(ids.shape)}."
        )
    if implementation not in (None, "mosaic_gpu", "xla"):
        raise ValueError(f'implementation must be None, "mosaic_gpu" or "xla"; got {implementation=}.')
    if implementation == "mosaic_gpu":
        return _by_kernel(_configure(x, a, b), x, a, b, ids)
    return _by_xla(x, a, b, ids)


def _by_xla(x: jax.Array, a: jax.Array, b: jax.Array, ids: jax.Array) -> jax.Array:
    num_adapters = len(a)
    if len(x) <= GATHERED * num_adapters:
        rows = jnp.einsum("tf,trf->tr", x, a[ids])
        rows = jnp.where(ids[:, None] >= 0, rows, 0)
        return jnp.einsum("tr,tro->to", rows, b[ids])
    rows = jnp.einsum("tf,nrf->tnr", x, a)
    is_own = ids[:, None, None] == jnp.arange(num_adapters, dtype=jnp.int32)[None, :, None]
    return jnp.einsum("tnr,nro->to", jnp.where(is_own, rows, 0), b)


def _configure(x: jax.Array, a: jax.Array, b: jax.Array) -> Config:
    sizes: Any = dict(rank=a.shape[1], parts=(b.shape[2],), compute_capability=_device.gpu().compute_capability)
    if refusal := limit([x.dtype, a.dtype, b.dtype], features=x.shape[1], **sizes):
        raise NotImplementedError(f'{refusal} Or pass implementation="xla".')
    return default_config(**sizes)


# Jitted by itself: otherwise every layer of a model lowers the kernel again.
@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _by_kernel(config: Config, *arrays: jax.Array) -> jax.Array:
    def launch(*arrays: jax.Array) -> jax.Array:
        from pallas_kernels.lora import kernel  # here, so that only its callers import Mosaic

        return kernel.launch(*arrays, config=config)

    def compute(*arrays: jax.Array) -> jax.Array:
        return by_kernel(launch, _by_xla, *arrays, refusal=PARTITIONED)

    return jax.custom_batching.sequential_vmap(compute)(*arrays)


@_by_kernel.__wrapped__.defjvp  # type: ignore[attr-defined]
def _by_kernel_jvp(config: Config, primals: tuple, tangents: tuple) -> tuple:
    return _by_kernel(config, *primals), jax.jvp(_by_xla, primals, tangents)[1]
