"""Prompts into the cache: a ragged batch, padded in front, in chunks that bound what their activations take."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from llama import Llama

import jaxpaged

PREFILL_CHUNK = 256  # tokens a sequence

Caches = tuple[jaxpaged.KVCache, ...]  # one a layer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts:
    chunks: jax.Array  # int32 [chunks, prompts, tokens], each prompt at the end of its row, padding before it
    lengths: jax.Array  # int32 [prompts]

    @property
    def rows(self) -> jax.Array:
        """int32 [prompts, all tokens], the chunks side by side."""
        return self.chunks.swapaxes(0, 1).reshape(self.lengths.shape[0], -1)


def pad_prompts(prompts: list[list[int]], *, num_cached: int = 0) -> Prompts:
    """Where `num_cached` tokens of each prompt will be found in the cache, chunks are no longer than what is left."""
    longest = max(map(len, prompts))
    chunk = min(PREFILL_CHUNK, max(-(-(longest - num_cached) // 16), 1) * 16)
    num_chunks = max(-(-longest // chunk), 1)
    rows = np.zeros((len(prompts), num_chunks * chunk), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[len(row) - len(prompt) :] = prompt
    return Prompts(
        jnp.asarray(rows.reshape(len(prompts), num_chunks, chunk).swapaxes(0, 1)),
        jnp.asarray([len(prompt) for prompt in prompts], jnp.int32),
    )


def write_prompts(
    model: Llama,
    caches: Caches,
    allocator: jaxpaged.BlockAllocator,
    prompts: Prompts,
    *,
    seqs: jax.Array | None = None,  # int32 [prompts], the allocator's row of each; None: the first rows
    num_cached: jax.Array | None = None,  # int32 [prompts], so many first tokens of each are there already
) -> tuple[Caches, jaxpaged.BlockAllocator, jax.Array, jax.Array]:
    """Allocates and writes the prompts, inside the caller's jit.

    Returns:
        caches and allocator: the new ones.
        logits: after each prompt's last token, f32 [prompts, vocab_size].
        ok: bool [prompts], false where the pool had too few blocks.
    """
    num_chunks, num_prompts, chunk = prompts.chunks.shape
    seqs = jnp.arange(num_prompts) if seqs is None else seqs
    num_new = prompts.lengths if num_cached is None else prompts.lengths - num_cached
    num_tokens = jnp.zeros_like(allocator.lengths).at[seqs].set(num_new)
    allocator, slots, ok = allocator.append(num_tokens, max_tokens=num_chunks * chunk)
    # The model sees the prompts' rows alone; what stands in the others costs nothing.
    rows = dataclasses.replace(allocator, block_tables=allocator.block_tables[seqs], lengths=allocator.lengths[seqs])
    chunk_slots = slots[seqs].reshape(num_prompts, num_chunks, chunk).swapaxes(0, 1)

    def one_chunk(i: jax.Array, carry: tuple[Caches, jax.Array]) -> tuple[Caches, jax.Array]:
        caches, _ = carry
        # As long as each sequence is after this chunk: the chunk's tokens are then its newest.
        still_to_come = (num_chunks - 1 - i) * chunk
        so_far = dataclasses.replace(rows, lengths=jnp.maximum(rows.lengths - still_to_come, 0))
        return model(prompts.chunks[i], caches, so_far, chunk_slots[i])

    first = num_chunks - -(-num_new.max() // chunk)  # those before it hold nothing new
    logits = jnp.zeros((num_prompts, model.embed_tokens.num_embeddings), jnp.float32)
    caches, logits = lax.fori_loop(first, num_chunks, one_chunk, (caches, logits))
    return caches, allocator, logits, ok[seqs]
