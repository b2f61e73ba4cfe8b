"""A prefix of all prompts of a batch, computed once and found by each prompt in the prefix cache."""

import jax
import jax.numpy as jnp

import jaxpaged
from lib.llama import Llama
from lib.prefill import Caches, Prompts, write_prompts


def common_prefix(prompts: list[list[int]], block_size: int) -> list[int]:
    """The tokens that all prompts begin with, cut to full blocks, since only full blocks are shared."""
    first, last = min(prompts), max(prompts)  # in lexical order: what these two share, all share
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[: length // block_size * block_size]


def num_saved_blocks(prompts: list[list[int]], prefix: list[int], block_size: int) -> int:
    """How many blocks the prompts save: each finds the prefix's blocks, except one with its last token."""
    found = sum(min(len(prefix), len(prompt) - 1) // block_size for prompt in prompts)
    return max(found - len(prefix) // block_size, 0)


def share_prefix(
    model: Llama,
    caches: Caches,
    allocator: jaxpaged.BlockAllocator,
    prefix: Prompts,  # one row, which all prompts begin with
    prompts: Prompts,
) -> tuple[Caches, jaxpaged.BlockAllocator, jax.Array]:
    """Begins each prompt's row with the prefix's blocks, inside the caller's jit.

    Returns the new caches and allocator, and how many tokens of each prompt are in the cache, int32 [prompts].
    """
    # 1. The prefix is written in the first row, which is then freed. Its blocks can be found until they are reused.
    caches, allocator, _, _ = write_prompts(model, caches, allocator, prefix)
    rows = jnp.pad(prefix.rows, ((0, len(allocator.lengths) - 1), (0, 0)))
    # One user's batch needs no secret.
    prefix_cache = jaxpaged.PrefixCache.create(num_blocks=allocator.num_blocks, block_size=allocator.block_size)
    prefix_cache, allocator = prefix_cache.insert(allocator, rows)
    allocator = allocator.free(allocator.lengths > 0)

    # 2. One lookup for the whole batch.
    _, allocator, num_cached = prefix_cache.match_prefix(allocator, prompts.rows, prompts.lengths)
    return caches, allocator, num_cached
