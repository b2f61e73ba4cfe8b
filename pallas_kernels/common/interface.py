"""The interface between the library and the kernels: an attention `Call`, and the `Kernel` that each folder exports.

Does not import Mosaic, because the code that chooses a kernel and its configuration is imported everywhere.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, Self

import jax
import jax.numpy as jnp

from pallas_kernels.common.partition_plan import PartitionPlan
from pallas_kernels.common.sizes import COLUMNS, is_8bit, round_up

MOST_ROWS = 64  # rows (query tokens * query heads of a KV head) of a program of the decode kernel
MOST_SEQS = 65535  # CUDA's limit for the grid's slowest axis
PARTIAL_BYTES = 128 * 1024 * 1024  # most memory for the partials of a plan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The checked options, as arrays. An option that is None costs a kernel nothing."""

    scale: jax.Array  # f32 []
    sliding_window: jax.Array | None = None  # int32 [], within 1 and the capacity of a table row
    logits_soft_cap: jax.Array | None = None  # f32 []
    alibi_slopes: jax.Array | None = None  # f32 [heads]
    sinks: jax.Array | None = None  # f32 [heads]
    k_scale: jax.Array | None = None  # f32 [], [kv_heads] or [blocks, block_size, kv_heads]; 8-bit caches only
    v_scale: jax.Array | None = None  # as k_scale
    tree_bits: jax.Array | None = None  # uint32 [seqs, q_len, words], the query tokens that each query token sees


