"""What a model calls in each of its layers: the write to the cache, and attention over it, of one step's tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, Unpack

import jax

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._allocator.prefix_groups import PrefixGroups
from jaxpaged._attention.attend import attend
from jaxpaged._attention.public import AttentionKeywords
from jaxpaged._cache.kv_cache import KVCache
from jaxpaged._cache.layers import CacheLayer
from jaxpaged._cache.rotate import check_interleaved, rotate_and_write_kv
from jaxpaged._cache.write import write_kv
from jaxpaged._public_state import short_repr
from pallas_kernels.decode.partition_plan import PartitionPlan

# A layer with one of these follows neither the step's plan nor its groups.
OWN_PLAN = ("plan", "num_partitions", "sliding_window", "prefix_groups")


@dataclasses.dataclass(frozen=True)
class StepAttention:
    """The `attend` of a model that an `Engine` calls: `cache, out = attend(q, k, v, cache)`.

    It knows where each of the step's tokens is written, and to which sequence it belongs. A step of single tokens is an
    ordinary decode call of `paged_attention`; a step with chunks of prompts is a packed call.

    Attributes:
        allocator: the allocator after the plan, so that its lengths count the step's tokens. Its rows are the step's
            sequences: all seats, or in a step of few tokens the seat of each token.
        positions: int32 `[tokens]`, each token's position in its request.
        slots: int32 `[tokens]`, or with several groups of layers `[groups, tokens]`: the slot of each token; outside
            the pool for padding.
        query_starts: int32 `[seqs + 1]`, where each sequence's tokens begin. None: token i belongs to row i.
        last: int32, the index of each seat's newest token, what `newest` picks; None: each token.
        adapters: int32 `[tokens]`, the adapter of each token's request, for `jaxpaged.lora`; -1: none. Engines give it.
        num_partitions: the default of attention's `num_partitions`; None: enough to fill the GPU.
        plan: the one that all layers without a window follow; None: each layer makes its own if that pays.
        prefix_groups: what begins with the same blocks, which these layers read once; None: each row reads its own.
    """

    allocator: BlockAllocator
    positions: jax.Array
    slots: jax.Array
    query_starts: jax.Array | None
    last: jax.Array | None
    adapters: Any = None
    num_partitions: int | None = None
    plan: PartitionPlan | None = None
    prefix_groups: PrefixGroups | None = None

    __repr__ = short_repr

    @property
    def num_seqs(self) -> int:
        return self.allocator.lengths.shape[0]

    @property
    def num_newest(self) -> int:
        """The rows that `newest` returns."""
        return self.num_seqs if self.last is not None else self.positions.shape[0]

    def __call__[C: (KVCache, CacheLayer)](
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        cache: C,
        *,
        group: int | None = None,
        rotary_frequencies: tuple[float, ...] | None = None,
        interleaved: bool = False,
        **options: Unpack[AttentionKeywords],
    ) -> tuple[C, jax.Array]:
        """Writes k and v of the step's tokens to the cache, and attends.

        Args:
            q: `[tokens, heads, head_dim]`. A model with a batch axis may keep it as an axis of one,
                `[1, tokens, heads, head_dim]` or `[tokens, 1, heads, head_dim]`.
            k: `[tokens, kv_heads, head_dim]`, with the same axis of one, if any.
            v: like k, `[tokens, kv_heads, value_dim]`. None for a latent cache.
            cache: this layer's cache, or `CacheLayer(stack, i)`.
            group: of the engine's `windows`, the index of this layer's group. None: there is one group.
            rotary_frequencies: rotate q and k by their positions, as `rotate_and_write_kv` does. None: do not.
            interleaved: whether a rotated pair is two neighbours, instead of one number from each half of a head.
            options: the options of `attend`, except `query_starts`.

        Returns:
            The new cache, and the output in q's shape, its last axis that of the values.

        Raises:
            ValueError: the last argument is no cache, no group of several is named, `interleaved` without
                `rotary_frequencies`, or as in `attend`.
        """
        allocator, slots = self._of_group(group)
        if not isinstance(cache, KVCache | CacheLayer):
            raise ValueError(
                f"attend(q, k, v, cache) takes the cache last, a KVCache or CacheLayer; got {type(cache).__name__}."
            )
        shape = q.shape
        q, k = (x.reshape(-1, *x.shape[-2:]) for x in (q, k))
        v = None if v is None else v.reshape(-1, *v.shape[-2:])
        check_interleaved("rotary_frequencies", rotary_frequencies, interleaved=interleaved)
        if rotary_frequencies is None:
            cache = write_kv(cache, k, v, slots)
        else:
            cache, q = rotate_and_write_kv(
                cache, q, k, v, slots, self.positions, rotary_frequencies, interleaved=interleaved
            )
        options["query_starts"] = self.query_starts
        if options.get("num_partitions") is None:
            options["num_partitions"] = self.num_partitions
        if all(options.get(name) is None for name in OWN_PLAN):
            options |= dict(plan=self.plan, prefix_groups=self.prefix_groups)
        return cache, attend(q, cache, allocator, **options).reshape(*shape[:-1], -1)

    def call[C: (KVCache, CacheLayer)](
        self, module: Any, x: jax.Array, cache: C, *, group: int | None = None
    ) -> tuple[C, jax.Array]:
        """Does the same with a Flax module: `jaxpaged.nnx.PagedAttention`, or a bound Linen module.

        Args:
            module: projects x, rotates, writes, attends and projects back.
            x: `[tokens, features]`.
            cache: this layer's cache, or `CacheLayer(stack, i)`.
            group: as in a call of `attend`.

        Returns:
            The new cache, and `[tokens, features]`.

        Raises:
            ValueError: the engine is exact, and the module leaves the number of partitions open; no group of several is
                named, or the module's window is wider than the group's.
        """
        if self.num_partitions is not None and module.settings.num_partitions is None:
            raise ValueError("an exact engine needs modules with a fixed num_partitions; make them with 1.")
        allocator, slots = self._of_group(group)
        settings, shared = module.settings, dict(plan=self.plan, prefix_groups=self.prefix_groups)
        if settings.num_partitions is not None or settings.sliding_window is not None:
            shared = {}
        if self.query_starts is not None:
            return module(x, cache, allocator, slots, query_starts=self.query_starts, **shared)
        cache, out = module(x[:, None], cache, allocator, slots[:, None], **shared)
        return cache, out[:, 0]

    def _of_group(self, group: int | None) -> tuple[BlockAllocator, jax.Array]:
        num_groups = self.allocator.num_groups
        if num_groups == 1:
            return self.allocator.group(group or 0), self.slots
        if group is None:
            raise ValueError(f"the engine has {num_groups} groups of layers: pass group, the index of the layer's.")
        return self.allocator.group(group), self.slots[group]

    def newest(self, x: jax.Array) -> jax.Array:
        """The newest token of each sequence, `[seqs, ...]` from `[tokens, ...]`: apply the model's head to these.

        In a step with drafts it returns all of x: each draft of a sequence needs logits too. Where tokens are scored it
        returns other rows, `num_newest` of them.
        """
        return x if self.query_starts is None or self.last is None else x[self.last]
