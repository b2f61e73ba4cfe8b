"""Everything that the NNX and Linen attention modules share: settings, checks, and the computation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxpaged._attention.attention_step import AttentionStep
from jaxpaged._attention.dense_step import DenseStep
from jaxpaged._by_kernel import Implementation
from jaxpaged._cache.kv_cache import KVCache, check_cache
from jaxpaged._cache.layers import CacheLayer, pools_of
from jaxpaged._cache.rotate import check_frequencies, check_interleaved
from jaxpaged._dtypes import checked_dtype
from jaxpaged._integers import check_heads

Rotary = Callable[[jax.Array, jax.Array], jax.Array]
Norm = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """Sizes and options of `jaxpaged.nnx.PagedAttention` and `jaxpaged.linen.PagedAttention`.

    The object is hashable: it stores sequences as tuples, and holds no arrays. Layers with equal options can share one;
    `dataclasses.replace` makes a variant.

    Attributes:
        num_heads: number of query heads.
        num_kv_heads: number of KV heads; must divide `num_heads`.
        head_dim: numbers per head.
        rotary_frequencies: from `jaxpaged.rotary_frequencies`, at most `head_dim // 2` numbers. None: no rotation, or
            the one in `rotary`.
        rotary: the model's own rotation, `(x [..., heads, head_dim], positions [...]) -> x`, applied to q and to k.
        interleaved: whether rotary pairs are neighbouring dimensions; see `jaxpaged.ops.rotate_and_write_kv`.
        fused: whether one projection computes q, k and v.
        heads_axis: mesh axis of the heads and KV heads; the modules say how they use it. Needs `fused=False`.
        use_bias: whether the q, k and v projections, and the gate projection, have a bias.
        use_output_bias: whether the output projection has a bias.
        norm_epsilon: epsilon of the RMS norm over each head of q and k, before rotation. None: no norm.
        use_sinks: whether each head has a sink: a learned logit without a value in the softmax.
        use_gate: whether the heads' output is multiplied by the sigmoid of a projection of x.
        scale: factor of the logits. None: `head_dim ** -0.5`. This and the next five are arguments of
            `jaxpaged.paged_attention`.
        sliding_window: tokens that each query sees, itself included. None: all.
        logits_soft_cap: cap of the logits, `cap * tanh(logit / cap)`. None: no cap.
        alibi_slopes: ALiBi slopes, one per head.
        num_partitions: partitions of each sequence. None: chosen automatically.
        implementation: "mosaic_gpu", "xla", or None to choose.
        dtype: dtype of the computation. None: promoted from the input and the parameters.
        param_dtype: dtype of the parameters.

    Raises:
        ValueError: the sizes do not match, a dtype is invalid, `rotary` is combined with `rotary_frequencies`,
            `interleaved` is set without `rotary_frequencies`, or `heads_axis` without `fused=False`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_frequencies: Sequence[float] | None
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
    alibi_slopes: Sequence[float] | None = None
    num_partitions: int | None = None
    implementation: Implementation | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = "float32"

    def __post_init__(self) -> None:
        check_heads(self.num_heads, self.num_kv_heads)
        check_dtypes(self)
        store_floats(self, "rotary_frequencies", "alibi_slopes")
        frequencies = self.rotary_frequencies
        if frequencies is not None:
            check_frequencies("rotary_frequencies", frequencies, self.head_dim)
        if frequencies is not None and self.rotary is not None:
            raise ValueError("rotary replaces rotary_frequencies; got both. Pass rotary_frequencies=None with rotary.")
        check_interleaved("rotary_frequencies", frequencies, interleaved=self.interleaved)
        if self.fused and self.heads_axis is not None:
            raise ValueError(
                "heads_axis needs separate q, k and v projections: a fused kernel cannot be sharded by heads. "
                "Pass fused=False with it."
            )

    @property
    def features(self) -> int:
        """Width of q and of the heads' output."""
        return self.num_heads * self.head_dim

    @property
    def kv_features(self) -> int:
        """Width of k, and width of v."""
        return self.num_kv_heads * self.head_dim

    def split(self, qkv: jax.Array) -> list[jax.Array]:
        """Splits the output of the fused projection into q, k and v."""
        return jnp.split(qkv, [self.features, self.features + self.kv_features], axis=-1)


def check_dtypes(settings: Any) -> None:
    """Raises `ValueError` unless `param_dtype` and `dtype` are valid."""
    checked_dtype("param_dtype", settings.param_dtype)
    if settings.dtype is not None:
        checked_dtype("dtype", settings.dtype)


def store_floats(settings: Any, *names: str) -> None:
    """Replaces the named sequences of numbers, except None, by tuples of floats."""
    for name in names:
        if (numbers := getattr(settings, name)) is not None:
            object.__setattr__(settings, name, tuple(map(float, numbers)))


