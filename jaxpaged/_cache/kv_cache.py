"""The paged KV cache: an immutable pytree, and its creation."""

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

# The largest number of each 8-bit dtype. Writes clip to it, because a larger number would become NaN (float8_e4m3fn),
# infinity (float8_e5m2) or undefined (int8). int8 does not use -128, so that one scale serves both signs.
LARGEST = {jnp.dtype(jnp.float8_e4m3fn): 448.0, jnp.dtype(jnp.float8_e5m2): 57344.0, jnp.dtype(jnp.int8): 127.0}


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The pool of blocks that holds keys and values, for one layer or for a stack of layers. Immutable.

    Block 0 is the null block: it pads every block table and holds no sequence's tokens.

    The fastest form is one cache per layer, with unrolled layers. To scan over layers, create a stack (`num_layers`)
    and pass `CacheLayer(stack, i)` as the cache of layer i. Slicing a layer out of a stack copies it.

    Attributes:
        k: keys `[blocks, block_size, kv_heads, head_dim]`, with a leading layer axis in a stack.
        v: values `[blocks, block_size, kv_heads, value_dim]`, with a leading layer axis in a stack. None in a latent
            cache, whose values are the first `value_dim` numbers of its keys.
        k_scale: f32 factors of the stored keys in a quantised cache: `[]` (one for the tensor), `[kv_heads]`, or
            `[blocks, block_size, kv_heads]` (one per token and head). In a stack `[layers, 1]`, `[layers, kv_heads]`,
            or `[layers, blocks, block_size, kv_heads]`. None: not quantised.
        v_scale: f32 factors of the stored values, in the shape of k_scale. None in a latent cache.
        value_dim: in a latent cache, the width of a value vector. None in other caches.
    """

    k: jax.Array
    v: jax.Array | Any  # None in a latent cache. Any, so that code for other caches need not check
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
        """Creates an empty cache, filled with zeros.

        Args:
            num_blocks: blocks in the pool (of each layer), including the null block.
            block_size: tokens per block.
            num_kv_heads: number of KV heads.
            head_dim: numbers per head of a key, and of a value unless `value_dim` differs.
            value_dim: numbers per head of a value. None: `head_dim`. A latent cache needs it.
            is_latent: whether the values are the first `value_dim` numbers of the keys instead of a separate array. In
                multi-head latent attention a key is the latent vector and the rotary key:
                `num_kv_heads=1, head_dim=576, value_dim=512`.
            dtype: bfloat16, float16 or float32; or float8_e4m3fn, float8_e5m2 or int8, to which `write_kv` quantises.
                The GPU kernels need queries in the cache's dtype or an 8-bit cache, and do not support float32.
            num_layers: number of layers in a stack. None: the cache of one layer.
            scale_per: granularity of the scales in a quantised cache. "token_head" (default): one scale per token and
                KV head, 4 bytes each, which `write_kv` computes and stores. "head" or "tensor": one scale per KV head,
                or one for all; the caller calibrates them with `jaxpaged.ops.kv_scale`, and `write_kv` clips larger
                numbers.
            k_scale: scales of the keys, only with "tensor", f32 `[]` or `[layers]`, or "head", f32 `[kv_heads]` or
                `[layers, kv_heads]`. None: 1 for a float8 cache; an int8 cache needs it.
            v_scale: scales of the values, as k_scale. Leave it out for a latent cache.

        Returns:
            The cache.

        Raises:
            ValueError: a size is not an int or below 1; a latent cache lacks `value_dim`, has values wider than its
                keys, or a `v_scale`; the dtype is not supported; the scales do not match the dtype, `scale_per` or
                shape, or are missing for int8.
            MemoryError: the GPU does not have enough free memory.

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
            raise ValueError("the values of a latent cache share the scale of its keys: leave v_scale out.")
        return cls(
            k=jnp.zeros(shape, dtype),
            v=None if is_latent else jnp.zeros((*shape[:-1], value_dim), dtype),
            k_scale=_create_scale("k_scale", k_scale, granularity, dtype, layers, shape),
            v_scale=None if is_latent else _create_scale("v_scale", v_scale, granularity, dtype, layers, shape),
            value_dim=value_dim if is_latent else None,
        )


