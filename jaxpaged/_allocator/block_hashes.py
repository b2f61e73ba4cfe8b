"""Hashes of full blocks and of all tokens before them."""

import jax
import jax.numpy as jnp

from jaxpaged._threefry import threefry


def chain_hashes(blocks: jax.Array, salts: jax.Array, secret: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two hashes for each block, of its salt, of its tokens and of all before it, uint32 `[seqs, columns]` each.

        hashes[i] = F(outer_key, sum over p < (i + 1) * block_size of F(inner_key, (p, tokens[p])))
        inner_key, outer_key = F(secret[:2], (salt, 0)), F(secret[2:], (salt, 0))

    F(key, block) is Threefry-2x32, taken for a pseudo-random function: a key of 64 bits, 64 bits in, 64 bits out. The
    two hashes are the halves. The sum is modulo 2^32 in each half, so that one prefix sum makes all hashes.

    Without the secret, tokens chosen beforehand collide by chance only. Two prefixes of one salt differ at some p, and
    F is independent there: their sums are equal with probability 2^-64. F makes independent hashes of different sums,
    and so do different salts, which have different keys. Two tags of 32 bits are equal with probability 2^-32.

    References:
        Bellare, Guerin, Rogaway, XOR MACs (1995), for the sum of a function of position and word.
    """
    num_seqs, num_columns, block_size = blocks.shape
    salts = salts.astype(jnp.uint32)[:, None]
    inner_key, outer_key = (
        threefry((secret[i], secret[i + 1]), (salts, jnp.zeros_like(salts))) for i in (0, 2)
    )  # [seqs, 1] each half
    position = jnp.arange(num_columns * block_size, dtype=jnp.uint32)[None]
    words = threefry(inner_key, (position, blocks.reshape(num_seqs, -1).astype(jnp.uint32)))
    x, y = (half.reshape(blocks.shape).sum(axis=2, dtype=jnp.uint32).cumsum(axis=1, dtype=jnp.uint32) for half in words)
    return threefry(outer_key, (x, y))
