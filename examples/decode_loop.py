"""A minimal decode loop: allocate, write, attend, select, stop and free, inside one `jax.jit`.

The model is a single attention layer with random weights. Run `python examples/decode_loop.py`, then copy the file and
replace `model` with your own.
"""

import argparse

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged import AttentionStep, BlockAllocator, KVCache

SEQS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, EOS = 4, 8, 2, 64, 1000, 302
BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS, MAX_NEW_TOKENS = 16, 32, 8, 100

keys = jax.random.split(jax.random.key(0), 3)
embedding, head = jax.random.normal(keys[0], (2, VOCAB, HEADS * HEAD_DIM), jnp.bfloat16)
q_proj = jax.random.normal(keys[1], (HEADS * HEAD_DIM, HEADS * HEAD_DIM), jnp.bfloat16) * 0.05
k_proj, v_proj = jax.random.normal(keys[2], (2, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM), jnp.bfloat16) * 0.05
weights = {"embedding": embedding, "head": head, "q": q_proj, "k": k_proj, "v": v_proj}


def model(weights, tokens, cache, step):
    """Computes one token of each sequence: tokens [seqs] -> the new cache, logits [seqs, vocab]."""
    x = weights["embedding"][tokens]
    q = (x @ weights["q"]).reshape(SEQS, HEADS, HEAD_DIM)
    k, v = ((x @ weights[name]).reshape(SEQS, KV_HEADS, HEAD_DIM) for name in ("k", "v"))
    cache, out = step.attend(q, k, v, cache)
    return cache, (x + out.reshape(x.shape)) @ weights["head"].T


def decode(weights, cache, allocator, tokens):
    """Generates from one token per sequence. Returns int32 [seqs, MAX_NEW_TOKENS], -1 after a sequence's end."""

    def one_step(carry):
        i, cache, allocator, last, running, generated = carry
        allocator, slots, ok = allocator.append(running)
        running &= ok  # a sequence that gets no block ends; the others continue
        cache, logits = model(weights, last, cache, AttentionStep.create(allocator, slots))
        token = logits.argmax(axis=-1).astype(jnp.int32)
        generated = generated.at[:, i].set(jnp.where(running, token, -1))
        running &= token != EOS
        return i + 1, cache, allocator.free(~running), token, running, generated

    def go_on(carry):
        return (carry[0] < MAX_NEW_TOKENS) & carry[4].any()

    running, generated = jnp.ones(SEQS, bool), jnp.full((SEQS, MAX_NEW_TOKENS), -1, jnp.int32)
    carry = (0, cache, allocator, tokens, running, generated)
    _, cache, allocator, _, _, generated = lax.while_loop(go_on, one_step, carry)
    return cache, allocator, generated


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    cache = KVCache.create(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    allocator = BlockAllocator.create(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_seqs=SEQS, max_blocks_per_seq=MAX_BLOCKS
    )
    loop = jax.jit(decode, donate_argnames=("cache", "allocator"))
    cache, allocator, generated = loop(weights, cache, allocator, jnp.arange(SEQS, dtype=jnp.int32))
    print(*([token for token in row if token >= 0] for row in generated.tolist()), sep="\n")
    print(f"{allocator.num_free} of {NUM_BLOCKS - 1} blocks are free")
