"""Trees of drafted tokens, as bit masks of the newest tokens that each query sees.

With bits, one shift shows whether a query sees a token; with parents, every logit would need a walk up the tree. A
token's mask has 4 bytes for each 32 newest tokens. Its depth is the number of newest tokens that it sees before itself,
which in a tree are its ancestors.

The bits need not form a tree: a query sees the tokens whose bits are set, whatever these tokens see.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxpaged._integers import as_int32, known_values
from jaxpaged._one_program import one_program
from pallas_kernels.common.interface import Call

BITS = 32  # bits of a word


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """The trees of a batch.

    A token's ordinal is the number of tokens stored before it, in any branch. The position of one of the newest tokens
    is the length of the history plus the token's depth.
    """

    bits: jax.Array  # uint32 [seqs, q_len, words]; a query's own bit is set, bits of later tokens are not
    starts: jax.Array  # int32 [seqs], ordinal of each sequence's first newest token
    depths: jax.Array  # int32 [seqs, words * 32], depths of the newest tokens; padding before the sequence counts

    def positions(self, ordinals: jax.Array) -> jax.Array:
        """The positions of tokens, int32 [seqs, n], from their ordinals [seqs, n]."""
        index, is_new = self._index(ordinals)
        depths = jnp.take_along_axis(self.depths, jnp.clip(index, 0, self.depths.shape[1] - 1), axis=1)
        return jnp.where(is_new, self.starts[:, None] + depths, ordinals)

    def distances(self, query_positions: jax.Array, ordinals: jax.Array) -> jax.Array:
        """Distances int32 [seqs, q_len, n] from tokens with ordinals [seqs, n] to queries at positions [seqs, q_len].

        A distance is negative if the query does not see the token, and 0 if it sees a token that itself sees more
        tokens than the query does.
        """
        index, is_new = (x[:, None] for x in self._index(ordinals))  # [seqs, 1, n]
        hidden = jnp.zeros((*self.bits.shape[:2], ordinals.shape[1]), bool)
        for i in range(self.bits.shape[2]):
            bit = self.bits[:, :, i, None] >> (index % BITS).astype(jnp.uint32)
            hidden |= (index // BITS == i) & (bit % 2 == 0)
        distances = query_positions[:, :, None] - self.positions(ordinals)[:, None]
        return jnp.where(hidden, -1, jnp.where(is_new, jnp.maximum(distances, 0), distances))

    def _index(self, ordinals: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Indices among the newest tokens of the tokens with these ordinals, and whether there are such tokens."""
        index = ordinals - self.starts[:, None]
        return index, (index >= 0) & (index < self.depths.shape[1])


def tree_mask(parents: ArrayLike) -> jax.Array:
    """The `tree_mask` of `paged_attention` for trees given by their parents.

    Args:
        parents: int32 `[..., n]`: for each of a sequence's n newest tokens the index of its parent, an earlier token;
            negative if it directly follows the history.

    Returns:
        uint32 `[..., n, ceil(n / 32)]`: each token sees itself and its ancestors. Bit `j % 32` of word `j // 32` is for
        newest token j.

    Raises:
        ValueError: `parents` is not int32 `[..., n]`, or a parent is known while tracing and is not before its token.

    Example:
        >>> import jax.numpy as jnp, jaxpaged
        >>> jaxpaged.tree_mask(jnp.array([-1, 0, 0, 1]))[:, 0].tolist()  # 0 -> 1 -> 3, 0 -> 2
        [1, 3, 5, 11]
    """
    known, parents = known_values(parents), as_int32(parents)
    if parents.dtype != jnp.int32 or parents.ndim == 0 or parents.shape[-1] == 0:
        raise ValueError(f"parents must be int32 [..., n]; got {parents.dtype} {list(parents.shape)}.")
    num_tokens = parents.shape[-1]
    if known is not None and (is_wrong := known >= np.arange(num_tokens)).any():
        at = tuple(np.argwhere(is_wrong)[0].tolist())
        raise ValueError(f"a parent must be before its token; got parent {known[at]} of token {list(at)}.")
    return _mask(parents)


@one_program()
def _mask(parents: jax.Array) -> jax.Array:
    num_tokens = parents.shape[-1]
    own = _own_bit(jnp.arange(num_tokens, dtype=jnp.int32), -(-num_tokens // BITS))  # [n, words]
    bits = jnp.broadcast_to(own, (*parents.shape, own.shape[-1]))
    for _ in range((num_tokens - 1).bit_length()):  # each round doubles the distance up the tree that a token sees
        above = jnp.take_along_axis(bits, jnp.maximum(parents, 0)[..., None], axis=-2)
        bits |= jnp.where((parents >= 0)[..., None], above, jnp.uint32(0))
        grandparents = jnp.take_along_axis(parents, jnp.maximum(parents, 0), axis=-1)
        parents = jnp.where(parents >= 0, grandparents, -1)
    return bits


def from_rows(mask: jax.Array | None, lengths: jax.Array) -> Tree | None:
    """The trees of a mask uint32 [seqs, q_len, words] for the last q_len tokens of each sequence; None without a
    mask."""
    if mask is None:
        return None
    q_len, words = mask.shape[1:]
    index = jnp.arange(q_len, dtype=jnp.int32)[None]
    starts = lengths - q_len
    # Padding before a sequence is seen, because depths must count it as ordinals do.
    bits = mask | _bits_below(jnp.maximum(-starts, 0), words)[:, None]
    bits = (bits | _own_bit(index, words)) & _bits_below(index + 1, words)  # a token sees itself and no later token
    depths = jax.lax.population_count(bits & _bits_below(index, words)).sum(axis=-1).astype(jnp.int32)
    return Tree(bits, starts, jnp.pad(depths, ((0, 0), (0, words * BITS - q_len))))


def query_positions(call: Call, tree: Tree | None) -> jax.Array:
    """The position of each query of a uniform call, int32 [seqs, q_len]; negative if it sees no token."""
    q_len = call.q.shape[1]
    if not call.causal:
        return jnp.broadcast_to(call.lengths[:, None] - 1, (call.lengths.shape[0], q_len))
    from_last = jnp.arange(-q_len, 0, dtype=jnp.int32)[None]
    ordinals = call.lengths[:, None] + from_last
    if call.num_read is not None:
        ordinals = jnp.where(from_last >= -call.num_read[:, None], ordinals, -1)
    return ordinals if tree is None else tree.positions(ordinals)


def _own_bit(index: jax.Array, words: int) -> jax.Array:
    return _bits_below(index + 1, words) & ~_bits_below(index, words)


def _bits_below(index: jax.Array, words: int) -> jax.Array:
    """Sets the first `index` bits: int32 [...] to uint32 [..., words]."""
    first = jnp.arange(words, dtype=jnp.int32) * BITS
    counts = jnp.clip(index[..., None] - jnp.broadcast_to(first, (*index.shape, words)), 0, BITS)
    return jnp.where(counts == BITS, ~jnp.uint32(0), (jnp.uint32(1) << (counts % BITS).astype(jnp.uint32)) - 1)
