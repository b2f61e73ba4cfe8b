"""Checks the options of attention and converts them to arrays."""

from typing import TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxpaged._integers import saturated
from pallas_kernels.common.interface import AttentionOptions

# Larger caps are lowered to this one, with which cap * tanh(x / cap) is x. (x / cap underflows only for logits below
# 1e30 * 2^-126, or 1e-8.) With an infinite cap the result would be NaN.
MOST_CAP = 1e30


class Options(TypedDict, total=False):
    """The options of `paged_attention` that change its result, as a caller passes them."""

    scale: ArrayLike | None
    sliding_window: ArrayLike | None
    logits_soft_cap: ArrayLike | None
    alibi_slopes: ArrayLike | None
    sinks: ArrayLike | None
    k_scale: ArrayLike | None
    v_scale: ArrayLike | None


def check_options(
    k_cache: jax.Array,
    heads: int,
    capacity: int,
    *,
    is_latent: bool = False,
    scale: ArrayLike | None = None,
    sliding_window: ArrayLike | None = None,
    logits_soft_cap: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
) -> AttentionOptions:
    if is_latent:
        if scale is None:
            raise ValueError(
                "a latent cache needs scale, from the width of the queries before absorption: "
                "(numbers without a position + rotary numbers) ** -0.5; got scale=None."
            )
        if v_scale is not None:
            raise ValueError("the values of a latent cache have the scale of its keys: leave v_scale out.")
        v_scale = k_scale
    if k_cache.dtype == jnp.int8 and (k_scale is None or v_scale is None):
        missing = "k_scale" if k_scale is None else "v_scale"
        raise ValueError(f"an int8 cache needs k_scale and v_scale; got {missing}=None. Pass cache.{missing}.")
    cap = optional("logits_soft_cap", logits_soft_cap, (), positive=True)
    window = optional("sliding_window", sliding_window, (), jnp.int32, positive=True)
    return AttentionOptions(
        scale=jnp.asarray(k_cache.shape[3] ** -0.5 if scale is None else optional("scale", scale, ()), jnp.float32),
        # 2^31 - 1 means no window, in a scan over layers. Clipped, so that no position minus a window overflows.
        sliding_window=None if window is None else jnp.clip(window, 1, capacity),
        logits_soft_cap=None if cap is None else jnp.minimum(cap, MOST_CAP),
        alibi_slopes=optional("alibi_slopes", alibi_slopes, (heads,)),
        sinks=optional("sinks", sinks, (heads,)),
        k_scale=_cache_scale("k_scale", k_scale, k_cache.shape[:3]),
        v_scale=_cache_scale("v_scale", v_scale, k_cache.shape[:3]),
    )


def optional(
    name: str,
    value: ArrayLike | None,
    shape: tuple[int, ...],
    dtype: DTypeLike = jnp.float32,
    *,
    positive: bool = False,
) -> jax.Array | None:
    """An option as an array of `dtype`. Checks its shape and kind, and its sign if the value is known."""
    if value is None:
        return None
    # Under jit a plain number is still known: NumPy reads it before JAX makes a tracer of it.
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}; got {list(array.shape)}.")
    kinds = [jnp.integer] if dtype == jnp.int32 else [jnp.integer, jnp.floating]
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise ValueError(f"{name} must be {jnp.dtype(dtype).name}; got {array.dtype}.")
    if positive and isinstance(array, np.ndarray) and not (array > 0).all():
        raise ValueError(f"{name} must be positive; got {name}={value}. Pass None to leave it out.")
    if dtype == jnp.int32:
        array = saturated(array)  # a larger window also means no window
    return jnp.asarray(array, dtype)


def known_int(value: ArrayLike | None) -> int | None:
    """The value of a Python or NumPy number; None for a JAX array, whose value may only be known at run time."""
    return None if value is None or isinstance(value, jax.Array) else int(np.asarray(value))


def check_partitions(num_partitions: int | None) -> int | None:
    """The number as a Python int. Raises `ValueError` for a number that no call can have."""
    if num_partitions is None:
        return None
    if (
        not isinstance(num_partitions, int | np.integer)
        or isinstance(num_partitions, bool)
        or not 1 <= num_partitions < 2**31
    ):
        raise ValueError(
            "num_partitions must be an int of at least 1, below 2^31 and static under jit; "
            f"got {num_partitions=}. None lets jaxpaged choose."
        )
    return int(num_partitions)


def _cache_scale(name: str, value: ArrayLike | None, cache_shape: tuple[int, ...]) -> jax.Array | None:
    """A scale of the cache in one of three shapes: `[]`, `[kv_heads]` or `[blocks, block_size, kv_heads]`.

    Leading axes of size 1 are dropped. A single number is a scale per tensor, whatever its number of axes.
    """
    if value is None:
        return None
    array = jnp.asarray(value)
    num_blocks, block_size, kv_heads = cache_shape
    wanted = (kv_heads,)
    if array.size == 1 and array.ndim <= 3:
        array = array.reshape(())
    elif array.shape in ((1, *wanted), (1, 1, *wanted)):
        array = array.reshape(wanted)
    if array.shape not in ((), wanted, cache_shape):
        hint = (
            " For one layer of a stack pass the scales of jaxpaged.CacheLayer(stack, layer).pool."
            if array.ndim in (2, 4)
            else ""
        )
        raise ValueError(
            f"{name} must have shape [] or [kv_heads]={[kv_heads]} or [blocks, block_size, kv_heads]="
            f"{[num_blocks, block_size, kv_heads]}; got {list(array.shape)}.{hint}"
        )
    is_array = isinstance(value, jax.Array | np.ndarray)
    if array.dtype != jnp.float32 and (is_array or jnp.iscomplexobj(array)):
        raise ValueError(f"{name} must be float32; got {array.dtype}. Cast with .astype(jnp.float32).")
    return array.astype(jnp.float32)
