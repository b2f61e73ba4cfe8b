"""The paged key/value cache: an immutable pytree, and its creation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxpaged._dtypes import checked_dtype
from jaxpaged._integers import checked_size
from jaxpaged._memory import check_memory
from jaxpaged._public_state import public_state

CACHE_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)
Granularity = Literal["tensor", "head", "token_head"]

# The largest number of each 8-bit dtype. A larger one would become NaN (float8_e4m3fn), infinity (float8_e5m2), or
# anything at all (int8), so that writing clips to it. int8 leaves -128 out: its scale then serves both signs.
LARGEST = {jnp.dtype(jnp.float8_e4m3fn): 448.0, jnp.dtype(jnp.float8_e5m2): 57344.0, jnp.dtype(jnp.int8): 127.0}


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of one layer's pool of blocks, or of all layers, stacked.

    Attributes:
        k: `[blocks, block_size, kv_heads, head_dim]`, or with a leading layer axis.
        v: `[blocks, block_size, kv_heads, value_dim]`, value_dim often head_dim. None: a latent cache, whose values are
            the first numbers of its keys.
        k_scale: None, or for a quantised cache the factor of the stored keys, f32: `[]` (one for the tensor),
            `[kv_heads]`, or `[blocks, block_size, kv_heads]` (one for each token and head). In a stack the first two
            are `[layers, 1]` and `[layers, kv_heads]`; the last has a leading layer axis as k has.
        v_scale: as k_scale; None in a latent cache.
        value_dim: in a latent cache, how many of the first numbers of each key are the value. None: v has its own.

    Block 0 is the null block: it pads every block table and holds no sequence's tokens.

    Hold one cache per layer and unroll the layers if speed matters. To scan over layers, stack them (`num_layers`)
    and pass `CacheLayer(stack, i)` for the cache of layer i. Slicing a layer out of a stack copies it.
    """

    k: jax.Array
    v: jax.Array | Any  # None if latent; users of other caches need not ask
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    value_dim: int | None = dataclasses.field(default=None, metadata=dict(static=True))

    @classmethod
    def create(
        cls,
        *,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        is_latent: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        num_layers: int | None = None,
        scale_per: Granularity | None = None,
        k_scale: ArrayLike | None = None,
        v_scale: ArrayLike | None = None,
    ) -> KVCache:
        """An empty cache of `num_blocks` blocks, the null block included.

        Args:
            num_blocks: blocks in the pool (of each layer).
            block_size: tokens in a block.
            num_kv_heads: KV heads.
            head_dim: numbers a head; of keys, if values have other sizes.
            value_dim: numbers of a value; None: the same number as in a key. A latent cache needs it.
            is_latent: whether values are the first `value_dim` numbers of the keys, and not kept apart: the latent
                vector and the rotary key of multi-head latent attention, `num_kv_heads=1, head_dim=576, value_dim=512`.
            dtype: bfloat16, float16 or float32; or float8_e4m3fn, float8_e5m2, int8, to which `write_kv` quantises. The
                kernels for GPUs accept queries in the cache's dtype or an 8-bit cache, and no float32.
            num_layers: None for one layer's cache; a number for a stack of that many.
            scale_per: what has its own scale in a quantised cache. "token_head", the default there: each token and KV
                head; `write_kv` computes the scale and stores it, 4 bytes. "head" or "tensor": each KV head, or all
                heads together; the caller calibrates these scales (`jaxpaged.ops.kv_scale`), and larger numbers are
                clipped.
            k_scale: with "tensor" f32 `[]`, or `[layers]`; with "head" f32 `[kv_heads]`, or `[layers, kv_heads]`.
                Left out for a float8 cache, it is 1.
            v_scale: as k_scale. A latent cache has none.

        Raises:
            ValueError: a size that is no int or below 1, a latent cache without `value_dim` or whose values are wider
                than its keys or have scales of their own, another dtype, scales that do not fit it, or none for int8.
            MemoryError: the GPU has no room for the cache.

        Example:
            >>> import jaxpaged
            >>> jaxpaged.KVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=64).k.shape
            (8, 16, 2, 64)
            >>> cache = jaxpaged.KVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=64, dtype="int8")
            >>> cache.k.dtype, cache.k_scale.shape
            (dtype('int8'), (8, 16, 2))
            >>> jaxpaged.KVCache.create(
            ...     num_blocks=8, block_size=16, num_kv_heads=1, head_dim=576, value_dim=512, is_latent=True
            ... )
            KVCache(k=bfloat16[8,16,1,576], v=None, k_scale=None, v_scale=None, value_dim=512)
        """
        sizes = dict(num_blocks=num_blocks, block_size=block_size, num_kv_heads=num_kv_heads, head_dim=head_dim)
        shape = tuple(checked_size(name, size) for name, size in sizes.items())
        value_dim = checked_value_dim(shape[-1], value_dim, is_latent=is_latent)
        granularity = checked_granularity(dtype, scale_per)
        layers = () if num_layers is None else (checked_size("num_layers", num_layers),)
        shape = layers + shape
        dtype = jnp.dtype(dtype)
        num_bytes = math.prod(shape[:-1]) * (head_dim + (0 if is_latent else value_dim)) * dtype.itemsize
        check_memory(num_bytes, f"a cache of {num_blocks} blocks needs {num_bytes / 1e9:.1f} GB")
        if is_latent and v_scale is not None:
            raise ValueError("the values of a latent cache have the scale of its keys: leave v_scale out.")
        return cls(
            k=jnp.zeros(shape, dtype),
            v=None if is_latent else jnp.zeros((*shape[:-1], value_dim), dtype),
            k_scale=_create_scale("k_scale", k_scale, granularity, dtype, layers, shape),
            v_scale=None if is_latent else _create_scale("v_scale", v_scale, granularity, dtype, layers, shape),
            value_dim=value_dim if is_latent else None,
        )


