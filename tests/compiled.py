"""Readers of compiled modules, and the decode step that several tests compile."""

import math
import re

import jax.numpy as jnp

from jaxpaged import BlockAllocator, KVCache, paged_attention
from jaxpaged.ops import write_kv

NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM, SEQS, MAX_BLOCKS = 512, 16, 2, 64, 4, 64

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")

CACHE_ELEMENTS = NUM_BLOCKS * BLOCK_SIZE * KV_HEADS * HEAD_DIM


def instructions(text: str) -> list[tuple[str, int, str]]:
    """(operation, elements of its largest result, line) of every instruction of a compiled module."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?[\w.-]+ = (.*?) ([\w-]+)\(", line)
        if match:
            shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
            sizes = [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]
            found.append((match[2], max(sizes, default=0), line.strip()))
    return found


def cache_sized_copies(text: str) -> list[str]:
    return [
        line for operation, size, line in instructions(text) if operation.startswith("copy") and size >= CACHE_ELEMENTS
    ]


def collectives(text: str) -> list[str]:
    """The names of the collective operations of a compiled module, in order."""
    found = (operation.removesuffix("-start") for operation, _, _ in instructions(text))
    return [name for name in found if name in COLLECTIVES]


def decode_step(cache, allocator, q, k, v):
    allocator, slots, _ = allocator.append(jnp.ones(SEQS, jnp.int32))
    cache = write_kv(cache, k, v, slots)
    arrays = q, cache.k, cache.v, allocator.block_tables, allocator.lengths
    return cache, allocator, paged_attention(*arrays, k_scale=cache.k_scale, v_scale=cache.v_scale)


def inputs(num_blocks=NUM_BLOCKS, **kind):
    """The arguments of `decode_step`. `kind` names the cache, by default a float32 one."""
    sizes = dict(num_blocks=num_blocks, block_size=BLOCK_SIZE)
    cache = KVCache.create(**sizes, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, **dict(dtype="float32") | kind)
    allocator = BlockAllocator.create(**sizes, num_seqs=SEQS, max_blocks_per_seq=MAX_BLOCKS)
    k = jnp.ones((SEQS, KV_HEADS, HEAD_DIM))
    return cache, allocator, jnp.ones((SEQS, 6, HEAD_DIM)), k, k
