"""The mixture of experts of DeepSeek's models: some experts for each token, and shared ones for all."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Routing:
    num_experts: int
    experts_per_token: int
    hidden_features: int  # of each expert
    shared_features: int  # hidden ones, of all shared experts
    first_layer: int  # the layers before it have an MLP
    scoring: Literal["softmax", "sigmoid"]
    has_bias: bool  # whether a bias is added to the scores to choose by, but not to the shares
    num_groups: int  # of experts; a token's are of the best `groups_per_token`
    groups_per_token: int
    normalise: bool  # whether the shares of a token add up to `scaling`
    scaling: float


class Router(nnx.Module):
    """In float32, as the choice of experts should not depend on rounding."""

    def __init__(self, routing: Routing, features: int, *, rngs: nnx.Rngs):
        initialize = nnx.initializers.normal(features**-0.5)
        self.weight = nnx.Param(initialize(rngs.params(), (routing.num_experts, features), jnp.float32))
        self.e_score_correction_bias = nnx.Param(jnp.zeros(routing.num_experts)) if routing.has_bias else None
        self.routing = routing

    def __call__(self, x: jax.Array) -> jax.Array:
        """Each expert's share, f32 [..., experts] of [..., features]; 0: it is not chosen."""
        r = self.routing
        logits = jnp.einsum("...f,ef->...e", x.astype(jnp.float32), self.weight[...])
        scores = nnx.softmax(logits) if r.scoring == "softmax" else nnx.sigmoid(logits)
        ranked = scores
        if self.e_score_correction_bias is not None:
            ranked = ranked + jnp.broadcast_to(self.e_score_correction_bias[...], scores.shape)
        if r.groups_per_token < r.num_groups:
            in_groups = ranked.reshape(*ranked.shape[:-1], r.num_groups, -1)
            best = jax.lax.top_k(in_groups, 1 if r.scoring == "softmax" else 2)[0].sum(axis=-1)
            is_open = _largest(best, r.groups_per_token)[..., None]
            ranked = jnp.where(is_open, in_groups, -jnp.inf).reshape(ranked.shape)
        shares = jnp.where(_largest(ranked, r.experts_per_token), scores, 0.0)
        if r.normalise:
            shares /= shares.sum(axis=-1, keepdims=True) + 1e-20
        return shares * r.scaling


def _largest(x: jax.Array, k: int) -> jax.Array:
    """Which are the k largest of the last axis."""
    return jax.nn.one_hot(jax.lax.top_k(x, k)[1], x.shape[-1], dtype=bool).any(axis=-2)


@dataclasses.dataclass(frozen=True)
class Clipped:
    """What distinguishes the experts of gpt-oss: they have biases, gate and up alternate, and both are clipped."""

    alpha: float
    limit: float


class Experts(nnx.Module):
    """Every expert computes every token, which is `num_experts / experts_per_token` times the necessary work.

    Weights are `[experts, hidden features, features]`, which XLA multiplies as they are. Other orders it would copy in
    each step.
    """

    def __init__(
        self,
        num_experts: int,
        features: int,
        hidden_features: int,
        *,
        clipped: Clipped | None = None,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        initialize = nnx.initializers.normal(features**-0.5)
        self.gate_up_proj = nnx.Param(initialize(rngs.params(), (num_experts, 2 * hidden_features, features), dtype))
        self.down_proj = nnx.Param(initialize(rngs.params(), (num_experts, hidden_features, features), dtype))
        self.clipped = clipped
        if clipped is not None:
            self.gate_up_proj_bias = nnx.Param(jnp.zeros((num_experts, 2 * hidden_features), dtype))
            self.down_proj_bias = nnx.Param(jnp.zeros((num_experts, features), dtype))

    def __call__(self, x: jax.Array, shares: jax.Array) -> jax.Array:  # [..., features], [..., experts]
        shares, clipped = shares.astype(x.dtype), self.clipped
        gate_up = jnp.einsum("...f,ehf->...eh", x, self.gate_up_proj[...])
        if clipped is None:
            gate, up = jnp.split(gate_up, 2, axis=-1)
            hidden = nnx.silu(gate) * up
        else:
            gate_up += jnp.broadcast_to(self.gate_up_proj_bias[...], gate_up.shape)
            gate = jnp.minimum(gate_up[..., 0::2], clipped.limit)
            up = jnp.clip(gate_up[..., 1::2], -clipped.limit, clipped.limit)
            hidden = gate * nnx.sigmoid(clipped.alpha * gate) * (up + 1)
        out = jnp.einsum("...eh,ehf->...f", hidden * shares[..., None], self.down_proj[...])
        return out if clipped is None else out + jnp.einsum("...e,ef->...f", shares, self.down_proj_bias[...])


class RoutedExperts(nnx.Module):
    """The chosen experts' outputs, weighted with their shares, and the shared experts', which are one MLP."""

    def __init__(
        self,
        routing: Routing,
        features: int,
        shared_experts: nnx.Module,
        *,
        axis: str | None,  # of a mesh whose devices have a part of each expert's hidden features
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.gate = Router(routing, features, rngs=rngs)
        self.experts = Experts(routing.num_experts, features, routing.hidden_features, dtype=dtype, rngs=rngs)
        self.shared_experts = shared_experts
        self.axis = axis

    def __call__(self, x: jax.Array) -> jax.Array:
        routed = self.experts(x, self.gate(x))
        if self.axis is not None:
            routed = jax.lax.psum(routed, self.axis)
        return routed + self.shared_experts(x)
