"""The work list of the prefill kernels: the query tokens of each item, and the order of the items.

XLA makes the list on the device from true lengths, before the kernel. All layers of a step share it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common.interface import Call
from pallas_kernels.common.sizes import rem
from pallas_kernels.prefill.config import Cut

# Keys and values that fit into the L2 cache (H100: 50 MB). 8 x 1024 tokens with 32/32 heads have 134 MB.
L2_BYTES = 40e6
FIELDS = ("seq", "q_row", "position", "num_tokens", "length")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WorkList:
    """The work list. An entry is one item for each KV head, or for each part of a large group of heads."""

    entries: jax.Array  # int32 [max_entries, fields]: sequence, first row in q, position, tokens, sequence length
    num_entries: jax.Array  # int32 [1]


def max_entries(tokens: int, seqs: int, item_tokens: int) -> int:
    return -(-tokens // item_tokens) + seqs + 2


def make_work_list(call: Call, config: Cut) -> WorkList:
    """Divides each sequence's newest tokens, `query_starts[s] : query_starts[s + 1]` of q, into runs of
    `config.item_tokens`.

    The rows of q before the first and after the last sequence are padding, which sees no token. They are divided in the
    same way.
    """
    assert call.query_starts is not None
    tokens, lengths = call.q.shape[0], call.lengths
    seqs, item_tokens = lengths.shape[0], config.item_tokens
    starts = jnp.clip(call.query_starts, 0, tokens)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), starts])
    counts = jnp.concatenate([starts[1:], jnp.full(1, tokens, jnp.int32)]) - starts  # padding is first and last
    lengths = jnp.pad(lengths, 1)
    ends = jnp.cumsum(-(-counts // item_tokens), dtype=jnp.int32)
    order = jnp.arange(max_entries(tokens, seqs, item_tokens), dtype=jnp.int32)
    owner = jnp.searchsorted(ends, order, side="right", method="scan_unrolled").astype(jnp.int32)
    exists = owner < seqs + 2
    owner = jnp.minimum(owner, seqs + 1)
    offset = (order - (ends - (-(-counts // item_tokens)))[owner]) * item_tokens
    num_tokens = jnp.clip(counts[owner] - offset, 0, item_tokens)
    position = lengths[owner] - (counts[owner] - offset if config.causal else 1)
    seq = jnp.clip(owner - 1, 0, seqs - 1)
    entries = jnp.stack([seq, starts[owner] + offset, position, num_tokens, lengths[owner]], axis=1)

    num_seen = position + (num_tokens if config.causal else 1)
    num_tiles = jnp.maximum(-(-num_seen // config.tile_tokens), 1)
    longest_first = _longest_first(num_tiles, owner, exists)
    by_sequence = _by_sequence(lengths, order, owner, ends, exists)
    token_bytes = 2 * call.kv_heads * call.head_dim * call.k_cache.dtype.itemsize
    fits = lengths.astype(jnp.float32).sum() * token_bytes <= L2_BYTES
    return WorkList(entries[jnp.where(fits, longest_first, by_sequence)], ends[-1:])


def _longest_first(num_tiles: jax.Array, owner: jax.Array, exists: jax.Array) -> jax.Array:
    """The order with the longest entries first, so that short ones fill the gaps at the end. Entries of about the same
    length are ordered by sequence."""
    about = (8 * jnp.log2(num_tiles.astype(jnp.float32))).astype(jnp.int32)
    keys = jnp.where(exists, -about * (owner.max() + 1) + owner, jnp.int32(2**31 - 1))
    return keys.shape[0] - 1 - jnp.argsort(keys[::-1], stable=True).astype(jnp.int32)


def _by_sequence(
    lengths: jax.Array, order: jax.Array, owner: jax.Array, ends: jax.Array, exists: jax.Array
) -> jax.Array:
    """Orders the entries so that keys and values are read again soon: sequence by sequence, the longest sequence first.

    Sequences alternate between longest entry first and longest entry last, so that programs get equal shares. The last
    sequence starts with its longest, so that its short entries fill the gaps at the end.
    """
    counts = jnp.diff(ends, prepend=jnp.int32(0))
    ranked = jnp.argsort(-lengths, stable=True)
    rank = jnp.argsort(ranked, stable=True)
    starts = (jnp.cumsum(counts[ranked], dtype=jnp.int32) - counts[ranked])[rank]
    in_sequence = order - (ends - counts)[owner]
    is_turned = (lengths.shape[0] - 1 - rank[owner]) % 2 == 0  # padding counts as two sequences without tokens
    turned = jnp.where(is_turned, counts[owner] - 1 - in_sequence, in_sequence)
    target = jnp.where(exists, starts[owner] + turned, order)
    return jnp.zeros_like(order).at[target].set(order, unique_indices=True)


def item_index(i: jax.Array, program: jax.Array, num_programs: int) -> jax.Array:
    """The index of a program's i-th item. Items are dealt back and forth, so that each program gets some long ones."""
    to_and_fro = jnp.where(rem(i, 2) == 0, program, num_programs - 1 - program)
    return i * num_programs + to_and_fro
