"""Checks the arguments of the attention function once and makes a `Call`: arrays first, then options."""

from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxpaged._attention.tree import BITS
from jaxpaged._cache.kv_cache import CACHE_DTYPES, checked_value_dim
from jaxpaged._debug import check_attention
from jaxpaged._integers import as_int32, saturated
from pallas_kernels.common.interface import AttentionOptions, Call

QUERY_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
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


class CallKeywords(Options, total=False):
    """The options that become part of a `Call`."""

    query_starts: ArrayLike | None
    tree_mask: ArrayLike | None
    value_dim: int | None


def check_call(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike | None,
    block_tables: ArrayLike,
    lengths: ArrayLike,
    *,
    query_starts: ArrayLike | None = None,
    tree_mask: ArrayLike | None = None,
    value_dim: int | None = None,
    **options: Unpack[Options],
) -> Call:
    """Returns the arguments as a `Call`. Raises `ValueError` if no implementation can compute them."""
    q, k_cache, v_cache, block_tables, lengths = _as_arrays(q, k_cache, v_cache, block_tables, lengths)
    if query_starts is not None:
        query_starts = _check_starts(query_starts, q, lengths)
    elif q.ndim not in (3, 4):
        raise ValueError(f"q must be [seqs, heads, head_dim] or [seqs, q_len, heads, head_dim]; got {q.shape=}.")
    seqs = q.shape[0] if query_starts is None else lengths.shape[0]
    tree_mask = None if tree_mask is None else _check_tree_mask(tree_mask, q)
    if (v_cache is None) != (value_dim is not None):
        raise ValueError(
            "v_cache=None and value_dim go together, for a latent cache; "
            f"got v_cache{'=None' if v_cache is None else f'.shape={v_cache.shape}'}, {value_dim=}."
        )
    capacity = _check_shapes(q, k_cache, v_cache, block_tables, lengths, seqs=seqs)
    if v_cache is None:
        value_dim = checked_value_dim(k_cache.shape[-1], value_dim, is_latent=True)
    else:
        value_dim = v_cache.shape[-1]
    call = Call(
        q=q if q.ndim == 4 or query_starts is not None else q[:, None],
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=block_tables,
        lengths=jnp.clip(lengths, 0, capacity),
        options=check_options(k_cache, q.shape[-2], capacity, is_latent=v_cache is None, **options),
        value_dim=value_dim,
        query_starts=query_starts,
        tree_mask=tree_mask,
    )
    check_attention(call, lengths)
    return call


def _check_starts(query_starts: ArrayLike, q: jax.Array, lengths: jax.Array) -> jax.Array:
    query_starts = as_int32(query_starts)
    if q.ndim != 3:
        raise ValueError(f"with query_starts q must be [tokens, heads, head_dim]; got {q.shape=}.")
    seqs = lengths.shape[0] if lengths.ndim == 1 else 0
    if query_starts.dtype != jnp.int32 or query_starts.shape != (seqs + 1,) or seqs == 0:
        raise ValueError(
            "query_starts must be int32 [seqs + 1] for lengths [seqs], with at least one sequence; "
            f"got {query_starts.dtype} {list(query_starts.shape)}, {lengths.shape=}."
        )
    return query_starts


def _check_tree_mask(value: ArrayLike, q: jax.Array) -> jax.Array:
    mask = jnp.asarray(value)
    if mask.dtype != jnp.uint32 or q.ndim != 4 or mask.shape[:-1] != q.shape[:2] or mask.shape[-1] * BITS < q.shape[1]:
        raise ValueError(
            "tree_mask must be uint32 [seqs, q_len, words] for q [seqs, q_len, heads, head_dim], without query_starts, "
            f"with a bit for each of the q_len tokens; got {mask.dtype} {list(mask.shape)}, {q.shape=}. "
            "jaxpaged.tree_mask(parents) makes it."
        )
    return mask


def _as_arrays(
    q: ArrayLike, k_cache: ArrayLike, v_cache: ArrayLike | None, block_tables: ArrayLike, lengths: ArrayLike
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array]:
    """Converts the arguments to arrays and checks their dtypes."""
    q, k_cache, v_cache = jnp.asarray(q), jnp.asarray(k_cache), None if v_cache is None else jnp.asarray(v_cache)
    block_tables, lengths = as_int32(block_tables), as_int32(lengths)
    if q.dtype not in QUERY_DTYPES:
        raise ValueError(f"q must be {_names(QUERY_DTYPES)}; got {q.dtype=!s}. Cast it before the call.")
    if k_cache.dtype not in CACHE_DTYPES:
        raise ValueError(f"k_cache must be one of {_names(CACHE_DTYPES)}; got {k_cache.dtype=!s}.")
    if v_cache is not None and k_cache.dtype != v_cache.dtype:
        raise ValueError(f"k_cache and v_cache must have one dtype; got {k_cache.dtype=!s}, {v_cache.dtype=!s}.")
    for name, array in (("block_tables", block_tables), ("lengths", lengths)):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32; got {name}.dtype={array.dtype}. Cast with .astype(jnp.int32).")
    return q, k_cache, v_cache, block_tables, lengths


def _check_shapes(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array | None,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    seqs: int,
) -> int:
    """Checks that the shapes match. Returns the number of tokens that a table row can hold."""
    if k_cache.ndim != 4:
        raise ValueError(
            f"k_cache must be [blocks, block_size, kv_heads, head_dim]; got {k_cache.shape=}. "
            "For a layer of a stack use AttentionStep.attend with jaxpaged.CacheLayer(stack, layer)."
        )
    if v_cache is not None and (k_cache.shape[:-1] != v_cache.shape[:-1] or 0 in v_cache.shape):
        raise ValueError(
            f"k_cache and v_cache must be alike but for their last axis; got {k_cache.shape=}, {v_cache.shape=}."
        )
    if 0 in k_cache.shape or 0 in q.shape:
        raise ValueError(f"no axis may be empty; got {q.shape=}, {k_cache.shape=}.")
    heads, head_dim = q.shape[-2:]
    kv_heads = k_cache.shape[2]
    if head_dim != k_cache.shape[3]:
        raise ValueError(f"q and k_cache must have one head_dim; got {q.shape=}, {k_cache.shape=}.")
    if heads % kv_heads:
        raise ValueError(
            f"heads must be a multiple of kv_heads; got {heads=}, {kv_heads=}. "
            "Is the cache [blocks, block_size, kv_heads, head_dim], with kv_heads third?"
        )
    if block_tables.ndim != 2 or block_tables.shape[0] != seqs or block_tables.shape[1] == 0:
        raise ValueError(
            f"block_tables must be [seqs, max_blocks] with seqs={seqs}; got {block_tables.shape=}. "
            "With packed q, [tokens, heads, head_dim], pass query_starts."
        )
    if lengths.shape != (seqs,):
        raise ValueError(f"lengths must be [seqs] with seqs={seqs}; got {lengths.shape=}.")
    capacity = block_tables.shape[1] * k_cache.shape[1]
    if capacity >= 2**31:
        block_size = k_cache.shape[1]
        raise ValueError(f"a table row holds less than 2^31 tokens; got {block_tables.shape=}, {block_size=}.")
    return capacity


def _names(dtypes: tuple) -> str:
    return ", ".join(jnp.dtype(dtype).name for dtype in dtypes)


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
