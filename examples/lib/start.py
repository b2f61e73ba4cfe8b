"""Sets up a generation: a pool with room for its prompts, caches, scales, and random keys."""

import dataclasses
import functools
import math
import zlib
from collections import Counter
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import jaxpaged
from lib.generation import Generation, prefill
from lib.llama import Llama
from lib.llama_config import LlamaConfig
from lib.prefill import Caches, pad_prompts
from lib.sampling import Sampling
from lib.tensor_parallel import create_on, replicate

MOST_CACHE_BYTES = 64e9  # a larger pool is probably a mistake
Granularity = Literal["token_head", "head", "tensor"]  # scales of a quantised cache


class PoolError(ValueError):
    """The prompts do not fit into the pool; the message is one sentence for the user."""


def start(
    config: LlamaConfig,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    block_size: int,
    num_blocks: int | None,
    dtype: str,
    seed: int,
    scale: Granularity | None = None,
    num_saved_blocks: int = 0,
    num_drafted: int = 0,
    mesh: Mesh | None = None,
) -> Generation:
    """Creates an empty generation.

    `dtype` and `scale` are the cache's dtype and granularity; `calibrate` sets scales per tensor or head later. The
    pool has `num_saved_blocks` blocks less, because the sequences share them. Each sequence has room for `num_drafted`
    extra tokens, which may be drafted and rejected. On a `mesh`, the KV heads of the caches are sharded over its axis.

    Raises `PoolError` if the prompts do not fit into the pool.
    """
    lengths = [len(prompt) for prompt in prompts]
    limits = [min(max_new_tokens, config.context - length + 1) for length in lengths]
    blocks_at_start = sum(-(-length // block_size) for length in lengths) - num_saved_blocks
    # The last token of a sequence is never written, because nothing attends to it.
    longest = [length + limit - 1 + num_drafted for length, limit in zip(lengths, limits, strict=True)]
    blocks_at_end = [-(-length // block_size) for length in longest]
    if num_blocks is None:
        num_blocks = 1 + sum(blocks_at_end) - num_saved_blocks
    if num_blocks - 1 < blocks_at_start:
        raise PoolError(
            f"The prompts need {blocks_at_start} blocks of {block_size} tokens and --num-blocks {num_blocks} leaves "
            f"{num_blocks - 1} without the null block; pass at least --num-blocks {blocks_at_start + 1}."
        )
    state = Generation(
        caches=create_caches(config, num_blocks, block_size, dtype=dtype, scale=scale, mesh=mesh),
        allocator=jaxpaged.BlockAllocator.create(
            num_blocks=num_blocks, block_size=block_size, num_seqs=len(prompts), max_blocks_per_seq=max(blocks_at_end)
        ),
        keys=prompt_keys(prompts, seed),
        tokens=jnp.zeros((len(prompts), max(limits)), jnp.int32),
        num_tokens=jnp.zeros(len(prompts), jnp.int32),
        limits=jnp.asarray(limits, jnp.int32),
        running=jnp.zeros(len(prompts), bool),
        starved=jnp.zeros(len(prompts), bool),
        num_cached=jnp.zeros(len(prompts), jnp.int32),
        peak_blocks=jnp.zeros((), jnp.int32),
        peak_unshared=jnp.zeros((), jnp.int32),
    )
    return state if mesh is None else replicate(mesh, state)


def create_caches(
    config: LlamaConfig, num_blocks: int, block_size: int, *, dtype: str, scale: Granularity | None, mesh: Mesh | None
) -> Caches:
    """Creates the caches of all layers. Raises `PoolError` if they need more than MOST_CACHE_BYTES."""
    placeholder = 1.0 if scale in ("tensor", "head") else None
    sizes = config.cache_sizes
    if config.latent is not None and scale == "token_head":
        sizes["head_dim"] += config.latent.qk_rope_head_dim  # see `jaxpaged.ops.split_rotary`
    create = functools.partial(
        jaxpaged.KVCache.create,
        num_blocks=num_blocks,
        block_size=block_size,
        **sizes,
        dtype=dtype,
        scale_per=scale,
        k_scale=placeholder,
        v_scale=None if config.latent is not None else placeholder,
    )
    cache_bytes = config.num_layers * num_bytes(jax.eval_shape(create))
    if cache_bytes > MOST_CACHE_BYTES:
        raise PoolError(
            f"A pool of {num_blocks} blocks of {block_size} tokens needs {cache_bytes / 1e9:.0f} GB; "
            "pass smaller --num-blocks, --block-size or --max-new-tokens."
        )
    if mesh is not None:
        create = functools.partial(create_on, mesh, create)
    return tuple(create() for _ in range(config.num_layers))


def num_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def calibrate(
    model: Llama, state: Generation, config: LlamaConfig, prompts: list[list[int]], *, dtype: str, scale: Granularity
) -> Generation:
    """Sets the scales of each layer's cache, so that the keys and values of the prompts just fit the range."""
    trial = start(config, prompts, max_new_tokens=1, block_size=16, num_blocks=None, dtype=dtype, seed=0)
    graph, weights = nnx.split(model)
    trial = prefill(graph, weights, trial, pad_prompts(prompts), None, (), Sampling())
    caches = tuple(
        dataclasses.replace(
            cache,
            k_scale=jaxpaged.ops.kv_scale(seen.k, cache.k.dtype, scale),  # slots without a token are zero
            v_scale=None if seen.v is None else jaxpaged.ops.kv_scale(seen.v, cache.v.dtype, scale),
        )
        for cache, seen in zip(state.caches, trial.caches, strict=True)
    )
    return dataclasses.replace(state, caches=caches)


def prompt_keys(prompts: list[list[int]], seed: int) -> jax.Array:
    """A random key per prompt, which depends on its tokens but not on its row. Repeated prompts get different keys."""
    seen: Counter[int] = Counter()
    keys = []
    for prompt in prompts:
        digest = zlib.crc32(np.asarray(prompt, np.int32).tobytes())
        keys.append(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), digest), seen[digest]))
        seen[digest] += 1
    return jnp.stack(keys)
