"""The experts that the routers of a model chose, and their replay in another forward pass of the same model."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from lib.mlp import MixtureOfExperts, RoutedExperts, Router

ONE_BYTE = 256  # experts


def routers(layers: Iterable[Any]) -> list[MixtureOfExperts | Router]:
    """The router of each layer that has one."""
    mlps = [layer.mlp.gate if isinstance(layer.mlp, RoutedExperts) else layer.mlp for layer in layers]
    found = [mlp for mlp in mlps if isinstance(mlp, MixtureOfExperts | Router)]
    if not found:
        raise ValueError("no layer of this model has a router.")
    return found


def keep_experts(layers: Iterable[Any]) -> None:
    """Makes the next forward pass keep the experts that it uses, for `kept_experts`.

    Like `replay`, it changes the model: call it on one that was merged for this pass.
    """
    for router in routers(layers):
        router.keeps_chosen = True


def kept_experts(layers: Iterable[Any]) -> jax.Array:
    """The experts of the last forward pass, uint8 or uint16 `[..., layers, k]`, for the layers with a router."""
    each = routers(layers)
    dtype = jnp.uint8 if max(router.num_experts for router in each) <= ONE_BYTE else jnp.uint16
    return jnp.stack([jnp.asarray(router.chosen, dtype) for router in each], axis=-2)


def replay(layers: Iterable[Any], experts: jax.Array) -> None:
    """Makes the next forward pass use these experts, `[..., layers, k]`, with the shares that it computes for them."""
    for i, router in enumerate(routers(layers)):
        router.replayed = experts[..., i, :].astype(jnp.int32)