def output_features(settings: AttentionSettings, projection: str) -> int:
    """Output width of the named projection."""
    features, kv_features = settings.features, settings.kv_features
    return {
        "qkv_proj": features + 2 * kv_features,
        "q_proj": features,
        "k_proj": kv_features,
        "v_proj": kv_features,
        "gate_proj": features,
    }[projection]


def _check_heads(name: str, heads: int, projection: jax.Array) -> None:
    """Raises `ValueError` if the projection, `[..., heads * head_dim]`, is sharded within heads of an explicit mesh."""
    sharding = jax.typeof(projection).sharding
    devices = math.prod(sharding.mesh.shape[axis] for axis in jax.tree.leaves(sharding.spec[-1]))
    if heads % devices:
        raise ValueError(
            f"The {devices} devices of heads_axis must divide the heads; got {name}={heads}. If there are fewer KV "
            f"heads than devices, pass num_kv_heads={devices} and repeat each head's columns of k_proj and v_proj."
        )


def project_and_attend[C: (KVCache, CacheLayer)](
    settings: AttentionSettings,
    x: jax.Array,  # [..., features], in the layout of the step
    cache: C,
    step: AttentionStep | DenseStep,
    *,
    project: Callable[[str], jax.Array],  # applies the named projection to x
    norms: tuple[Norm, Norm] | None,  # for q and k, before rotation
    sinks: jax.Array | None,  # [heads]
) -> tuple[C, jax.Array]:  # the new cache, and [..., heads * head_dim]
    """Everything in a module before the output projection: projects, normalises, rotates, writes, attends and gates.

    Raises `ValueError` if the shapes of the inputs do not match.
    """
    _check_call(settings, x, cache, step)
    if settings.fused:
        projected = settings.split(project("qkv_proj"))
    else:
        projected = [project(name) for name in ("q_proj", "k_proj", "v_proj")]
        for name, projection in zip(("num_heads", "num_kv_heads"), projected, strict=False):
            _check_heads(name, getattr(settings, name), projection)
    q, k, v = (x.reshape(*x.shape[:-1], -1, settings.head_dim) for x in projected)
    if norms is not None:
        q, k = norms[0](q), norms[1](k)
    if settings.rotary is not None:
        q, k = (settings.rotary(x, step.positions) for x in (q, k))
    cache, out = step.attend(
        q,
        k,
        v,
        cache,
        rotary_frequencies=settings.rotary_frequencies,
        interleaved=settings.interleaved,
        scale=settings.scale,
        sliding_window=settings.sliding_window,
        logits_soft_cap=settings.logits_soft_cap,
        alibi_slopes=None if settings.alibi_slopes is None else jnp.asarray(settings.alibi_slopes, jnp.float32),
        sinks=sinks,
        num_partitions=settings.num_partitions,
        implementation=settings.implementation,
    )
    out = out.reshape(*out.shape[:-2], -1)
    if settings.use_gate:
        out *= jax.nn.sigmoid(project("gate_proj"))
    return cache, out


def sum_sharding(out: jax.Array) -> NamedSharding | None:
    """Sharding of the output projection's result, if an explicit mesh shards the heads of `out`; otherwise None.

    `out` is [..., heads * head_dim].
    """
    mesh, spec = jax.typeof(out).sharding.mesh, tuple(jax.typeof(out).sharding.spec)
    return NamedSharding(mesh, P(*spec[:-1])) if mesh.explicit_axes and spec[-1] is not None else None


def _check_call(
    settings: AttentionSettings, x: jax.Array, cache: KVCache | CacheLayer, step: AttentionStep | DenseStep
) -> None:
    check_tokens(x, cache, step)
    if cache is None:
        return
    k = pools_of(cache).k
    if k.shape[-2:] != (settings.num_kv_heads, settings.head_dim):
        raise ValueError(
            f"the cache must be [blocks, block_size, {settings.num_kv_heads}, {settings.head_dim}] for this module; "
            f"got {k.shape=}. Create it with the module's num_kv_heads and head_dim."
        )


def check_tokens(x: jax.Array, cache: KVCache | CacheLayer, step: AttentionStep | DenseStep) -> None:
    if not isinstance(step, AttentionStep | DenseStep):
        raise ValueError(f"call a module with (x, cache, step), an AttentionStep last; got {type(step).__name__}.")
    if x.shape[:-1] != step.positions.shape:
        raise ValueError(f"x must be {[*step.positions.shape, 'features']}, the tokens of the step; got {x.shape=}.")
    if cache is not None:  # `dense_step` needs none
        check_cache(pools_of(cache))
