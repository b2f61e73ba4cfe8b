"""The part of a layer after attention: an MLP, or a mixture of experts."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lib.experts import Activation, ExpertWeights, compute_experts
from lib.llama_config import Clipped, LlamaConfig, Routing
from lib.sums import sum_over


class Linear(nnx.Module):
    """x W^T + b, with the weight [out, in] as in checkpoints.

    nnx.Linear stores the transpose. For the few rows of x in a decode step, XLA on a CPU reads this order about twice
    as fast (2 cores, float32, 1536 -> 576: 35 against 14 GB/s for 1 row, 15 against 8 GB/s for 8 rows).
    """

    def __init__(
        self, features_in: int, features_out: int, *, use_bias: bool = False, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        initialize = nnx.initializers.lecun_normal(in_axis=1, out_axis=0)
        self.weight = nnx.Param(initialize(rngs.params(), (features_out, features_in), dtype))
        self.bias = nnx.Param(jnp.zeros(features_out, dtype)) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., in] -> [..., out]
        y = jnp.einsum("oi,...i->...o", self.weight[...], x)
        return y if self.bias is None else y + jnp.broadcast_to(self.bias[...], y.shape)


class MLP(nnx.Module):
    def __init__(self, config: LlamaConfig, hidden_features: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        def linear(features_in: int, features_out: int) -> Linear:
            return Linear(features_in, features_out, use_bias=config.mlp_bias, dtype=dtype, rngs=rngs)

        self.gate_up_proj = linear(config.features, 2 * hidden_features)
        self.down_proj = linear(hidden_features, config.features)
        self.activation = nnx.silu if config.activation == "silu" else nnx.gelu
        self.axis = config.axis

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return sum_over(self.axis, self.down_proj(self.activation(gate) * up))


def gated(gate_up: jax.Array) -> jax.Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return nnx.silu(gate) * up


def clipped_gated(gate_up: jax.Array, *, clipped: Clipped) -> jax.Array:
    gate = jnp.minimum(gate_up[..., 0::2], clipped.limit)
    up = jnp.clip(gate_up[..., 1::2], -clipped.limit, clipped.limit)
    return gate * nnx.sigmoid(clipped.alpha * gate) * (up + 1)


class Experts(nnx.Module):
    def __init__(
        self,
        num_experts: int,
        features: int,
        hidden_features: int,
        *,
        clipped: Clipped | None = None,
        grouped_above: int | None = None,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        initialize = nnx.initializers.normal(features**-0.5)
        self.gate_up_proj = nnx.Param(initialize(rngs.params(), (num_experts, 2 * hidden_features, features), dtype))
        self.down_proj = nnx.Param(initialize(rngs.params(), (num_experts, hidden_features, features), dtype))
        self.clipped = clipped
        self.grouped_above = grouped_above
        if clipped is not None:
            self.gate_up_proj_bias = nnx.Param(jnp.zeros((num_experts, 2 * hidden_features), dtype))
            self.down_proj_bias = nnx.Param(jnp.zeros((num_experts, features), dtype))

    def __call__(self, x: jax.Array, chosen: jax.Array, shares: jax.Array) -> jax.Array:
        """The sum of the chosen experts' outputs, weighted by their shares: [..., features], [..., k], [..., k]."""
        weights = ExpertWeights(self.gate_up_proj[...], self.down_proj[...])
        activate: Activation = gated
        if self.clipped is not None:
            weights = ExpertWeights(*weights[:2], self.gate_up_proj_bias[...], self.down_proj_bias[...])
            activate = functools.partial(clipped_gated, clipped=self.clipped)
        tokens, chosen, shares = (each.reshape(-1, each.shape[-1]) for each in (x, chosen, shares))
        out = compute_experts(tokens, chosen, shares, weights, activate, grouped_above=self.grouped_above)
        return out.reshape(x.shape)


class Chooser(nnx.Module):
    """Chooses experts, or uses the ones of another forward pass (`routed_experts.py`).

    Attributes:
        keeps_chosen: whether a call sets `chosen`.
        chosen: the experts of the last call, int32 `[..., k]`.
        replayed: experts to use in the next call, int32 `[..., k]`. None: the ones with the largest scores.
    """

    num_experts: int
    keeps_chosen: bool = False
    chosen: jax.Array | None = None
    replayed: jax.Array | None = None

    def choose(self, scores: jax.Array, k: int) -> jax.Array:
        """[..., experts] -> int32 [..., k]."""
        chosen = jax.lax.top_k(scores, k)[1] if self.replayed is None else self.replayed
        if self.keeps_chosen:
            self.chosen = chosen
        return chosen


