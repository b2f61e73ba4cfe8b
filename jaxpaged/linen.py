"""Paged attention as a Flax Linen module, and in the place of a model's own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import ArrayLike, DTypeLike

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._attention.public import Implementation
from jaxpaged._cache.kv_cache import KVCache
from jaxpaged._cache.layers import CacheLayer
from jaxpaged._modules import Rotary, check_call, check_settings, rotate_write_attend, sharding_of_sum
from pallas_kernels.partition_plan import PartitionPlan

__all__ = ["PagedAttention", "replace"]


class PagedAttention(linen.Module):
    """`jaxpaged.nnx.PagedAttention` for Linen: the same arguments, parameter names and results.

    The output is as wide as the input, so there is no `in_features`. `heads_axis` is a mesh axis, and makes the
    parameters those of `nn.with_partitioning`.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpaged, jaxpaged.linen
        >>> attention = jaxpaged.linen.PagedAttention(
        ...     num_heads=4, num_kv_heads=2, head_dim=8, rotary_frequencies=jaxpaged.rotary_frequencies(8)
        ... )
        >>> cache = jaxpaged.KVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=8)
        >>> allocator = jaxpaged.BlockAllocator.create(num_blocks=8, block_size=16, num_seqs=1, max_blocks_per_seq=4)
        >>> allocator, slots, ok = allocator.append(jnp.array([5]), q_len=5)
        >>> x = jnp.ones((1, 5, 32))
        >>> variables = attention.init(jax.random.key(0), x, cache, allocator, slots)
        >>> cache, out = attention.apply(variables, x, cache, allocator, slots)
        >>> out.shape
        (1, 5, 32)
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_frequencies: tuple[float, ...] | None
    rotary: Rotary | None = None
    interleaved: bool = False
    fused: bool = True
    heads_axis: str | None = None
    use_bias: bool = False
    use_output_bias: bool = False
    norm_epsilon: float | None = None
    use_sinks: bool = False
    use_gate: bool = False
    scale: float | None = None
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    num_partitions: int | None = None
    implementation: Implementation | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = "float32"

    @linen.compact
    def __call__[C: (KVCache, CacheLayer)](
        self,
        x: jax.Array,
        cache: C,
        allocator: BlockAllocator,
        slots: jax.Array,
        *,
        query_starts: ArrayLike | None = None,
        positions: ArrayLike | None = None,
        tree_mask: ArrayLike | None = None,
        shared_prefix: ArrayLike | None = None,
        plan: PartitionPlan | None = None,
    ) -> tuple[C, jax.Array]:
        """As `jaxpaged.nnx.PagedAttention.__call__`."""
        check_settings(self)
        check_call(self, x, cache, slots, query_starts)
        features, kv_features = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

        def sharded(initializer: Callable[..., Any], *axes: str | None) -> Callable[..., Any]:
            return initializer if self.heads_axis is None else linen.with_partitioning(initializer, axes)

        kernel_init, zeros = linen.linear.default_kernel_init, linen.initializers.zeros
        dtypes: Any = dict(dtype=self.dtype, param_dtype=self.param_dtype)

        def to_heads(name: str, features: int) -> jax.Array:
            return linen.Dense(
                features,
                use_bias=self.use_bias,
                kernel_init=sharded(kernel_init, None, self.heads_axis),
                bias_init=sharded(zeros, self.heads_axis),
                **dtypes,
                name=name,
            )(x)

        def norm(name: str) -> linen.RMSNorm:
            assert self.norm_epsilon is not None
            return linen.RMSNorm(self.norm_epsilon, **dtypes, name=name)

        if self.fused:
            qkv = to_heads("qkv_proj", features + 2 * kv_features)
            q, k, v = jnp.split(qkv, [features, features + kv_features], axis=-1)
        else:
            q = to_heads("q_proj", features)
            k, v = to_heads("k_proj", kv_features), to_heads("v_proj", kv_features)
        cache, out = rotate_write_attend(
            self,
            q,
            k,
            v,
            cache,
            allocator,
            slots,
            query_starts,
            positions,
            norms=None if self.norm_epsilon is None else (norm("q_norm"), norm("k_norm")),
            sinks=self.param("sinks", sharded(zeros, self.heads_axis), (self.num_heads,), self.param_dtype)
            if self.use_sinks
            else None,
            plan=plan,
            tree_mask=tree_mask,
            shared_prefix=shared_prefix,
        )
        if self.use_gate:
            out *= linen.sigmoid(to_heads("gate_proj", features))
        o_proj = linen.Dense(
            x.shape[-1],
            use_bias=self.use_output_bias,
            kernel_init=sharded(kernel_init, self.heads_axis, None),
            dot_general=functools.partial(jax.lax.dot_general, out_sharding=sharding_of_sum(out)),
            **dtypes,
            name="o_proj",
        )
        return cache, o_proj(out)


@contextlib.contextmanager
def replace(module_type: type, call: Callable[..., Any]) -> Iterator[None]:
    """Puts `call(module, *args)` in the place of each call `module(*args)` of the modules of a type, within `with`.

    `jaxpaged.nnx.replace` for Linen. It decorates functions too. What `nn.jit` or `nn.remat` has traced before is not
    traced again: call the parts of a model that stands under them.

    Args:
        module_type: of the modules that are replaced.
        call: gets the bound module, and what it was called with.

    Example:
        >>> import jax.numpy as jnp, flax.linen as nn, jaxpaged.linen
        >>> with jaxpaged.linen.replace(nn.Dense, lambda dense, x: x[: dense.features]):
        ...     nn.Dense(2).apply({}, jnp.arange(3))
        Array([0, 1], dtype=int32)
        >>> apply = jaxpaged.linen.replace(nn.Dense, lambda dense, x: x[: dense.features])(nn.Dense(2).apply)
        >>> apply({}, jnp.arange(3))
        Array([0, 1], dtype=int32)
    """

    def intercept(method: Callable[..., Any], args: Any, kwargs: Any, context: linen.module.InterceptorContext) -> Any:
        if isinstance(context.module, module_type) and context.method_name == "__call__":
            return call(context.module, *args, **kwargs)
        return method(*args, **kwargs)

    with linen.intercept_methods(intercept):
        yield
