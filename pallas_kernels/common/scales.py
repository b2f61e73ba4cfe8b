"""Scales of an 8-bit cache: how they are fetched and where they are applied.

    x_t = scale s^K_t q . k_t,    out = sum_t p_t s^V_t v_t / sum_t p_t

A scale per tensor or per KV head multiplies the softmax scale (K) or the finished sums (V). A scale per token and KV
head, f32 [blocks, block_size, kv_heads], multiplies the token's logits (K) or its weights (V). Weights are rounded to
float16, so the running maximum is that of x_t + log2 |s^V_t|: every weight times its scale is at most 1 and the largest
is about 1, whatever the size of the scales. (It holds from 2^-100 to 2^100, because l, the sum of the weights without
their scales, is relative to the same maximum.)

The scales of one head's tokens are `kv_heads` numbers apart, which the copy engine cannot gather, and there are only
two for each 2 * head_dim bytes. Threads copy them asynchronously, four bytes each (cp.async), into rings of their own.
The programs of all heads of a sequence run at the same time, so the neighbouring scales, of the other heads, hit L2.

All functions are traced inside the kernels.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.rows import LOG2E, LOWEST, ROWS, Orientation

LEAST = 2.0**-100  # lower bound of a scale, so that a scale of 0 has a logarithm


def ring_types(scales: dict[str, Any | None], *, stages: int, tile: int) -> dict[str, Any]:
    """SMEM for per-token scales, by the names of the kernels' `Refs`. `scales` has the keys "k" and "v"."""
    of_tokens = [name for name, scale in scales.items() if scale is not None and len(scale.shape) == 3]
    return {f"{name}_scales_smem": plgpu.SMEM((stages, tile), jnp.float32) for name in of_tokens}


def rings(refs: Any) -> list[tuple[Any, Any]]:
    """The per-token scales of K and of V that the call has, each as a pair: GMEM f32 [blocks, block_size, kv_heads],
    and its ring, SMEM f32 [stages, tile]."""
    pairs = (refs.options.k_scale, refs.k_scales_smem), (refs.options.v_scale, refs.v_scales_smem)
    return [pair for pair in pairs if pair[1] is not None]


def load_of_tile(ring: Any | None, stage: jax.Array, orientation: Orientation) -> jax.Array | None:
    """The per-token scales of a tile, f32 [tile]; None without them."""
    if ring is None:
        return None
    return plgpu.load(ring.at[stage], layout=ROWS.reduce(orientation.axis), optimized=False)


def of_head(scales: Any | None, kv_head: jax.Array) -> jax.Array | None:
    """The scale of a KV head, f32 []; None without scales or with per-token scales."""
    if scales is None or len(scales.shape) == 3:
        return None
    return scales[kv_head if scales.shape[0] > 1 else 0]


def scaled(x: jax.Array, factor: jax.Array | None) -> jax.Array:
    """x times the factor, or x if there is no factor."""
    return x if factor is None else x * factor


def over_tokens(vector: jax.Array, shape: tuple[int, ...], orientation: Orientation) -> jax.Array:
    """Broadcasts [tile] over the rows of a matrix of `shape`."""
    return lax.broadcast_in_dim(vector, shape, [1 - orientation.axis])


def peaks(
    logits: jax.Array, v_scales: jax.Array, orientation: Orientation, visible: jax.Array | None = None
) -> jax.Array:
    """The numbers whose maximum updates the running maximum, f32 in the shape of the logits."""
    size = jnp.maximum(jnp.abs(v_scales), jnp.full(v_scales.shape, LEAST, jnp.float32))
    logits += over_tokens(jnp.log(size) * LOG2E, logits.shape, orientation)
    return logits if visible is None else jnp.where(visible, logits, jnp.full(logits.shape, LOWEST, jnp.float32))