def checked_value_dim(head_dim: int, value_dim: int | None, *, is_latent: bool) -> int:
    """Numbers of a value. Raises `ValueError` if it is no size, or a latent cache has none or more than a key."""
    if is_latent and value_dim is None:
        raise ValueError(
            "a latent cache needs value_dim, how many of the first numbers of a key are the value; got value_dim=None "
            f"with {head_dim=}. Pass value_dim=head_dim - rotary numbers."
        )
    value_dim = head_dim if value_dim is None else checked_size("value_dim", value_dim)
    if is_latent and value_dim > head_dim:
        raise ValueError(f"the values of a latent cache are numbers of its keys; got {value_dim=}, {head_dim=}.")
    return value_dim


def checked_granularity(dtype: DTypeLike, scale_per: str | None) -> Granularity | None:
    """The granularity of scales in a cache of this dtype; None if it is not quantised.

    Raises:
        ValueError: no dtype of a cache, no granularity, or one that does not go with the dtype.
    """
    dtype = checked_dtype("dtype", dtype, CACHE_DTYPES)
    if scale_per not in (None, *get_args(Granularity)):
        raise ValueError(f'scale_per must be "tensor", "head", "token_head" or None; got {scale_per=}.')
    if dtype in LARGEST:
        return cast(Granularity, scale_per or "token_head")
    if scale_per is not None:
        raise ValueError(f"a {dtype} cache is not quantised: leave scale_per out; got {scale_per=}.")
    return None


