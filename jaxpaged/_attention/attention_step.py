"""The `AttentionStep`: where the tokens of a step are written and what they see. A model's layers attend with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._allocator.prefix_groups import PrefixGroups
from jaxpaged._attention.attend import attend
from jaxpaged._attention.call import check_partitions
from jaxpaged._attention.plan import plan_step
from jaxpaged._attention.runs import packed_positions
from jaxpaged._attention.writes import note_write
from jaxpaged._by_kernel import Implementation
from jaxpaged._cache.kv_cache import KVCache
from jaxpaged._cache.layers import CacheLayer, pools_of
from jaxpaged._cache.rotate import check_interleaved, rotate_all, rotate_and_write_kv
from jaxpaged._integers import as_int32, checked_query_starts, checked_size
from jaxpaged._on_shards import is_whole
from jaxpaged._public_state import public_state
from pallas_kernels.common.partition_plan import PartitionPlan

# A layer with one of these follows neither the step's plan nor its prefix groups.
OWN_PARTITIONS = ("num_partitions", "sliding_window")


class LayerKeywords(TypedDict, total=False):
    """The options of `paged_attention` that belong to a layer, not to a step."""

    scale: ArrayLike | None
    sliding_window: ArrayLike | None
    logits_soft_cap: ArrayLike | None
    alibi_slopes: ArrayLike | None
    sinks: ArrayLike | None
    num_partitions: int | None
    implementation: Implementation | None


@public_state
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionStep:
    """The tokens that a step computes: their sequences, where they are written, and what they see.

    Functions, Flax modules and models of an `Engine` all attend with it: `cache, out = step.attend(q, k, v, cache)` in
    each layer. It is a pytree and can be passed to `jit`, `scan`, `vmap`, `remat` and `jax.export`.

    Its tokens have one of three layouts:

    - one token of each sequence: `slots` is `[seqs]`;
    - several tokens of each sequence: `slots` is `[seqs, q_len]`, with a sequence's newest tokens last;
    - packed, with `query_starts`: `slots` is `[tokens]`, one sequence after another. vLLM and FlashAttention call
      `query_starts` `cu_seqlens_q`; JAX's TPU kernels call it `cu_q_lens`.

    `create` makes a step; an engine passes one to `apply`.

    Attributes:
        allocator: the allocator after the `append` that made room for the tokens, so that its lengths count them.
        slots: int32 in the step's layout, or `[groups, ...]` with several groups of layers: where each token's key and
            value are written; outside the pool for padding.
        positions: int32 in the step's layout, each token's position in its sequence.
        query_starts: int32 `[seqs + 1]`, index of each sequence's first token. None: the tokens are not packed.
        tree_mask: uint32 `[seqs, q_len, words]`, from `jaxpaged.tree_mask`: which new tokens of its sequence each token
            sees. None: all earlier ones.
        prefix_groups: sequences that begin with the same blocks. A layer reads these blocks once, unless it has a
            window or its own `num_partitions`. None: each sequence reads all its blocks.
        adapters: int32 `[tokens]`, the adapter of each token for `jaxpaged.lora`, or -1. None: no adapters.
        plan: the partition plan of layers without a window. None: each layer decides.
        num_partitions: number of partitions of each sequence, as in `paged_attention`. None: enough to fill a GPU.
        group_index: index of the step's group of layers; 0 before `group` is called.
    """

    allocator: BlockAllocator
    slots: jax.Array
    positions: jax.Array
    query_starts: jax.Array | None = None
    tree_mask: jax.Array | None = None
    prefix_groups: PrefixGroups | None = None
    adapters: jax.Array | None = None
    plan: PartitionPlan | None = None
    num_partitions: int | None = dataclasses.field(default=None, metadata=dict(static=True))
    group_index: int = dataclasses.field(default=0, metadata=dict(static=True))

    @classmethod
    def create(
        cls,
        allocator: BlockAllocator,
        slots: ArrayLike,
        *,
        positions: ArrayLike | None = None,
        query_starts: ArrayLike | None = None,
        tree_mask: ArrayLike | None = None,
        prefix_groups: PrefixGroups | None = None,
        adapters: ArrayLike | None = None,
        num_kv_heads: int | None = None,
        num_partitions: int | None = None,
    ) -> AttentionStep:
        """Makes the step of the most recently appended tokens.

        Args:
            allocator: the allocator after the `append` that made room for the tokens.
            slots: int32 `[seqs]` or `[seqs, q_len]`, as returned by that `append`; or packed `[tokens]`, from
                `BlockAllocator.slots`. With several groups of layers the first axis is the group.
            positions: int32, the shape of `slots` without its axis of groups. None: the positions of the newest tokens
                of each sequence. In a tree: each token's depth plus the length of the history.
            query_starts: int32 `[seqs + 1]`, not descending, index of each sequence's first token.
            tree_mask: from `jaxpaged.tree_mask`, for tokens that are not packed.
            prefix_groups: from `BlockAllocator.prefix_groups`, for these tokens.
            adapters: int32 `[tokens]`, the adapter of each token, or -1.
            num_kv_heads: number of KV heads of the caches; inside `jax.shard_map`, of one device's caches. If given,
                the step makes one partition plan for all layers, so make the step outside of a scan over layers. None:
                each layer makes its own plan.
            num_partitions: number of partitions of each sequence, for layers without their own number.

        Raises:
            ValueError: slots, positions or query_starts have a wrong shape or dtype.

        Example:
            >>> import jax.numpy as jnp, jaxpaged
            >>> cache = jaxpaged.KVCache.create(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=64)
            >>> sizes = dict(num_blocks=8, block_size=16, num_seqs=1, max_blocks_per_seq=4)
            >>> allocator = jaxpaged.BlockAllocator.create(**sizes)
            >>> allocator, slots, ok = allocator.append(jnp.array([3]), q_len=3)
            >>> step = jaxpaged.AttentionStep.create(allocator, slots)
            >>> q, kv = jnp.ones((1, 3, 4, 64), jnp.bfloat16), jnp.ones((1, 3, 2, 64), jnp.bfloat16)
            >>> cache, out = step.attend(q, kv, kv, cache)
            >>> out.shape
            (1, 3, 4, 64)
        """
        slots = as_int32(slots)
        shape, num_seqs = slots.shape[allocator.num_groups > 1 :], allocator.lengths.shape[0]
        q_len = shape[1] if len(shape) > 1 else 1
        is_packed, num_partitions = query_starts is not None, check_partitions(num_partitions)
        if slots.dtype != jnp.int32 or len(shape) not in ((1,) if is_packed else (1, 2)):
            raise ValueError(
                "slots must be int32 [seqs], [seqs, q_len] or with query_starts [tokens], for each group of layers; "
                f"got {slots.dtype} {list(slots.shape)} for {allocator.num_groups} groups."
            )
        if not is_packed and shape[0] != num_seqs:
            raise ValueError(
                f"slots must have a row for each of the allocator's {num_seqs} sequences; got {list(slots.shape)}. "
                "Pass query_starts with packed tokens."
            )
        starts = None if query_starts is None else checked_query_starts(query_starts, num_seqs)
        if positions is not None:
            positions = as_int32(positions)
            if positions.shape != shape or positions.dtype != jnp.int32:
                raise ValueError(
                    f"positions must be int32 {list(shape)}, one a token; got {positions.dtype} "
                    f"{list(positions.shape)}."
                )
        elif starts is not None:
            positions = packed_positions(starts, allocator.lengths, tokens=shape[0])
        else:
            positions = allocator.positions(q_len).reshape(shape)
        plan = None
        if num_kv_heads is not None and not is_packed and num_partitions is None and is_whole(allocator.lengths):
            lengths = allocator.lengths
            if prefix_groups is not None:
                lengths -= prefix_groups.num_blocks * allocator.block_size
            capacity = allocator.block_tables.shape[-1] * allocator.block_size
            num_kv_heads = checked_size("num_kv_heads", num_kv_heads)
            plan = plan_step(lengths, num_kv_heads=num_kv_heads, q_len=q_len, capacity=capacity)
        return cls(
            allocator=allocator,
            slots=slots,
            positions=positions,
            query_starts=starts,
            tree_mask=None if tree_mask is None else jnp.asarray(tree_mask),
            prefix_groups=prefix_groups,
            adapters=None if adapters is None else as_int32(adapters),
            plan=plan,
            num_partitions=num_partitions,
        )

    def group(self, index: int) -> AttentionStep:
        """The step for one group of layers, in a model with several `windows`.

        Raises:
            ValueError: there is no such group.
        """
        allocator = self.allocator.group(index)
        slots = self.slots if self.allocator.num_groups == 1 else self.slots[index]
        return dataclasses.replace(self, allocator=allocator, slots=slots, group_index=index)

    def attend[C: (KVCache, CacheLayer)](
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: C,
        *,
        rotary_frequencies: Sequence[float] | jax.Array | None = None,
        interleaved: bool = False,
        **options: Unpack[LayerKeywords],
    ) -> tuple[C, jax.Array]:
        """Writes k and v of the step's tokens to the cache, then attends with q.

        Args:
            q: `[..., heads, head_dim]`, in the step's layout. A model with a batch axis may keep it with size 1:
                `[1, tokens, heads, head_dim]` or `[tokens, 1, heads, head_dim]`.
            k: `[..., kv_heads, head_dim]`, with the same leading axes as q. None: nothing is written, because the layer
                shares the cache of another layer that wrote it in this step.
            v: `[..., kv_heads, value_dim]`. None for a latent cache.
            cache: this layer's cache, or `CacheLayer(stack, i)`.
            rotary_frequencies: rotates q and k by their positions, as `rotate_and_write_kv` does. None: no rotation.
            interleaved: whether a rotated pair is two neighbouring numbers, instead of one from each half of a head.
            options: `scale`, `sliding_window`, `logits_soft_cap`, `alibi_slopes`, `sinks`, `num_partitions` and
                `implementation` of `paged_attention`.

        Returns:
            The new cache, and the output in q's shape, but with the last axis of the values.

        Raises:
            ValueError: the last argument is no cache, the step has several groups of layers, `interleaved` without
                `rotary_frequencies`, the cache's blocks do not match the allocator's, a `sliding_window` wider than the
                group's, or as in `paged_attention`.
            NotImplementedError: as in `paged_attention`.
        """
        if not isinstance(cache, KVCache | CacheLayer):
            raise ValueError(
                f"attend(q, k, v, cache) needs the cache last, a KVCache or CacheLayer; got {type(cache).__name__}."
            )
        check_one_group(self)
        shape, layout = q.shape, self.positions.shape
        q = q.reshape(*layout, *q.shape[-2:])
        k, v = (None if x is None else x.reshape(*layout, *x.shape[-2:]) for x in (k, v))
        check_interleaved("rotary_frequencies", rotary_frequencies, interleaved=interleaved)
        before = cache
        if k is not None:
            cache, q = rotate_and_write_kv(
                cache, q, k, v, self.slots, self.positions, rotary_frequencies, interleaved=interleaved
            )
            note_write(before, cache, self.group_index)
        elif rotary_frequencies is not None:
            start = pools_of(cache).value_dim or 0
            (q,) = rotate_all((q,), self.positions, rotary_frequencies, interleaved=interleaved, start=start)
        follows = all(options.get(name) is None for name in OWN_PARTITIONS)
        if options.get("num_partitions") is None:
            options["num_partitions"] = self.num_partitions
        out = attend(
            q,
            cache,
            self.allocator,
            query_starts=self.query_starts,
            tree_mask=self.tree_mask,
            prefix_groups=self.prefix_groups if follows else None,
            plan=self.plan if follows and is_whole(q) else None,
            **options,
        )
        return cache, out.reshape(*shape[:-1], -1)


def check_one_group(step: AttentionStep) -> None:
    """Raises `ValueError` if the step has several groups of layers."""
    if step.allocator.num_groups > 1:
        raise ValueError(
            f"the step has {step.allocator.num_groups} groups of layers: call step.group(i), with the group of the "
            "layer, and attend with what it returns."
        )
