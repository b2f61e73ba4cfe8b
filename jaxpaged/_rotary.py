"""Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864), in the half-split order of Llama."""

import jax
import jax.numpy as jnp


def rotary_frequencies(head_dim: int, theta: float = 10_000.0) -> tuple[float, ...]:
    """The angle per token of each pair of dimensions, `theta ** (-2 i / head_dim)`, `head_dim // 2` numbers.

    Raises:
        ValueError: an odd head_dim.

    Example:
        >>> import jaxpaged
        >>> jaxpaged.rotary_frequencies(4)
        (1.0, 0.01)
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even for a rotary embedding; got {head_dim=}.")
    return tuple(theta ** (-2 * i / head_dim) for i in range(head_dim // 2))


def rotate(x: jax.Array, positions: jax.Array, frequencies: tuple[float, ...]) -> jax.Array:
    """Turns x `[..., heads, head_dim]` by its positions, int32 `[...]`; in float32, returned in x's dtype."""
    per_token = jnp.asarray(frequencies, jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    angles = positions.astype(jnp.float32)[..., None, None] * per_token
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