class MixtureOfExperts(Chooser):
    """gpt-oss: the sum of the `experts_per_token` experts with the largest logits, weighted by their softmax."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.router = Linear(config.features, config.num_experts, use_bias=True, dtype=dtype, rngs=rngs)
        sizes = config.num_experts, config.features, config.hidden_features
        above = config.grouped_above
        self.experts = Experts(*sizes, clipped=config.clipped, grouped_above=above, dtype=dtype, rngs=rngs)
        self.num_experts, self.experts_per_token = config.num_experts, config.experts_per_token

    def __call__(self, x: jax.Array) -> jax.Array:
        logits = self.router(x)
        chosen = self.choose(logits, self.experts_per_token)
        return self.experts(x, chosen, nnx.softmax(jnp.take_along_axis(logits, chosen, axis=-1)))


class Router(Chooser):
    """Routing in float32, so that the selection of experts does not depend on rounding."""

    def __init__(self, routing: Routing, features: int, *, rngs: nnx.Rngs):
        initialize = nnx.initializers.normal(features**-0.5)
        self.weight = nnx.Param(initialize(rngs.params(), (routing.num_experts, features), jnp.float32))
        self.e_score_correction_bias = nnx.Param(jnp.zeros(routing.num_experts)) if routing.has_bias else None
        self.routing, self.num_experts = routing, routing.num_experts

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The selected experts and their shares: [..., features] -> int32 [..., k], f32 [..., k]."""
        r = self.routing
        logits = jnp.einsum("...f,ef->...e", x.astype(jnp.float32), self.weight[...])
        scores = nnx.softmax(logits) if r.scoring == "softmax" else nnx.sigmoid(logits)
        ranked = scores
        if self.e_score_correction_bias is not None:
            ranked = ranked + jnp.broadcast_to(self.e_score_correction_bias[...], scores.shape)
        if r.groups_per_token < r.num_groups:
            in_groups = ranked.reshape(*ranked.shape[:-1], r.num_groups, -1)
            best = jax.lax.top_k(in_groups, 1 if r.scoring == "softmax" else 2)[0].sum(axis=-1)
            _, open_groups = jax.lax.top_k(best, r.groups_per_token)
            is_open = jax.nn.one_hot(open_groups, r.num_groups, dtype=bool).any(axis=-2)[..., None]
            ranked = jnp.where(is_open, in_groups, -jnp.inf).reshape(ranked.shape)
        chosen = self.choose(ranked, r.experts_per_token)
        shares = jnp.take_along_axis(scores, chosen, axis=-1)
        if r.normalise:
            shares /= shares.sum(axis=-1, keepdims=True) + 1e-20
        return chosen, shares * r.scaling


class RoutedExperts(nnx.Module):
    """The selected experts, weighted by their shares, plus DeepSeek's shared experts, which are one MLP."""

    def __init__(self, config: LlamaConfig, routing: Routing, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.gate = Router(routing, config.features, rngs=rngs)
        sizes = routing.num_experts, config.features, routing.hidden_features
        self.experts = Experts(*sizes, grouped_above=config.grouped_above, dtype=dtype, rngs=rngs)
        shared = routing.shared_features
        self.shared_experts = MLP(config, shared, dtype=dtype, rngs=rngs) if shared else None
        self.axis = config.axis

    def __call__(self, x: jax.Array) -> jax.Array:
        out = sum_over(self.axis, self.experts(x, *self.gate(x)))
        return out if self.shared_experts is None else out + self.shared_experts(x)


def create_mlp(config: LlamaConfig, i: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Module:
    """The MLP or mixture of experts of layer i."""
    if config.num_experts:
        return MixtureOfExperts(config, dtype=dtype, rngs=rngs)
    if config.routing is None or i in config.routing.dense_layers:
        return MLP(config, config.hidden_features, dtype=dtype, rngs=rngs)
    return RoutedExperts(config, config.routing, dtype=dtype, rngs=rngs)
