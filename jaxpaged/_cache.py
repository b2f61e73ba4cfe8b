"""The paged key/value cache: an immutable pytree, and the functions that write and fold it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of one layer's pool of blocks, or of all layers, stacked.

    Attributes:
        k: `[blocks, block_size, kv_heads, head_dim]`, or with a leading layer axis.
        v: likewise.

    Block 0 is the null block: it pads every block table and holds no sequence's tokens.

    Hold one cache per layer and unroll the layers where speed matters. To scan over layers, stack (`num_layers`),
    and inside the scan treat the stack as one pool: `fold_layers`, `layer_block_tables`, `layer_slots`. Slicing a
    layer out of a stack copies it.
    """

    k: jax.Array
    v: jax.Array

    @classmethod
    def create(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: DTypeLike = jnp.float32,
        num_layers: int | None = None,
    ) -> "KVCache":
        """An empty cache of `num_blocks` blocks, the null block included.

        Args:
            num_blocks: blocks in the pool (of each layer).
            block_size: tokens in a block.
            num_kv_heads: KV heads.
            head_dim: numbers a head.
            dtype: float32, bfloat16 or float16.
            num_layers: None for one layer's cache; a number for a stack of that many.

        Raises:
            ValueError: a size below 1, or another dtype.

        Example:
            >>> import jaxpaged
            >>> jaxpaged.KVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=64).k.shape
            (8, 16, 2, 64)
        """
        sizes = dict(num_blocks=num_blocks, block_size=block_size, num_kv_heads=num_kv_heads, head_dim=head_dim)
        sizes |= {} if num_layers is None else dict(num_layers=num_layers)
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1; got {name}={size}.")
        if jnp.dtype(dtype) not in _DTYPES:
            raise ValueError(f"dtype must be float32, bfloat16 or float16; got dtype={jnp.dtype(dtype).name}.")
        layers = () if num_layers is None else (num_layers,)
        shape = (*layers, num_blocks, block_size, num_kv_heads, head_dim)
        return cls(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))


def write_kv(cache: KVCache, k: ArrayLike, v: ArrayLike, slots: ArrayLike) -> KVCache:
    """Writes new tokens into their slots; in place where the cache is donated.

    Args:
        cache: one layer's cache, or a folded stack.
        k: `[..., kv_heads, head_dim]`, cast to the cache's dtype.
        v: likewise.
        slots: int32 `[...]`, as `BlockAllocator.append` returns them. A slot outside the pool, below zero or past
            its end, is padding: its token is dropped. The other slots must differ from each other; where two are
            the same, which of the two tokens stays is not defined.

    Returns:
        The new cache.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Example:
        >>> import jax.numpy as jnp, jaxpaged
        >>> cache = jaxpaged.KVCache.create(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=8)
        >>> cache = jaxpaged.write_kv(cache, jnp.ones((3, 1, 8)), jnp.ones((3, 1, 8)), jnp.array([2, 3, 99]))
        >>> [int(x) for x in cache.k[:, :, 0, 0].ravel()]
        [0, 0, 1, 1, 0, 0, 0, 0]
    """
    k, v, slots = jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots)
    if cache.k.ndim != 4:
        raise ValueError(
            f"write_kv takes one layer's cache; got {cache.k.shape=}. "
            "Fold a stack with jaxpaged.fold_layers and shift the slots with jaxpaged.layer_slots."
        )
    if cache.k.dtype not in _DTYPES or cache.k.dtype != cache.v.dtype or cache.k.shape != cache.v.shape:
        raise ValueError(
            "write_kv writes to k and v of one shape and dtype, float32, bfloat16 or float16; "
            f"got {cache.k.dtype=!s}, {cache.v.dtype=!s}, {cache.k.shape=}, {cache.v.shape=}."
        )
    num_blocks, block_size, *token_shape = cache.k.shape
    if k.shape != v.shape or k.shape != (*slots.shape, *token_shape):
        raise ValueError(
            f"k and v must be [..., kv_heads, head_dim] with slots [...] and the cache's {token_shape}; "
            f"got {k.shape=}, {v.shape=}, {slots.shape=}."
        )
    if slots.dtype != jnp.int32:
        raise ValueError(f"slots must be int32; got {slots.dtype=!s}. Cast with .astype(jnp.int32).")
    num_slots = num_blocks * block_size
    slots = slots.ravel()
    # Padding goes to distinct places past the end, so that XLA may be told that no two writes meet: without that
    # promise it serialises the scatter on GPUs. (Below zero would wrap around to the end of the pool.)
    dropped = num_slots + jnp.arange(slots.size, dtype=jnp.int32)
    slots = jnp.where((slots >= 0) & (slots < num_slots), slots, dropped)

    def write(pool: jax.Array, tokens: jax.Array) -> jax.Array:
        flat = pool.reshape(num_slots, *token_shape)
        tokens = tokens.reshape(slots.size, *token_shape).astype(pool.dtype)
        return flat.at[slots].set(tokens, mode="drop", unique_indices=True).reshape(pool.shape)

    return KVCache(k=write(cache.k, k), v=write(cache.v, v))


def fold_layers(cache: KVCache) -> KVCache:
    """A stack `[layers, blocks, ...]` as one pool `[layers * blocks, ...]`: no copy.

    Layer i's block b is block `i * blocks + b` of the pool; `layer_block_tables` and `layer_slots` shift to it.

    Raises:
        ValueError: the cache is not stacked, or has 2^31 slots and more.
    """
    if cache.k.ndim != 5:
        raise ValueError(f"fold_layers takes a stack [layers, blocks, ...]; got {cache.k.shape=}.")
    if math.prod(cache.k.shape[:3]) >= 2**31:
        raise ValueError(f"slots are int32: a folded stack holds less than 2^31 of them; got {cache.k.shape=}.")
    return jax.tree.map(lambda pool: pool.reshape(math.prod(pool.shape[:2]), *pool.shape[2:]), cache)


def unfold_layers(cache: KVCache, num_layers: int) -> KVCache:
    """The inverse of `fold_layers`.

    Raises:
        ValueError: the pool does not divide into that many layers.
    """
    if cache.k.ndim != 4 or num_layers < 1 or cache.k.shape[0] % num_layers:
        raise ValueError(f"the pool must be [layers * blocks, ...]; got {cache.k.shape=}, {num_layers=}.")
    return jax.tree.map(lambda pool: pool.reshape(num_layers, -1, *pool.shape[1:]), cache)


def layer_block_tables(block_tables: jax.Array, layer: ArrayLike, num_blocks: int) -> jax.Array:
    """Block tables for `layer` (may be traced) of a folded stack with `num_blocks` blocks a layer."""
    return block_tables + jnp.asarray(layer, jnp.int32) * num_blocks


def layer_slots(slots: jax.Array, layer: ArrayLike, num_slots: int) -> jax.Array:
    """Slots for `layer` (may be traced) of a folded stack with `num_slots = num_blocks * block_size` slots a layer.

    Padding, a slot outside one layer, stays padding: it becomes -1.
    """
    shifted = slots + jnp.asarray(layer, jnp.int32) * num_slots
    return jnp.where((slots >= 0) & (slots < num_slots), shifted, -1)
