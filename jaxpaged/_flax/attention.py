"""The attention of the NNX and the Linen module: settings, checks, and all but the parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
from jaxpaged._cache.rotate import check_interleaved
from jaxpaged._dtypes import checked_dtype
from jaxpaged._integers import check_heads

Rotary = Callable[[jax.Array, jax.Array], jax.Array]
Norm = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """Sizes and options of `jaxpaged.nnx.PagedAttention` and `jaxpaged.linen.PagedAttention`.

    Hashable, and without arrays. One serves all layers that are alike; `dataclasses.replace` makes others.

    Attributes:
        num_heads: query heads.
        num_kv_heads: KV heads; must divide `num_heads`.
        head_dim: numbers a head.
        rotary_frequencies: from `jaxpaged.rotary_frequencies`, up to `head_dim // 2` numbers; None: no rotation other
            than `rotary`.
        rotary: the model's own rotation, `(x [..., heads, head_dim], positions [...]) -> x`, for q and for k.
        interleaved: whether the pairs that `rotary_frequencies` turn are neighbours, see `rotate_and_write_kv`.
        fused: whether q, k and v are one product.
        heads_axis: the mesh axis of the heads and KV heads; the modules say how they use it. Needs `fused=False`.
        use_bias: whether q, k and v have a bias.
        use_output_bias: whether the output projection has one.
        norm_epsilon: of the RMS norm of each head of q and k, before they are rotated; None: no norm.
        use_sinks: whether each head has a sink, a logit without a value.
        use_gate: whether the output of the heads is multiplied by the sigmoid of a projection of x.
        scale: as in `jaxpaged.paged_attention`, like the next five.
        sliding_window: in tokens.
        logits_soft_cap: of the logits.
        alibi_slopes: one a head.
        num_partitions: of each sequence.
        implementation: of the attention.
        dtype: of the computation; None: the one that input and parameters promote to.
        param_dtype: of the parameters.

    Raises:
        ValueError: sizes that do not fit together, no dtype, or `interleaved` without `rotary_frequencies`.
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

    def __post_init__(self) -> None:
        check_heads(self.num_heads, self.num_kv_heads)
        check_dtypes(self)
        head_dim, frequencies = self.head_dim, self.rotary_frequencies
        if frequencies is not None and not 0 < 2 * len(frequencies) <= head_dim:
            raise ValueError(
                f"rotary_frequencies must hold up to head_dim // 2 numbers; got {len(frequencies)} for {head_dim=}. "
                "Make them with jaxpaged.rotary_frequencies(head_dim)."
            )
        if frequencies is not None and self.rotary is not None:
            raise ValueError("rotary takes the place of rotary_frequencies; pass rotary_frequencies=None with it.")
        check_interleaved("rotary_frequencies", frequencies, interleaved=self.interleaved)
        if self.fused and self.heads_axis is not None:
            raise ValueError(
                "heads_axis needs q, k and v apart: the columns of one kernel do not fall on the heads of a device. "
                "Pass fused=False with it."
            )

    @property
    def features(self) -> int:
        """Width of q and of the heads' output."""
        return self.num_heads * self.head_dim

    @property
    def kv_features(self) -> int:
        """Width of k, and of v."""
        return self.num_kv_heads * self.head_dim

    def split(self, qkv: jax.Array) -> list[jax.Array]:
        """q, k and v of their fused projection."""
        return jnp.split(qkv, [self.features, self.features + self.kv_features], axis=-1)


def check_dtypes(settings: Any) -> None:
    """Raises `ValueError` if a dtype of the settings is none."""
    checked_dtype("param_dtype", settings.param_dtype)
    if settings.dtype is not None:
        checked_dtype("dtype", settings.dtype)


def output_features(settings: AttentionSettings, projection: str) -> int:
    """How many numbers a token has after this projection."""
    features, kv_features = settings.features, settings.kv_features
    return {
        "qkv_proj": features + 2 * kv_features,
        "q_proj": features,
        "k_proj": kv_features,
        "v_proj": kv_features,
        "gate_proj": features,
    }[projection]


def project_and_attend[C: (KVCache, CacheLayer)](
    settings: AttentionSettings,
    x: jax.Array,  # [..., features], in the layout of the step
    cache: C,
    step: AttentionStep | DenseStep,
    *,
    project: Callable[[str], jax.Array],  # x by the projection of this name
    norms: tuple[Norm, Norm] | None,  # q and k, before rotation
    sinks: jax.Array | None,  # [heads]
) -> tuple[C, jax.Array]:  # and [..., heads * head_dim]
    """All of a module but its output projection: projects, normalises, rotates, writes, attends and gates.

    Raises `ValueError` if the inputs do not fit together.
    """
    _check_call(settings, x, cache, step)
    if settings.fused:
        projected = settings.split(project("qkv_proj"))
    else:
        projected = [project(name) for name in ("q_proj", "k_proj", "v_proj")]
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
    """The sharding of the output projection of `out` [..., heads * head_dim], if an explicit mesh shards the heads."""
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
        raise ValueError(f"a module takes (x, cache, step), the last an AttentionStep; got {type(step).__name__}.")
    if x.shape[:-1] != step.positions.shape:
        raise ValueError(f"x must be {[*step.positions.shape, 'features']}, the tokens of the step; got {x.shape=}.")
    if cache is not None:  # `dense_step` needs none
        check_cache(pools_of(cache))