def _create_scale(
    name: str,
    value: ArrayLike | None,
    scale_per: Granularity | None,
    dtype: jnp.dtype,
    layers: tuple[int, ...],
    shape: tuple[int, ...],
) -> jax.Array | None:
    if scale_per is None:
        if value is not None:
            raise ValueError(f"a {dtype} cache is not quantised: leave {name} out.")
        return None
    if scale_per == "token_head":
        if value is not None:
            raise ValueError(
                f'{name} goes with scale_per="tensor" or "head": write_kv finds the scales of each token itself.'
            )
        return jnp.zeros(shape[:-1], jnp.float32)
    if value is None and dtype == jnp.int8:
        raise ValueError(
            f"an int8 cache with {scale_per=} needs {name}, from jaxpaged.ops.kv_scale; "
            'or use scale_per="token_head", which needs none.'
        )
    heads = () if scale_per == "tensor" else (shape[-2],)
    array = jnp.ones((), jnp.float32) if value is None else jnp.asarray(value)
    if array.ndim and array.shape not in (heads, (*layers, *heads)):
        raise ValueError(f"{name} with {scale_per=} must be {[*layers, *heads]}; got {list(array.shape)}.")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} must be float32; got {array.dtype}.")
    stored = (*layers, *heads)
    if layers and not heads:
        array, stored = array.reshape(-1, 1), (*layers, 1)
    return jnp.broadcast_to(array, stored).astype(jnp.float32)


def check_cache(cache: KVCache) -> None:
    """Raises `ValueError` if it is no cache, or its arrays do not fit together."""
    if not isinstance(cache, KVCache):
        raise ValueError(
            f"a cache must be a KVCache, and in a CacheLayer a stack of num_layers; got a {type(cache).__name__}. "
            "A tuple has one cache for each layer: index it, or make an Engine with a stack."
        )
    k, v = cache.k, cache.v
    if v is None:
        if k.ndim not in (4, 5) or k.dtype not in CACHE_DTYPES or not 0 < (cache.value_dim or 0) <= k.shape[-1]:
            raise ValueError(
                "k of a latent cache must be [blocks, block_size, kv_heads, width], or that with a leading layer axis, "
                f"and value_dim at most the width; got {k.shape=}, {k.dtype=!s}, {cache.value_dim=}."
            )
        if cache.v_scale is not None:
            raise ValueError("the values of a latent cache have the scale of its keys: leave v_scale out.")
    elif k.ndim not in (4, 5) or k.shape[:-1] != v.shape[:-1] or k.dtype != v.dtype or k.dtype not in CACHE_DTYPES:
        raise ValueError(
            "k and v of a cache must be [blocks, block_size, kv_heads, head_dim], or that with a leading layer axis, "
            f"of one dtype, and alike but for their last axis; got {k.shape=}, {v.shape=}, {k.dtype=!s}, {v.dtype=!s}."
        )
    layers, kv_heads = k.shape[:-4], k.shape[-2]
    scale_shapes = k.shape[:-1], (*layers, kv_heads), (*layers, 1) if layers else ()
    scales = dict(k_scale=cache.k_scale) if v is None else dict(k_scale=cache.k_scale, v_scale=cache.v_scale)
    for name, scale in scales.items():
        if (scale is None) != (k.dtype not in LARGEST):
            raise ValueError(
                f"a quantised cache has scales and no other has them; got {k.dtype=!s} and {name} "
                f"{'missing' if scale is None else list(scale.shape)}. Create it with KVCache.create(scale_per=...)."
            )
        if scale is not None and scale.shape not in scale_shapes:
            raise ValueError(
                f"{name} must be [], [kv_heads] or [blocks, block_size, kv_heads], in a stack [layers, 1], "
                f"[layers, kv_heads] or [layers, blocks, block_size, kv_heads]; "
                f"got {list(scale.shape)} with {k.shape=}."
            )


def map_blocks(function: Callable[..., jax.Array], cache: KVCache, *others: KVCache) -> KVCache:
    """`function` of every array that has a block axis; scales of a tensor or a head stay as they are in `cache`."""

    def map_one(array: jax.Array | None, *other_arrays: jax.Array | None) -> jax.Array | None:
        return array if array is None or array.ndim < cache.k.ndim - 1 else function(array, *other_arrays)

    names = ("k", "v", "k_scale", "v_scale")
    arrays: dict[str, Any] = {name: map_one(*(getattr(each, name) for each in (cache, *others))) for name in names}
    return dataclasses.replace(cache, **arrays)
