"""A view of one layer in a stack of caches, without a copy."""

from __future__ import annotations

import dataclasses
import math
from typing import final

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._cache.kv_cache import KVCache, map_blocks
from jaxpaged._integers import as_int32
from jaxpaged._public_state import public_state


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
@final
class CacheLayer:
    """Layer `index` of a stack of caches, for a scan over layers.

    `write_kv`, `rotate_and_write_kv`, `attend` and the Flax modules accept it instead of a `KVCache`, and return it
    with the new stack. It is a view: nothing is copied, while slicing the stack would copy the layer.

    Attributes:
        stack: a `KVCache` of `[layers, blocks, block_size, kv_heads, head_dim]`, created with `num_layers`.
        index: int32 `[]`, index of the layer; may be traced.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpaged
        >>> stack = jaxpaged.KVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=64, num_layers=3)
        >>> allocator = jaxpaged.BlockAllocator.create(num_blocks=8, block_size=16, num_seqs=1, max_blocks_per_seq=4)
        >>> allocator, slots, ok = allocator.append(jnp.array([1]))
        >>> step, k = jaxpaged.AttentionStep.create(allocator, slots), jnp.ones((1, 2, 64))
        >>> def layer(carry, index):
        ...     stack, q = carry
        ...     cache, out = step.attend(q, k, k, jaxpaged.CacheLayer(stack, index))
        ...     return (cache.stack, out), None
        >>> (stack, out), _ = jax.lax.scan(layer, (stack, jnp.ones((1, 4, 64))), jnp.arange(3))
        >>> out.shape
        (1, 4, 64)
    """

    stack: KVCache
    index: ArrayLike

    @property
    def pool(self) -> KVCache:
        """The stack as one pool `[layers * blocks, ...]` with this layer's scales, for `paged_attention`.

        Block b of layer i is block `i * blocks + b` of the pool.

        Raises:
            ValueError: `stack` has no layer axis, or 2^31 slots or more.
        """
        k = self.stack.k
        if k.ndim != 5:
            raise ValueError(f"CacheLayer needs a stack [layers, blocks, ...]; got {k.shape=}.")
        if math.prod(k.shape[:3]) >= 2**31:
            raise ValueError(f"slots are int32: a stack holds less than 2^31 of them; got {k.shape=}.")

        def layer_scale(scale: jax.Array | None) -> jax.Array | None:
            if scale is None or scale.ndim != 2:
                return scale
            row = jax.lax.dynamic_index_in_dim(scale, jnp.asarray(self.index, jnp.int32), keepdims=False)
            return row.reshape(()) if row.shape == (1,) and k.shape[-2] != 1 else row

        pool = map_blocks(lambda pool: pool.reshape(math.prod(pool.shape[:2]), *pool.shape[2:]), self.stack)
        return dataclasses.replace(pool, k_scale=layer_scale(pool.k_scale), v_scale=layer_scale(pool.v_scale))

    def with_pool(self, pool: KVCache) -> CacheLayer:
        """The same layer after `pool` has changed: the inverse of the property `pool`. Scales per tensor or head do not
        change."""
        unfolded = map_blocks(lambda old, new: new.reshape(old.shape), self.stack, pool)
        return CacheLayer(unfolded, self.index)

    def block_tables(self, block_tables: ArrayLike) -> jax.Array:
        """The allocator's block tables, int32 `[seqs, max_blocks]`, shifted to this layer's blocks in `pool`."""
        return as_int32(block_tables) + jnp.asarray(self.index, jnp.int32) * jnp.int32(self.stack.k.shape[1])

    def slots(self, slots: ArrayLike) -> jax.Array:
        """The allocator's slots, int32 `[...]`, shifted to this layer's slots in `pool`. Padding becomes -1."""
        slots, num_slots = as_int32(slots), jnp.int32(math.prod(self.stack.k.shape[1:3]))
        shifted = slots + jnp.asarray(self.index, jnp.int32) * num_slots
        return jnp.where((slots >= 0) & (slots < num_slots), shifted, -1)


def pools_of(cache: KVCache | CacheLayer) -> KVCache:
    """The cache itself, or the stack of a `CacheLayer`."""
    return cache.stack if isinstance(cache, CacheLayer) else cache
