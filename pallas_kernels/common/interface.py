"""The interface between the library and the kernels: a call of attention, and the `Kernel` that each folder exports.

Without Mosaic: what chooses a kernel and its configuration is imported everywhere.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, Self

import jax
import jax.numpy as jnp

from pallas_kernels.common.partition_plan import PartitionPlan
from pallas_kernels.common.sizes import COLUMNS, is_8bit, round_up

MOST_ROWS = 64  # query tokens times heads of a KV head, in a program of the decode kernel
MOST_SEQS = 65535  # CUDA's limit for the grid's slowest axis
PARTIAL_BYTES = 128 * 1024 * 1024  # the most memory for the partials of a plan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Checked, as arrays. None: the option is left out, and costs a kernel nothing."""

    scale: jax.Array  # f32 []
    sliding_window: jax.Array | None = None  # int32 [], within 1 and the capacity of a table row
    logits_soft_cap: jax.Array | None = None  # f32 []
    alibi_slopes: jax.Array | None = None  # f32 [heads]
    sinks: jax.Array | None = None  # f32 [heads]
    k_scale: jax.Array | None = None  # f32 [], [kv_heads] or [blocks, block_size, kv_heads], of an 8-bit cache
    v_scale: jax.Array | None = None  # as k_scale
    tree_bits: jax.Array | None = None  # uint32 [seqs, q_len, words], which of the q_len tokens each of them sees


