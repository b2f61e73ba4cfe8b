"""Low-rank adapters (LoRA) of a linear layer, another one for each token."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged import _device
from jaxpaged._by_kernel import by_kernel
from jaxpaged._integers import as_int32

GATHERED = 4  # tokens for each adapter: up to so many, XLA gathers their adapters. [adapters_h100]


def lora(x: ArrayLike, a: ArrayLike, b: ArrayLike, ids: ArrayLike, *, parts: Sequence[int] | None = None) -> jax.Array:
    """What each token's adapter adds to the output of a linear layer.

        out[t] = (x[t] @ a[ids[t]].T) @ b[ids[t]], and 0 where ids[t] < 0

    The factor that PEFT calls scaling, `lora_alpha / r`, is part of `b`. Adapters of smaller ranks are filled up with
    zeros. A layer whose outputs are fused, such as q, k and v, has adapters of each of its `parts`: their a's below
    each other, their b's beside each other. One call for all is faster than one for each.

    On an NVIDIA GPU since Ampere two kernels read each token's adapter, if the arrays are bfloat16 or float16 and their
    sizes suit: a rank of 16, 32, 64 or 128, features in steps of 128, outputs of each part in steps of 64, and more
    tokens than adapters. XLA does the rest: up to four tokens for each adapter are multiplied with their own adapters,
    which are gathered; more are multiplied with all, and the products with others' masked. An adapter that is not
    finite then spoils the outputs of all. XLA computes gradients.

    Args:
        x: `[tokens, features]`, the layer's input.
        a: `[adapters, rank, features]`; with parts `[adapters, parts * rank, features]`.
        b: `[adapters, rank, outputs]`.
        ids: int32 `[tokens]`, the adapter of each token, as in `StepAttention.adapters`; -1: none.
        parts: the outputs of each part. None: there is one.

    Returns:
        `[tokens, outputs]`, in x's dtype.

    Raises:
        ValueError: shapes that do not fit.

    Example:
        >>> import jax.numpy as jnp, jaxpaged
        >>> x, a, b = jnp.ones((3, 4)), jnp.ones((2, 1, 4)), jnp.array([[[1.0, 2.0]], [[3.0, 0.0]]])
        >>> jaxpaged.lora(x, a, b, jnp.array([1, -1, 0])).tolist()
        [[12.0, 0.0], [0.0, 0.0], [4.0, 8.0]]
    """
    x, a, b, ids = jnp.asarray(x), jnp.asarray(a), jnp.asarray(b), as_int32(ids)
    tokens, features = x.shape if x.ndim == 2 else (None, None)
    fits = a.ndim == b.ndim == 3 and len(a) == len(b) and a.shape[2] == features and ids.shape == (tokens,)
    if fits:
        each = (b.shape[2],) if parts is None else tuple(parts)
        fits = a.shape[1] == len(each) * b.shape[1] and sum(each) == b.shape[2]
    if not fits:
        raise ValueError(
            "pass x [tokens, features], a [adapters, rank, features], b [adapters, rank, outputs] and ids [tokens], "
            "and with parts, the outputs of each, a [adapters, parts * rank, features]; "
            f"got {list(x.shape)}, {list(a.shape)}, {list(b.shape)}, {list(ids.shape)} and {parts=}."
        )
    if len(x) > len(a) and _device.is_gpu() and _device.gpu().has_kernels:
        from pallas_kernels.lora.kernel import Config  # here, so that only its callers import Triton

        dtypes = [array.dtype for array in (x, a, b)]
        config = Config.choose(dtypes, rank=b.shape[1], features=x.shape[1], parts=each)
        if config is not None:
            return _by_kernel(config, x, a, b, ids)
    return _by_xla(each, x, a, b, ids)


# Jitted by itself: otherwise every layer of a model lowers the kernels again.
@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _by_kernel(config: Any, *arrays: jax.Array) -> jax.Array:
    from pallas_kernels.lora.kernel import launch

    def compute(*arrays: jax.Array) -> jax.Array:
        return by_kernel(functools.partial(launch, config), functools.partial(_by_xla, config.parts), *arrays)

    return jax.custom_batching.sequential_vmap(compute)(*arrays)


@_by_kernel.__wrapped__.defjvp  # type: ignore[attr-defined]
def _by_kernel_jvp(config: Any, primals: tuple, tangents: tuple) -> tuple:
    return _by_kernel(config, *primals), jax.jvp(functools.partial(_by_xla, config.parts), primals, tangents)[1]


def _by_xla(parts: tuple[int, ...], x: jax.Array, a: jax.Array, b: jax.Array, ids: jax.Array) -> jax.Array:
    num_adapters = len(a)
    ends = [sum(parts[:i]) for i in range(1, len(parts))]
    if len(x) <= GATHERED * num_adapters:
        rows = jnp.einsum("tf,trf->tr", x, a[ids])
        rows = jnp.where(ids[:, None] >= 0, rows, 0).reshape(len(x), len(parts), -1)
        each = (jnp.einsum("tr,tro->to", rows[:, i], own[ids]) for i, own in enumerate(jnp.split(b, ends, axis=2)))
        return jnp.concatenate([*each], axis=1)
    rows = jnp.einsum("tf,nrf->tnr", x, a)
    is_own = ids[:, None, None] == jnp.arange(num_adapters, dtype=jnp.int32)[None, :, None]
    rows = jnp.where(is_own, rows, 0).reshape(len(x), num_adapters, len(parts), -1)
    each = (jnp.einsum("tnr,nro->to", rows[:, :, i], own) for i, own in enumerate(jnp.split(b, ends, axis=2)))
    return jnp.concatenate([*each], axis=1)
