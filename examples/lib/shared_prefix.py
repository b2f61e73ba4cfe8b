"""Computes a common prefix of all prompts once, and shares it through the prefix cache."""

import jax
import jax.numpy as jnp

import jaxpaged
from lib.llama import Llama
from lib.prefill import Caches, Prompts, write_prompts


def common_prefix(prompts: list[list[int]], block_size: int) -> list[int]:
    """The common first tokens of all prompts, cut to full blocks, because only full blocks are shared."""
    first, last = min(prompts), max(prompts)  # in lexical order: a common prefix of these two is common to all
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[: length // block_size * block_size]


def num_saved_blocks(prompts: list[list[int]], prefix: list[int], block_size: int) -> int:
    """Number of blocks that the prompts save. Each shares the prefix's blocks, except one with its last token."""
    found = sum(min(len(prefix), len(prompt) - 1) // block_size for prompt in prompts)
    return max(found - len(prefix) // block_size, 0)


def share_prefix(
    model: Llama,
    caches: Caches,
    allocator: jaxpaged.BlockAllocator,
    prefix: Prompts,  # one row, the common beginning of all prompts
    prompts: Prompts,
) -> tuple[Caches, jaxpaged.BlockAllocator, jax.Array]:
    """Starts each prompt's row with the prefix's blocks, inside the caller's jit.

    Returns the new caches and allocator, and the number of cached tokens of each prompt, int32 [prompts].
    """
    # 1. Write the prefix to the first row, then free the row. Its blocks stay cached until they are reused.
    caches, allocator, _, _ = write_prompts(model, caches, allocator, prefix)
    rows = jnp.pad(prefix.rows, ((0, len(allocator.lengths) - 1), (0, 0)))
    # No secret is needed for a single user's batch.
    prefix_cache = jaxpaged.PrefixCache.create(num_blocks=allocator.num_blocks, block_size=allocator.block_size)
    prefix_cache, allocator = prefix_cache.insert(allocator, rows)
    allocator = allocator.free(allocator.lengths > 0)

    # 2. Look up all prompts at once.
    _, allocator, num_cached = prefix_cache.match_prefix(allocator, prompts.rows, prompts.lengths)
    return caches, allocator, num_cached