def given[X, Y](x: X | None, function: Callable[[X], Y]) -> Y | None:
    """`function(x)`; None of None, for an option that is left out."""
    return None if x is None else function(x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """The shapes of a program's arrays, for one KV head."""

    q_len: int = 1  # query tokens of a sequence; the prefill kernels, whose tokens are packed, do not ask
    group: int  # query heads
    head_dim: int
    value_dim: int
    is_latent: bool = False  # whether the values are the first numbers of the keys
    block_size: int
    q_dtype: Any
    cache_dtype: Any

    @classmethod
    def of(cls, q: Any, k_cache: Any, v_cache: Any, value_dim: Any = None, *, q_len: int = 1, parts: int = 1) -> Self:
        """For q `[..., heads, head_dim]`. `value_dim`: without v_cache. `parts` share the query heads of a KV head."""
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
        """In the decode kernel: padded to the N dimension of its products."""
        return round_up(self.q_len * self.group, 8)

    @property
    def partial_size(self) -> int:
        """Float32 numbers of the sums that a partition of one KV head writes to memory."""
        return self.rows * round_up(self.value_dim, COLUMNS)

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of a token that are fetched at a time: a latent at once, keys and values each by themselves."""
        return (self.head_dim,) if self.is_latent else (self.head_dim, self.value_dim)

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the cache."""
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
    """Checked arguments. Uniform: each sequence has the same number of query tokens. Packed: with `query_starts`.

    `group` query heads read one KV head. A query row is one (token, head) pair. A run is a few query tokens of a
    sequence that one program computes.
    """

    q: jax.Array  # [seqs, q_len, heads, head_dim]; packed [tokens, heads, head_dim]
    k_cache: jax.Array  # [blocks, block_size, kv_heads, head_dim]
    v_cache: jax.Array | None  # [blocks, block_size, kv_heads, value_dim]; None: the first numbers of k_cache
    block_tables: jax.Array  # int32 [seqs, max_blocks]
    lengths: jax.Array  # int32 [seqs], within 0 and the capacity of a table row
    options: AttentionOptions
    value_dim: int = dataclasses.field(metadata=dict(static=True))  # the width of v_cache and of the output
    query_starts: jax.Array | None = None  # int32 [seqs + 1]; None: uniform
    tree_mask: jax.Array | None = None  # uint32 [seqs, q_len, words]; of uniform calls
    # int32 [seqs], uniform calls with a window: the number of query tokens of each sequence, the last ones. The others
    # are padding, and what only they would see is never read. None: all are query tokens.
    num_read: jax.Array | None = None
    # False: every query sees the whole sequence, at the position of the last token.
    causal: bool = dataclasses.field(default=True, metadata=dict(static=True))
    plan: PartitionPlan | None = None  # made by a step; None: the call makes its own if that pays

    @property
    def tokens_per_seq(self) -> int | None:
        """Query tokens of each sequence; None: packed."""
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
        """Tokens that a row of the table has room for."""
        return self.block_tables.shape[1] * self.block_size

    @property
    def out_shape(self) -> tuple[int, ...]:
        return *self.q.shape[:-1], self.value_dim

    def seq_starts(self) -> jax.Array:
        """Packed: the first row of each sequence in q, int32 `[seqs + 1]`, at most the rows of q, not descending."""
        assert self.query_starts is not None
        return jax.lax.cummax(jnp.clip(self.query_starts, 0, self.q.shape[0]))

    def num_new(self) -> jax.Array | int:
        """Query tokens of each sequence."""
        return self.q.shape[1] if self.query_starts is None else jnp.diff(self.seq_starts())

    def shapes(self, q_len: int = 1) -> Shapes:
        """For runs of `q_len` query tokens."""
        return Shapes.of(self.q, self.k_cache, self.v_cache, self.value_dim, q_len=q_len)

    def visible(self, window: int | None) -> int:
        """The most tokens that a query can see, with a sliding window if it is known."""
        return self.capacity if window is None else min(self.capacity, window)

    def run_tokens(self, most_rows: int = MOST_ROWS) -> int:
        """Query tokens in a run of at most `most_rows` rows, but one token at least."""
        most = max(1, most_rows // self.group)
        if self.tokens_per_seq is None:
            return most
        num_runs = -(-self.tokens_per_seq // most)
        return -(-self.tokens_per_seq // num_runs)

    def num_runs(self, run: int) -> int:
        """Runs of `run` query tokens, at most: none has tokens of two sequences."""
        if self.tokens_per_seq is not None:
            return self.q.shape[0] * -(-self.tokens_per_seq // run)
        # The last run of each sequence with tokens may have one token.
        tokens = self.q.shape[0]
        return (tokens + (run - 1) * min(self.lengths.shape[0], tokens)) // run

    def can_follow(self, total_partitions: int) -> bool:
        """Whether a kernel follows a plan of that many partitions: not for one sequence, queries that are not causal, a
        latent, prompts in several runs, more partitions than the grid has, nor if the partials need too much
        memory."""
        q_len = self.tokens_per_seq
        if self.v_cache is None or q_len is None or not self.causal or self.q.shape[0] == 1:
            return False
        num_bytes = total_partitions * self.kv_heads * self.shapes(q_len).partial_size * 4
        return self.run_tokens() == q_len and total_partitions <= MOST_SEQS and num_bytes <= PARTIAL_BYTES

    @property
    def follows_plan(self) -> bool:
        """Whether it came with a plan that a kernel follows."""
        return self.plan is not None and self.can_follow(self.plan.total_partitions)

    def option_limits(self) -> Iterator[str]:
        """Options that no kernel supports."""
        options = self.options
        if self.k_cache.dtype.itemsize > 1 and (options.k_scale is not None or options.v_scale is not None):
            yield (
                "the Mosaic GPU kernels take k_scale and v_scale with 8-bit caches; "
                f'got k_cache.dtype={self.k_cache.dtype!s}. Pass implementation="xla".'
            )
        # Both count from a token's depth; the kernels know its ordinal only.
        if self.tree_mask is not None and (options.sliding_window is not None or options.alibi_slopes is not None):
            yield (
                "the Mosaic GPU kernels take a tree_mask without sliding_window and alibi_slopes. "
                'Pass implementation="xla".'
            )


class Gpu(Protocol):
    @property
    def num_sms(self) -> int: ...
    @property
    def compute_capability(self) -> float: ...


def is_hopper(gpu: Gpu) -> bool:
    """Whether it has sm_90a, with `wgmma` and the copy engine."""
    return gpu.compute_capability == 9.0


@dataclasses.dataclass(frozen=True)
class Hints:
    """Static facts about a call of attention, besides its shapes."""

    num_partitions: int | None = None  # per sequence; None: chosen by the kernel
    window: int | None = None  # the sliding window in tokens, if it is a number


class AttentionConfig(Protocol):
    """A kernel's configuration. It holds no array, so that a jitted function can be keyed on it."""

    @property
    def run(self) -> int:
        """Query tokens of a run, which the kernel sees as a sequence of its own; 0: the kernel needs packed tokens."""

    @property
    def at_once(self) -> int | None:
        """Partitions of a plan, of a KV head, that run at the same time; None: it follows none."""

    @property
    def partitions(self) -> int | Literal["plan"]:
        """Partitions of each sequence."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """`call` and `config` have the kernel's own types: `Call` and an `AttentionConfig` for attention."""

    name: str  # as a profile shows it
    title: str  # as messages name it
    limits: Callable[[Any, Gpu, Hints], Iterator[str]]  # (call, gpu, hints) -> reasons to refuse the call
    configure: Callable[[Any, Gpu, Hints], Any]  # (call, gpu, hints) -> config
    launch: Callable[[Any, Any], Any]  # (call, config) -> results; imports Mosaic