def given[X, Y](x: X | None, function: Callable[[X], Y]) -> Y | None:
    """`function(x)`, or None if x is None: an option that is not used."""
    return None if x is None else function(x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """Shapes of a program's arrays, for one KV head."""

    q_len: int = 1  # query tokens of a sequence; unused by the prefill kernels, whose tokens are packed
    group: int  # query heads
    head_dim: int
    value_dim: int
    is_latent: bool = False  # the values are the first numbers of the keys
    block_size: int
    q_dtype: Any
    cache_dtype: Any

    @classmethod
    def of(cls, q: Any, k_cache: Any, v_cache: Any, value_dim: Any = None, *, q_len: int = 1, parts: int = 1) -> Self:
        """The shapes for q `[..., heads, head_dim]`. Without a v_cache `value_dim` is required. `parts` is the number
        of programs that share the query heads of a KV head."""
        _, block_size, kv_heads, head_dim = k_cache.shape
        return cls(
            q_len=q_len,
            group=q.shape[-2] // (kv_heads * parts),
            head_dim=head_dim,
            value_dim=value_dim if v_cache is None else v_cache.shape[3],
            is_latent=v_cache is None,
            block_size=block_size,
            q_dtype=q.dtype,
            cache_dtype=k_cache.dtype,
        )

    @property
    def rows(self) -> int:
        """Rows in the decode kernel, padded to the N dimension of its products."""
        return round_up(self.q_len * self.group, 8)

    @property
    def partial_size(self) -> int:
        """Size of the partial that a partition writes for one KV head, in float32 numbers."""
        return self.rows * round_up(self.value_dim, COLUMNS)

    @property
    def widths(self) -> tuple[int, ...]:
        """How many numbers each ring holds per token: one ring for a latent, otherwise one for keys and one for
        values."""
        return (self.head_dim,) if self.is_latent else (self.head_dim, self.value_dim)

    @property
    def itemsize(self) -> int:
        """Bytes per number in the cache."""
        return jnp.dtype(self.cache_dtype).itemsize

    @property
    def is_8bit(self) -> bool:
        return is_8bit(self.cache_dtype)

    @property
    def multiplied_dtype(self) -> Any:
        """The products' dtype: an 8-bit cache is widened to float16."""
        return jnp.float16 if self.is_8bit else self.q_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
    """The checked arguments of a call of attention.

    In a uniform call each sequence has the same number of query tokens. A packed call has `query_starts`. `group` query
    heads share one KV head. A query row is one (token, head) pair. A run is a few query tokens of a sequence that one
    program computes.
    """

    q: jax.Array  # [seqs, q_len, heads, head_dim]; packed [tokens, heads, head_dim]
    k_cache: jax.Array  # [blocks, block_size, kv_heads, head_dim]
    v_cache: jax.Array | None  # [blocks, block_size, kv_heads, value_dim]; None: the first numbers of k_cache
    block_tables: jax.Array  # int32 [seqs, max_blocks]
    lengths: jax.Array  # int32 [seqs], within 0 and the capacity of a table row
    options: AttentionOptions
    value_dim: int = dataclasses.field(metadata=dict(static=True))  # the width of v_cache and of the output
    query_starts: jax.Array | None = None  # int32 [seqs + 1]; None: uniform
    tree_mask: jax.Array | None = None  # uint32 [seqs, q_len, words]; uniform calls only
    # int32 [seqs], uniform calls with a window only: the last num_read tokens of each sequence are query tokens. Those
    # before are padding, and a block that only padding would see is never read. None: there is no padding.
    num_read: jax.Array | None = None
    # False: every query sees the whole sequence, as if at the last position.
    causal: bool = dataclasses.field(default=True, metadata=dict(static=True))
    plan: PartitionPlan | None = None  # the plan of a step; None: the call makes its own if that pays

    @property
    def tokens_per_seq(self) -> int | None:
        """Query tokens of each sequence; None for a packed call."""
        return self.q.shape[1] if self.query_starts is None else None

    @property
    def block_size(self) -> int:
        return self.k_cache.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k_cache.shape[2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def group(self) -> int:
        return self.q.shape[-2] // self.kv_heads

    @property
    def capacity(self) -> int:
        """Tokens that fit into a table row."""
        return self.block_tables.shape[1] * self.block_size

    @property
    def out_shape(self) -> tuple[int, ...]:
        return *self.q.shape[:-1], self.value_dim

    def seq_starts(self) -> jax.Array:
        """The first token of each sequence in packed q, int32 `[seqs + 1]`, made ascending and clamped to q."""
        assert self.query_starts is not None
        return jax.lax.cummax(jnp.clip(self.query_starts, 0, self.q.shape[0]))

    def num_new(self) -> jax.Array | int:
        """Query tokens of each sequence."""
        return self.q.shape[1] if self.query_starts is None else jnp.diff(self.seq_starts())

    def shapes(self, q_len: int = 1) -> Shapes:
        """The shapes of a run of `q_len` query tokens."""
        return Shapes.of(self.q, self.k_cache, self.v_cache, self.value_dim, q_len=q_len)

    def visible(self, window: int | None) -> int:
        """Most tokens that a query can see, given the sliding window if it is known."""
        return self.capacity if window is None else min(self.capacity, window)

    def run_tokens(self, most_rows: int = MOST_ROWS) -> int:
        """Query tokens in a run of at most `most_rows` rows; at least one."""
        most = max(1, most_rows // self.group)
        if self.tokens_per_seq is None:
            return most
        num_runs = -(-self.tokens_per_seq // most)
        return -(-self.tokens_per_seq // num_runs)

    def num_runs(self, run: int) -> int:
        """Most runs of `run` query tokens that the call can have: no run has tokens of two sequences."""
        if self.tokens_per_seq is not None:
            return self.q.shape[0] * -(-self.tokens_per_seq // run)
        # The last run of each nonempty sequence may have a single token.
        tokens = self.q.shape[0]
        return (tokens + (run - 1) * min(self.lengths.shape[0], tokens)) // run

    def can_follow(self, total_partitions: int) -> bool:
        """Whether a kernel can follow a plan of `total_partitions` partitions.

        No kernel does for a single sequence, non-causal queries, a latent, a sequence of several runs, more partitions
        than the grid allows, or partials that need too much memory.
        """
        q_len = self.tokens_per_seq
        if self.v_cache is None or q_len is None or not self.causal or self.q.shape[0] == 1:
            return False
        num_bytes = total_partitions * self.kv_heads * self.shapes(q_len).partial_size * 4
        return self.run_tokens() == q_len and total_partitions <= MOST_SEQS and num_bytes <= PARTIAL_BYTES

    @property
    def follows_plan(self) -> bool:
        """Whether the call has a plan that a kernel can follow."""
        return self.plan is not None and self.can_follow(self.plan.total_partitions)

    def option_limits(self) -> Iterator[str]:
        """Reasons to refuse the call because of an option that no kernel supports."""
        options = self.options
        if self.k_cache.dtype.itemsize > 1 and (options.k_scale is not None or options.v_scale is not None):
            yield (
                "the Mosaic GPU kernels support k_scale and v_scale with 8-bit caches only; "
                f'got k_cache.dtype={self.k_cache.dtype!s}. Pass implementation="xla".'
            )
        # Both depend on a token's depth in the tree; the kernels know only its index.
        if self.tree_mask is not None and (options.sliding_window is not None or options.alibi_slopes is not None):
            yield (
                "the Mosaic GPU kernels do not support a tree_mask with sliding_window or alibi_slopes. "
                'Pass implementation="xla".'
            )


class Gpu(Protocol):
    @property
    def num_sms(self) -> int: ...
    @property
    def compute_capability(self) -> float: ...


def is_hopper(gpu: Gpu) -> bool:
    """Whether the GPU has the instructions of sm_90a, `wgmma` among them."""
    return gpu.compute_capability == 9.0


@dataclasses.dataclass(frozen=True)
class Hints:
    """Static facts about a call, in addition to its shapes."""

    num_partitions: int | None = None  # per sequence; None: the kernel chooses
    window: int | None = None  # the sliding window in tokens, if it is static


class AttentionConfig(Protocol):
    """A kernel's configuration. It holds no arrays, so it can be a static argument of a jitted function."""

    @property
    def run(self) -> int:
        """Query tokens of a run, which the kernel treats as a sequence of its own; 0 if the kernel needs packed
        tokens."""

    @property
    def at_once(self) -> int | None:
        """Partitions of a plan that run at the same time, per KV head; None if the call follows no plan."""

    @property
    def partitions(self) -> int | Literal["plan"]:
        """Partitions of each sequence, or "plan"."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The export of a kernel's folder. The types of `call` and `config` are the kernel's own: `Call` and an
    `AttentionConfig` for attention."""

    name: str  # in profiles
    title: str  # in messages
    limits: Callable[[Any, Gpu, Hints], Iterator[str]]  # (call, gpu, hints) -> reasons to refuse the call
    configure: Callable[[Any, Gpu, Hints], Any]  # (call, gpu, hints) -> config
    launch: Callable[[Any, Any], Any]  # (call, config) -> results; imports Mosaic
