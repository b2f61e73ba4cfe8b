"""The work list of the prefill kernels: the query tokens of each item, and the order of the items.

XLA makes the list on the device from true lengths, before the kernel. All layers of a step share it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common.interface import Call
from pallas_kernels.common.sizes import ceil_div, rem
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
    num_items = ceil_div(counts, item_tokens)
    owners = jnp.arange(seqs + 2, dtype=jnp.int32)
    # XLA makes one kernel of each comparison of all pairs, but several of a sort or a prefix sum.
    begins = jnp.where(owners[None] < owners[:, None], num_items[None], 0).sum(axis=1, dtype=jnp.int32)
    index = jnp.arange(max_entries(tokens, seqs, item_tokens), dtype=jnp.int32)
    owner = ((begins + num_items)[None] <= index[:, None]).sum(axis=1, dtype=jnp.int32)
    exists = owner < seqs + 2
    owner = jnp.minimum(owner, seqs + 1)
    in_sequence = index - begins[owner]
    offset = in_sequence * item_tokens
    num_tokens = jnp.clip(counts[owner] - offset, 0, item_tokens)
    position = lengths[owner] - (counts[owner] - offset if config.causal else 1)
    seq = jnp.clip(owner - 1, 0, seqs - 1)
    entries = jnp.stack([seq, starts[owner] + offset, position, num_tokens, lengths[owner]], axis=1)

    num_seen = position + (num_tokens if config.causal else 1)
    num_tiles = jnp.maximum(ceil_div(num_seen, config.tile_tokens), 1)
    longest_first = _longest_first(num_tiles, owner, exists)
    by_sequence = _by_sequence(lengths, num_items, owner, in_sequence)
    token_bytes = 2 * call.kv_heads * call.head_dim * call.k_cache.dtype.itemsize
    fits = lengths.astype(jnp.float32).sum() * token_bytes <= L2_BYTES
    place = jnp.where(fits, longest_first, jnp.where(exists, by_sequence, index))
    return WorkList(jnp.zeros_like(entries).at[place].set(entries, unique_indices=True), num_items.sum(keepdims=True))


def _longest_first(num_tiles: jax.Array, owner: jax.Array, exists: jax.Array) -> jax.Array:
    """Places with the longest entries first, so that short ones fill the gaps at the end. Entries of about the same
    length are ordered by sequence, and in a sequence from last to first."""
    about = (8 * jnp.log2(num_tiles.astype(jnp.float32))).astype(jnp.int32)
    keys = jnp.where(exists, -about * (owner.max() + 1) + owner, jnp.int32(2**31 - 1))
    index = jnp.arange(len(keys), dtype=jnp.int32)
    is_before = (keys[None] < keys[:, None]) | ((keys[None] == keys[:, None]) & (index[None] > index[:, None]))
    return is_before.sum(axis=1, dtype=jnp.int32)


def _by_sequence(lengths: jax.Array, num_items: jax.Array, owner: jax.Array, in_sequence: jax.Array) -> jax.Array:
    """Places such that keys and values are read again soon: sequence by sequence, the longest sequence first.

    Sequences alternate between longest entry first and longest entry last, so that programs get equal shares. The last
    sequence starts with its longest, so that its short entries fill the gaps at the end.
    """
    index = jnp.arange(len(lengths), dtype=jnp.int32)
    is_before = lengths[None] > lengths[:, None]
    is_before |= (lengths[None] == lengths[:, None]) & (index[None] < index[:, None])
    rank = is_before.sum(axis=1, dtype=jnp.int32)
    starts = jnp.where(is_before, num_items[None], 0).sum(axis=1, dtype=jnp.int32)
    is_turned = (len(lengths) - 1 - rank[owner]) % 2 == 0  # padding counts as two sequences without tokens
    return starts[owner] + jnp.where(is_turned, num_items[owner] - 1 - in_sequence, in_sequence)


def item_index(i: jax.Array, program: jax.Array, num_programs: int) -> jax.Array:
    """The index of a program's i-th item. Items are dealt back and forth, so that each program gets some long ones."""
    to_and_fro = jnp.where(rem(i, 2) == 0, program, num_programs - 1 - program)
    return i * num_programs + to_and_fro
