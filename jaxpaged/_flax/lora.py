"""Low-rank adapters (LoRA) of a linear layer, chosen per token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._integers import as_int32

GATHERED = 4  # up to this many tokens per adapter, each token gathers its adapter. [adapters_h100]


def lora(x: ArrayLike, a: ArrayLike, b: ArrayLike, ids: ArrayLike) -> jax.Array:
    """The term that LoRA adapters add to the output of a linear layer.

        out[t] = (x[t] @ a[ids[t]].T) @ b[ids[t]], and 0 where ids[t] < 0

    Multiply PEFT's scaling factor, `lora_alpha / r`, into `b`. Pad adapters of smaller rank with zeros.

    With at most four tokens per adapter, each token gathers its own adapter. With more, every token is multiplied with
    all adapters in two matrix products, and the results of other adapters are masked in between. That reads each
    adapter once and costs `adapters * rank * (features + outputs)` multiplications per token. In this form an adapter
    with NaN or infinity spoils the outputs of all tokens.

    Args:
        x: `[tokens, features]`, input of the layer.
        a: `[adapters, rank, features]`, first factor of each adapter.
        b: `[adapters, rank, outputs]`, second factor of each adapter.
        ids: int32 `[tokens]`, adapter of each token, as in `AttentionStep.adapters`; -1: none.

    Returns:
        `[tokens, outputs]`, in the dtype of x.

    Raises:
        ValueError: the shapes do not match.

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
