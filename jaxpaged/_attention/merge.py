"""Merges the attention over two sets of tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._one_program import one_program
from pallas_kernels.common import merge_parts


def merge_attention(
    out_a: ArrayLike, lse_a: ArrayLike, out_b: ArrayLike, lse_b: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Attention over the tokens of a and b together, from the outputs and lses of each.

        lse = log(exp(lse_a) + exp(lse_b))
        out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

    Computed in float32 and rounded once. A token that both calls saw counts twice, and so does a sink, so pass `sinks`
    to only one of the calls.

    Args:
        out_a: `[..., heads, head_dim]`, from `paged_attention(..., return_lse=True)`.
        lse_a: f32 `[..., heads]`, natural logarithm; -inf if no token was seen.
        out_b: as `out_a`.
        lse_b: as `lse_a`.

    Returns:
        The output, in the dtype of `out_a`, and the lse. If both lses are -inf, the output is zero, the lse is -inf and
        gradients are zero.

    Raises:
        ValueError: the shapes or dtypes differ.

    Example:
        >>> import jax.numpy as jnp, jaxpaged
        >>> seen, unseen = jnp.ones((1, 4, 8)), jnp.zeros((1, 4, 8))
        >>> out, lse = jaxpaged.ops.merge_attention(seen, jnp.zeros((1, 4)), unseen, jnp.full((1, 4), -jnp.inf))
        >>> float(out.min()), float(lse.max())
        (1.0, 0.0)

    References:
        Dao et al., Flash-Decoding for long-context inference, 2023. Ye et al., FlashInfer, 2025
        (https://arxiv.org/abs/2501.01005), section 2.2.
    """
    out_a, lse_a, out_b, lse_b = (jnp.asarray(array) for array in (out_a, lse_a, out_b, lse_b))
    if out_a.shape != out_b.shape or out_a.dtype != out_b.dtype:
        raise ValueError(f"the outputs must have one shape and dtype; got {out_a.shape=}, {out_b.shape=}.")
    for lse in (lse_a, lse_b):
        if lse.shape != out_a.shape[:-1] or lse.dtype != jnp.float32:
            raise ValueError(
                f"an lse must be float32 {list(out_a.shape[:-1])}, one for each query and head; "
                f"got {lse.dtype} {list(lse.shape)}."
            )
    return _merge(out_a, lse_a, out_b, lse_b)


@one_program()
def _merge(out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    out, lse = merge_parts.merge([out.astype(jnp.float32) for out in (out_a, out_b)], (lse_a, lse_b), None)
    return out.astype(out_a.dtype), lse
