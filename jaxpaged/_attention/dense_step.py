"""`AttentionStep` without a cache: differentiable attention of whole sequences in plain jnp."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._attention.attention_step import LayerKeywords
from jaxpaged._attention.call import check_options
from jaxpaged._attention.reference import dense_attention
from jaxpaged._attention.runs import owners
from jaxpaged._cache.layers import pools_of
from jaxpaged._cache.rotate import check_interleaved, rotate_all
from jaxpaged._integers import as_int32, checked_size

HOW = ("num_partitions", "implementation")  # options that do not change what is computed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseStep:
    """The result of `dense_step`.

    Attributes:
        positions: int32 `[tokens]`, each token's position in its sequence.
        seqs: int32 `[tokens]`, the sequence of each token.
        adapters: int32 `[tokens]`, or None.
    """

    positions: jax.Array
    seqs: jax.Array
    adapters: jax.Array | None

    def group(self, index: int) -> DenseStep:
        """The step itself, which is the same for all groups of layers."""
        return self

    def attend[C](
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        cache: C,
        *,
        rotary_frequencies: Sequence[float] | jax.Array | None = None,
        interleaved: bool = False,
        **options: Unpack[LayerKeywords],
    ) -> tuple[C, jax.Array]:
        """As `AttentionStep.attend`, for tokens with nothing before them in the cache. Returns `cache` unchanged, which
        may be None if `v` is given."""
        check_interleaved("rotary_frequencies", rotary_frequencies, interleaved=interleaved)
        shape, value_dim, is_latent = q.shape, None, v is None
        if is_latent:
            if cache is None:
                raise ValueError("a latent layer needs a cache, which knows how many numbers of k are its values.")
            value_dim = pools_of(cache).value_dim  # type: ignore[arg-type]
        q, k = (x.reshape(-1, *x.shape[-2:]) for x in (q, k))
        v = k[..., :value_dim] if v is None else v.reshape(-1, *v.shape[-2:])
        num_tokens = len(self.positions)
        if len(q) != num_tokens:
            raise ValueError(f"q must have the {num_tokens} tokens of the step; got {list(shape)}.")
        if rotary_frequencies is not None:
            start = value_dim or 0
            q, k = rotate_all((q, k), self.positions, rotary_frequencies, interleaved=interleaved, start=start)
        own: Any = {name: option for name, option in options.items() if name not in HOW}
        checked = check_options(k[None], q.shape[1], num_tokens, is_latent=is_latent, **own)
        distance = self.positions[:, None] - self.positions[None]
        visible = (self.seqs[:, None] == self.seqs[None]) & (distance >= 0)
        if checked.sliding_window is not None:
            visible &= distance < checked.sliding_window
        wide = [x.astype(jnp.float32)[None] for x in (q, k, v)]
        out, _ = dense_attention(wide[0], wide[1], wide[2], distance[None], visible[None], checked)
        return cache, out.astype(q.dtype).reshape(*shape[:-1], -1)


def dense_step(
    num_tokens: int, *, query_starts: ArrayLike | None = None, adapters: ArrayLike | None = None
) -> DenseStep:
    """A step of whole sequences, without a cache, for the `apply` of an `Engine`.

    With it the same `apply` computes the forward pass for training under `jax.grad`, or expected values in tests:
    `_, hidden = apply(weights, tokens, step.positions, caches, step)`. Attention is plain jnp in float32, with
    `[heads, tokens, tokens]` logits. For a batch, map `apply` over the sequences with `jax.vmap`.

    Args:
        num_tokens: number of tokens of all sequences.
        query_starts: int32 `[seqs + 1]`, index of each sequence's first token, from 0 to `num_tokens`. None: a single
            sequence.
        adapters: int32 `[tokens]`, as in `AttentionStep`.

    Returns:
        An object with the `attend`, `group`, `positions` and `adapters` of an `AttentionStep`. It returns caches
        unchanged. A cache may be None, except in latent layers.

    Raises:
        ValueError: `num_tokens` is below 1, or an array has a wrong shape or dtype.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpaged
        >>> step = jaxpaged.dense_step(3)
        >>> x = jnp.ones((3, 2, 8))
        >>> jax.grad(lambda x: step.attend(x, x, x, None)[1].sum())(x).shape
        (3, 2, 8)
    """
    num_tokens = checked_size("num_tokens", num_tokens)
    every = jnp.arange(num_tokens, dtype=jnp.int32)
    if query_starts is None:
        seqs, positions = jnp.zeros_like(every), every
    else:
        query_starts = as_int32(query_starts)
        if query_starts.ndim != 1 or len(query_starts) < 2 or query_starts.dtype != jnp.int32:
            raise ValueError(
                f"query_starts must be int32 [seqs + 1]; got {query_starts.dtype} {list(query_starts.shape)}."
            )
        seqs = owners(query_starts, tokens=num_tokens)
        positions = every - query_starts.at[seqs].get(mode="clip")
    if adapters is not None:
        adapters = as_int32(adapters)
        if adapters.shape != (num_tokens,):
            raise ValueError(f"adapters must be int32 [{num_tokens}], one a token; got {list(adapters.shape)}.")
    return DenseStep(positions, seqs, adapters)