def checked_value_dim(head_dim: int, value_dim: int | None, *, is_latent: bool) -> int:
    """Checks and returns `value_dim`, the width of a value vector, `head_dim` by default.

    Raises:
        ValueError: it is not a size; a latent cache lacks it, or has values wider than its keys.
    """
    if is_latent and value_dim is None:
        raise ValueError(
            "a latent cache needs value_dim, the number of leading numbers of a key that are the value; got "
            f"value_dim=None with {head_dim=}. Pass value_dim=head_dim minus the rotary numbers."
        )
    value_dim = head_dim if value_dim is None else checked_size("value_dim", value_dim)
    if is_latent and value_dim > head_dim:
        raise ValueError(f"value_dim of a latent cache must be at most head_dim; got {value_dim=}, {head_dim=}.")
    return value_dim


def checked_granularity(dtype: DTypeLike, scale_per: str | None) -> Granularity | None:
    """Granularity of the scales in a cache of this dtype; None if the dtype is not quantised.

    Raises:
        ValueError: the dtype or granularity is not supported, or they do not match.
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
                f'{name} needs scale_per="tensor" or "head"; with "token_head" write_kv computes the scales.'
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
    """Raises `ValueError` if the argument is not a cache, or if its arrays are inconsistent with one another."""
    if not isinstance(cache, KVCache):
        raise ValueError(
            f"a cache must be a KVCache, and in a CacheLayer a stack of num_layers; got a {type(cache).__name__}. "
            "Index a tuple, which has one cache per layer, or create the Engine with a stack."
        )
    k, v = cache.k, cache.v
    if v is None:
        if k.ndim not in (4, 5) or k.dtype not in CACHE_DTYPES or not 0 < (cache.value_dim or 0) <= k.shape[-1]:
            raise ValueError(
                "k of a latent cache must be [blocks, block_size, kv_heads, width], or that with a leading layer axis, "
                f"and value_dim at most the width; got {k.shape=}, {k.dtype=!s}, {cache.value_dim=}."
            )
        if cache.v_scale is not None:
            raise ValueError("the values of a latent cache share the scale of its keys: leave v_scale out.")
    elif k.ndim not in (4, 5) or k.shape[:-1] != v.shape[:-1] or k.dtype != v.dtype or k.dtype not in CACHE_DTYPES:
        raise ValueError(
            "k and v of a cache must be [blocks, block_size, kv_heads, head_dim], or that with a leading layer axis, "
            f"of one dtype, and differ only in the last axis; got {k.shape=}, {v.shape=}, {k.dtype=!s}, {v.dtype=!s}."
        )
    layers, kv_heads = k.shape[:-4], k.shape[-2]
    scale_shapes = k.shape[:-1], (*layers, kv_heads), (*layers, 1) if layers else ()
    scales = dict(k_scale=cache.k_scale) if v is None else dict(k_scale=cache.k_scale, v_scale=cache.v_scale)
    for name, scale in scales.items():
        if (scale is None) != (k.dtype not in LARGEST):
            raise ValueError(
                f"a cache must have scales if it is quantised, and only then; got {k.dtype=!s} and {name} "
                f"{'missing' if scale is None else list(scale.shape)}. Create it with KVCache.create(scale_per=...)."
            )
        if scale is not None and scale.shape not in scale_shapes:
            raise ValueError(
                f"{name} must be [], [kv_heads] or [blocks, block_size, kv_heads], in a stack [layers, 1], "
                f"[layers, kv_heads] or [layers, blocks, block_size, kv_heads]; "
                f"got {list(scale.shape)} with {k.shape=}."
            )


def named_caches(caches: Any) -> list[tuple[str, KVCache]]:
    """The caches of a pytree with their names."""
    found = jax.tree.leaves_with_path(caches, is_leaf=lambda x: isinstance(x, KVCache))
    return [(f"caches{jax.tree_util.keystr(path)}", cache) for path, cache in found]


def caches_in(caches: Any) -> list[KVCache]:
    return [cache for _, cache in named_caches(caches)]


def map_blocks(function: Callable[..., jax.Array], cache: KVCache, *others: KVCache) -> KVCache:
    """Applies `function` to every array with a block axis. Scales per tensor or head stay as they are in `cache`."""

    def map_one(array: jax.Array | None, *other_arrays: jax.Array | None) -> jax.Array | None:
        return array if array is None or array.ndim < cache.k.ndim - 1 else function(array, *other_arrays)

    names = ("k", "v", "k_scale", "v_scale")
    arrays: dict[str, Any] = {name: map_one(*(getattr(each, name) for each in (cache, *others))) for name in names}
    return dataclasses.replace(cache, **arrays)
