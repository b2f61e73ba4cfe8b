"""Low-rank adapters (LoRA) of a linear layer, another one for each token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._integers import as_int32

GATHERED = 4  # tokens for each adapter, up to which their adapters are gathered. [adapters_h100]


def lora(x: ArrayLike, a: ArrayLike, b: ArrayLike, ids: ArrayLike) -> jax.Array:
    """The adapters' addition to the output of a linear layer.

        out[t] = (x[t] @ a[ids[t]].T) @ b[ids[t]], and 0 where ids[t] < 0

    The factor that PEFT calls scaling, `lora_alpha / r`, is part of `b`. Adapters of smaller ranks are filled up with
    zeros.

    Up to four tokens for each adapter are multiplied with their own adapters, which are gathered. More are multiplied
    with all adapters, in two products, between which the others' are masked. That reads each adapter once and costs
    `adapters * rank` times `features + outputs` multiplications a token. An adapter that is not finite then spoils the
    outputs of all.

    Args:
        x: `[tokens, features]`, the layer's input.
        a: `[adapters, rank, features]`.
        b: `[adapters, rank, outputs]`.
        ids: int32 `[tokens]`, the adapter of each token, as in `AttentionStep.adapters`; -1: none.

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
    fits = a.ndim == b.ndim == 3 and a.shape[:2] == b.shape[:2] and a.shape[2] == features
    if not fits or ids.shape != (tokens,):
        raise ValueError(
            "pass x [tokens, features], a [adapters, rank, features], b [adapters, rank, outputs] and ids [tokens]; "
            f"got {list(x.shape)}, {list(a.shape)}, {list(b.shape)} and {list(ids.shape)}."
        )
    num_adapters = len(a)
    if len(x) <= GATHERED * num_adapters:
        rows = jnp.einsum("tf,trf->tr", x, a[ids])
        rows = jnp.where(ids[:, None] >= 0, rows, 0)
        return jnp.einsum("tr,tro->to", rows, b[ids])
    rows = jnp.einsum("tf,nrf->tnr", x, a)
    is_own = ids[:, None, None] == jnp.arange(num_adapters, dtype=jnp.int32)[None, :, None]
    return jnp.einsum("tnr,nro->to", jnp.where(is_own, rows, 0), b)
