"""What a model calls in each of its layers: the write to the cache, and attention over it, of one step's tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, Unpack

import jax

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._attention.attend import attend
from jaxpaged._attention.public import AttentionKeywords
from jaxpaged._cache.kv_cache import KVCache
from jaxpaged._cache.layers import CacheLayer
from jaxpaged._cache.rotary import rotate_and_write_kv
from jaxpaged._cache.write import write_kv
from jaxpaged._public_state import short_repr


@dataclasses.dataclass(frozen=True)
class StepAttention:
    """The `attend` of a model that an `Engine` calls: `cache, out = attend(q, k, v, cache)`.

    It knows where the step's tokens go and which sequence each belongs to. A step of single tokens is an ordinary
    decode call of `paged_attention`, one with chunks of prompts a packed one.

    Attributes:
        allocator: after the plan: its lengths count the step's tokens. Its rows are the step's sequences: the seats,
            or in a step of few tokens the seat of each.
        positions: int32 `[tokens]`, each token's position in its request.
        slots: int32 `[tokens]`, where each goes; outside the pool for padding.
        query_starts: int32 `[seqs + 1]`, where each sequence's tokens begin; None where token i is that of row i.
        last: int32 `[seqs]`, where each sequence's newest token stands.
        num_partitions: of each call of attention that gives none; None: as many as fill the GPU.
    """

    allocator: BlockAllocator
    positions: jax.Array
    slots: jax.Array
    query_starts: jax.Array | None
    last: jax.Array
    num_partitions: int | None = None

    __repr__ = short_repr

    @property
    def num_seqs(self) -> int:
        return self.allocator.lengths.shape[0]

    def __call__[C: (KVCache, CacheLayer)](
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: C,
        *,
        rotary_frequencies: tuple[float, ...] | None = None,
        interleaved: bool = False,
        **options: Unpack[AttentionKeywords],
    ) -> tuple[C, jax.Array]:
        """Writes k and v of the step's tokens, and attends.

        Args:
            q: `[tokens, heads, head_dim]`; or with an axis of one as a model with a batch axis has it,
                `[1, tokens, heads, head_dim]` or `[tokens, 1, heads, head_dim]`.
            k: `[tokens, kv_heads, head_dim]`, with the same axes in front.
            v: as k.
            cache: this layer's cache, or `CacheLayer(stack, i)`.
            rotary_frequencies: turn q and k by their positions, as `rotate_and_write_kv` does. None: they are turned
                already, or need not be.
            interleaved: whether the pairs that are turned are neighbours, and not halves of a head.
            options: the others of `attend`, except `query_starts`.

        Returns:
            The new cache, and attention of q's shape.
        """
        if not isinstance(cache, KVCache | CacheLayer):
            raise ValueError(
                f"attend(q, k, v, cache) takes the cache last, a KVCache or CacheLayer; got {type(cache).__name__}."
            )
        shape = q.shape
        q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
        if rotary_frequencies is None:
            cache = write_kv(cache, k, v, self.slots)
        else:
            cache, q = rotate_and_write_kv(
                cache, q, k, v, self.slots, self.positions, rotary_frequencies, interleaved=interleaved
            )
        options["query_starts"] = self.query_starts
        options.setdefault("num_partitions", self.num_partitions)
        return cache, attend(q, cache, self.allocator, **options).reshape(shape)

    def call[C: (KVCache, CacheLayer)](self, module: Any, x: jax.Array, cache: C) -> tuple[C, jax.Array]:
        """The same through a Flax module: `jaxpaged.nnx.PagedAttention`, or Linen's where it is bound.

        Args:
            module: projects, turns, writes, attends and projects back.
            x: `[tokens, features]`.
            cache: as above.

        Returns:
            The new cache, and `[tokens, features]`.

        Raises:
            ValueError: the engine is exact, and the module leaves the number of partitions open.
        """
        if self.num_partitions is not None and module.settings.num_partitions is None:
            raise ValueError("an exact engine needs modules with a fixed num_partitions; make them with 1.")
        if self.query_starts is not None:
            return module(x, cache, self.allocator, self.slots, query_starts=self.query_starts)
        cache, out = module(x[:, None], cache, self.allocator, self.slots[:, None])
        return cache, out[:, 0]

    def newest(self, x: jax.Array) -> jax.Array:
        """The newest row of each sequence, `[seqs, ...]` of `[tokens, ...]`: what the head of the model is for."""
        return x if self.query_starts is None else x[self.last]
