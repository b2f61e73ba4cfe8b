"""Writes prompts to the cache, packed, in chunks that bound the memory of activations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxpaged
from lib.llama import Llama

PREFILL_CHUNK = 512  # tokens of all prompts together

Caches = tuple[jaxpaged.KVCache, ...]  # one per layer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts:
    rows: jax.Array  # int32 [prompts, longest], right-aligned prompts
    lengths: jax.Array  # int32 [prompts], in tokens
    chunk: int = dataclasses.field(metadata=dict(static=True))  # tokens per call of the model


def pad_prompts(prompts: list[list[int]], *, num_cached: int = 0) -> Prompts:
    """Pads prompts to one array. If `num_cached` tokens of each are already cached, the chunk is at most the rest."""
    rows = np.zeros((len(prompts), max(*map(len, prompts), 1)), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[len(row) - len(prompt) :] = prompt
    lengths = [len(prompt) for prompt in prompts]
    num_new = sum(max(length - num_cached, 1) for length in lengths)  # the last token is always computed
    return Prompts(jnp.asarray(rows), jnp.asarray(lengths, jnp.int32), min(PREFILL_CHUNK, -(-num_new // 16) * 16))


def write_prompts(
    model: Llama,
    caches: Caches,
    allocator: jaxpaged.BlockAllocator,
    prompts: Prompts,
    *,
    seqs: jax.Array | None = None,  # int32 [prompts], row of each prompt in the allocator; None: the first rows
    num_cached: jax.Array | None = None,  # int32 [prompts], number of leading tokens that are already cached
) -> tuple[Caches, jaxpaged.BlockAllocator, jax.Array, jax.Array]:
    """Allocates and writes the prompts, inside the caller's jit.

    Returns:
        caches: the new caches.
        allocator: the new allocator.
        logits: logits after each prompt's last token, f32 [prompts, vocab_size].
        ok: bool [prompts], False if the pool had too few blocks.
    """
    num_prompts, longest = prompts.rows.shape
    seqs = jnp.arange(num_prompts) if seqs is None else seqs
    num_cached = jnp.zeros_like(prompts.lengths) if num_cached is None else num_cached
    num_new = prompts.lengths - num_cached
    num_tokens = jnp.zeros_like(allocator.lengths).at[seqs].set(num_new)
    allocator, _, ok = allocator.append(num_tokens, q_len=longest)
    # A view of the prompts' rows alone, so that other rows cost nothing.
    rows = dataclasses.replace(allocator, block_tables=allocator.block_tables[seqs], lengths=allocator.lengths[seqs])
    starts = jnp.pad(jnp.cumsum(num_new, dtype=jnp.int32), (1, 0))  # first packed token of each prompt

    def one_chunk(i: jax.Array, carry: tuple[Caches, jax.Array]) -> tuple[Caches, jax.Array]:
        caches, logits = carry
        begin, end = i * prompts.chunk, (i + 1) * prompts.chunk
        packed = begin + jnp.arange(prompts.chunk, dtype=jnp.int32)
        owners = jnp.searchsorted(starts[1:], packed, side="right").astype(jnp.int32)  # past the last: padding
        positions = packed + (num_cached - starts[:-1])[owners]
        tokens = prompts.rows[owners, positions + (longest - prompts.lengths)[owners]]
        slots = rows.slots(owners, positions)
        # The lengths after this chunk, so that its tokens are the newest.
        written = num_cached + jnp.clip(end - starts[:-1], 0, num_new)
        so_far = dataclasses.replace(rows, lengths=jnp.minimum(written, rows.lengths))
        query_starts = jnp.clip(starts - begin, 0, prompts.chunk)
        step = jaxpaged.AttentionStep.create(so_far, slots, query_starts=query_starts)
        caches, x = model(tokens, caches, step)
        new_logits = model.logits(x[jnp.maximum(query_starts[1:] - 1, 0)])
        ends_here = (starts[1:] > begin) & (starts[1:] <= end)
        return caches, jnp.where(ends_here[:, None], new_logits, logits)

    logits = jnp.zeros((num_prompts, model.embed_tokens.num_embeddings), jnp.float32)
    num_chunks = -(-starts[-1] // prompts.chunk)
    caches, logits = lax.fori_loop(0, num_chunks, one_chunk, (caches, logits))
    return caches, allocator, logits, ok[seqs]
