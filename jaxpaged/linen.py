"""Flax Linen: an attention module with a paged cache, and `replace` for models that bring their own attention."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import linen

from jaxpaged._attention.attention_step import AttentionStep
from jaxpaged._cache.kv_cache import KVCache
from jaxpaged._cache.layers import CacheLayer
from jaxpaged._flax.attention import AttentionSettings, output_features, project_and_attend, sum_sharding

__all__ = ["PagedAttention", "replace"]


class PagedAttention(linen.Module):
    """Causal self-attention with a paged KV cache: `jaxpaged.nnx.PagedAttention` for Linen.

    Settings, parameter names and results are the same. `in_features` comes from the input, and the output has the same
    width. If `settings.heads_axis` is set, a mesh axis, `nn.with_partitioning` annotates the parameters with it.

    Attributes:
        settings: sizes, options and dtypes.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpaged, jaxpaged.linen
        >>> settings = jaxpaged.AttentionSettings(
        ...     num_heads=4, num_kv_heads=2, head_dim=8, rotary_frequencies=jaxpaged.rotary_frequencies(8)
        ... )
        >>> attention = jaxpaged.linen.PagedAttention(settings)
        >>> cache = jaxpaged.KVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=8)
        >>> allocator = jaxpaged.BlockAllocator.create(num_blocks=8, block_size=16, num_seqs=1, max_blocks_per_seq=4)
        >>> allocator, slots, ok = allocator.append(jnp.array([5]), q_len=5)
        >>> x, step = jnp.ones((1, 5, 32)), jaxpaged.AttentionStep.create(allocator, slots)
        >>> variables = attention.init(jax.random.key(0), x, cache, step)
        >>> cache, out = attention.apply(variables, x, cache, step)
        >>> out.shape
        (1, 5, 32)
    """

    settings: AttentionSettings

    @linen.compact
    def __call__[C: (KVCache, CacheLayer)](
        self,
        x: jax.Array,
        cache: C,
        step: AttentionStep,
    ) -> tuple[C, jax.Array]:
        """Writes the new tokens to the cache and attends from them: see `jaxpaged.nnx.PagedAttention.__call__`."""
        s = self.settings

        def sharded(initializer: Callable[..., Any], *axes: str | None) -> Callable[..., Any]:
            return initializer if s.heads_axis is None else linen.with_partitioning(initializer, axes)

        kernel_init, zeros = linen.linear.default_kernel_init, linen.initializers.zeros
        dtypes: Any = dict(dtype=s.dtype, param_dtype=s.param_dtype)

        def to_heads(name: str) -> jax.Array:
            return linen.Dense(
                output_features(s, name),
                use_bias=s.use_bias,
                kernel_init=sharded(kernel_init, None, s.heads_axis),
                bias_init=sharded(zeros, s.heads_axis),
                **dtypes,
                name=name,
            )(x)

        sinks, norms = None, None
        if s.use_sinks:
            sinks = self.param("sinks", sharded(zeros, s.heads_axis), (s.num_heads,), s.param_dtype)
        if s.norm_epsilon is not None:
            norm = functools.partial(linen.RMSNorm, s.norm_epsilon, **dtypes)
            norms = norm(name="q_norm"), norm(name="k_norm")
        cache, out = project_and_attend(s, x, cache, step, project=to_heads, norms=norms, sinks=sinks)
        o_proj = linen.Dense(
            x.shape[-1],
            use_bias=s.use_output_bias,
            kernel_init=sharded(kernel_init, s.heads_axis, None),
            dot_general=functools.partial(jax.lax.dot_general, out_sharding=sum_sharding(out)),
            **dtypes,
            name="o_proj",
        )
        return cache, o_proj(out)


@contextlib.contextmanager
def replace(module_type: type, call: Callable[..., Any]) -> Iterator[None]:
    """Replaces every call `module(*args)` with `call(module, *args)`, for all modules of one type, in a `with` block.

    This is `jaxpaged.nnx.replace` for Linen. It is a context manager, and also works as a decorator. Flax reuses the
    traces of `nn.jit` and `nn.remat`, so calls in code that either has already traced are not replaced. To avoid this,
    call the wrapped modules directly.

    Args:
        module_type: type of the modules to replace.
        call: receives the bound module and the arguments of the call.

    Raises:
        ValueError: at the end of the block, if modules were called and none of them was of this type.

    Example:
        >>> import jax.numpy as jnp, flax.linen as nn, jaxpaged.linen
        >>> with jaxpaged.linen.replace(nn.Dense, lambda dense, x: x[: dense.features]):
        ...     nn.Dense(2).apply({}, jnp.arange(3))
        Array([0, 1], dtype=int32)
        >>> apply = jaxpaged.linen.replace(nn.Dense, lambda dense, x: x[: dense.features])(nn.Dense(2).apply)
        >>> apply({}, jnp.arange(3))
        Array([0, 1], dtype=int32)
    """

    others = set[str]()  # names of types
    is_found = False

    def intercept(method: Callable[..., Any], args: Any, kwargs: Any, context: linen.module.InterceptorContext) -> Any:
        nonlocal is_found
        if context.method_name == "__call__":
            if isinstance(context.module, module_type):
                is_found = True
                return call(context.module, *args, **kwargs)
            others.add(type(context.module).__name__)
        return method(*args, **kwargs)

    with linen.intercept_methods(intercept):
        yield
    if others and not is_found:
        raise ValueError(
            f"the model must call modules of the type; got none of {module_type.__name__}, only "
            f"{', '.join(sorted(others))}. Pass the type of the model's attention. What nn.jit or nn.remat has traced "
            "before is not traced again: call the parts of the model under them."
        )
