"""The number of blocks and sequences that fit into a given amount of memory, in Python integers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpaged._allocator.layer_groups import layer_groups
from jaxpaged._cache.kv_cache import Granularity, checked_granularity, checked_value_dim
from jaxpaged._integers import checked_size

SCALE_BYTES = 4  # float32
NULL_BLOCKS = 1


@dataclasses.dataclass(frozen=True)
class CacheCapacity:
    """Capacity of a paged cache, made by `cache_capacity`. `str` gives a summary of two lines.

    Attributes:
        block_size: tokens per block.
        bytes_per_token: bytes of one token's keys, values and scales in all layers.
        num_blocks: blocks in the pool of each cache, including the null block; the `num_blocks` of `KVCache.create` and
            `BlockAllocator.create`.
        num_bytes: bytes of all caches.
        num_tokens: tokens that the blocks hold, without the null block. With windows, for sequences no longer than the
            windows.
        num_seqs: average number of sequences of the given lengths that fit at once.
        max_length: tokens that a contiguous cache would reserve for each sequence.
        num_contiguous_seqs: number of sequences in a contiguous cache with the same memory, dtype and scales.
    """

    block_size: int
    bytes_per_token: int
    num_blocks: int
    num_bytes: int
    num_tokens: int
    num_seqs: int
    max_length: int
    num_contiguous_seqs: int

    def __str__(self) -> str:
        return (
            f"{self.num_bytes / 1e6:,.1f} MB: {self.num_blocks:,} blocks of {self.block_size} tokens for "
            f"{self.num_tokens:,} tokens of {self.bytes_per_token:,} bytes\n"
            f"{self.num_seqs:,} sequences of the given lengths; a contiguous cache for {self.max_length:,} tokens each "
            f"holds {self.num_contiguous_seqs:,}"
        )


def cache_capacity(
    memory_bytes: int,
    lengths: Sequence[int],
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    is_latent: bool = False,
    block_size: int = 16,
    dtype: DTypeLike = jnp.bfloat16,
    scale_per: Granularity | None = None,
    max_length: int | None = None,
    windows: Sequence[int | None] | None = None,
) -> CacheCapacity:
    """Computes how many blocks fit into a given amount of memory, and how many sequences fit into these blocks.

        bytes per token = num_layers * num_kv_heads * ((head_dim + value_dim) * itemsize + bytes of two scales)
        bytes per token, latent = num_layers * num_kv_heads * (head_dim * itemsize + bytes of one scale)
        blocks per sequence = ceil(length / block_size)

    The result agrees to the byte with `KVCache.create`, for one cache per layer and for a stack. Memory for the
    weights, activations and XLA's temporary buffers is not included: subtract it from what JAX may use on the GPU,
    `jax.devices()[0].memory_stats()["bytes_limit"]`. If the KV heads are sharded over several devices, pass the memory
    and the number of KV heads of one device.

    Args:
        memory_bytes: bytes for the caches of all layers.
        lengths: lengths of typical sequences in tokens, prompt and completion together. If only the average is known,
            pass `[average]`.
        num_layers: number of layers with a cache.
        num_kv_heads: number of KV heads.
        head_dim: the width of a key vector of a head.
        value_dim: the width of a value vector, as in `KVCache.create`.
        is_latent: whether values are part of the keys, as in `KVCache.create`.
        block_size: tokens per block.
        dtype: dtype of the cache, as in `KVCache.create`.
        scale_per: granularity of the scales of a quantised cache, as in `KVCache.create`.
        max_length: tokens that a contiguous cache would reserve for each sequence. None: the longest of `lengths`.
        windows: sliding window of each layer in tokens, or None, for a model that uses `layer_groups`. None: all layers
            share one block table.

    Returns:
        The capacity.

    Raises:
        ValueError: a size is not an int or below 1; `lengths` is empty or has a length above `max_length`;
            `KVCache.create` does not accept the dtype or scales; `windows` does not have `num_layers` entries; or the
            memory is too small for one block besides the null block.

    Example:
        >>> import jaxpaged
        >>> llama_3_8b = dict(num_layers=32, num_kv_heads=8, head_dim=128)
        >>> capacity = jaxpaged.cache_capacity(40 * 10**9, [300, 500, 1000], max_length=8192, **llama_3_8b)
        >>> print(capacity)
        39,999.0 MB: 19,073 blocks of 16 tokens for 305,152 tokens of 131,072 bytes
        501 sequences of the given lengths; a contiguous cache for 8,192 tokens each holds 37
        >>> jaxpaged.cache_capacity(40 * 10**9, [600], dtype="int8", **llama_3_8b).num_blocks
        36991
        >>> gemma_3_27b = dict(num_layers=62, num_kv_heads=16, head_dim=128)
        >>> windows = ([1024] * 5 + [None]) * 10 + [1024] * 2
        >>> [jaxpaged.cache_capacity(4 * 10**10, [32768], windows=w, **gemma_3_27b).num_seqs for w in (None, windows)]
        [2, 12]
    """
    sizes = dict(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    num_layers, num_kv_heads, head_dim, block_size = (checked_size(name, size) for name, size in sizes.items())
    value_dim = checked_value_dim(head_dim, value_dim, is_latent=is_latent)
    memory_bytes = checked_size("memory_bytes", memory_bytes)
    lengths = [checked_size("a length", length) for length in lengths]
    if not lengths:
        raise ValueError(
            "lengths must have at least one length; got none. If you know only the average, pass [average]."
        )
    max_length = max(lengths) if max_length is None else checked_size("max_length", max_length, max(lengths))
    windows = [None] * num_layers if windows is None else list(windows)
    if len(windows) != num_layers:
        raise ValueError(f"windows must have one entry for each layer; got {len(windows)} and {num_layers=}.")
    groups = layer_groups(windows)
    granularity = checked_granularity(dtype, scale_per)

    widths = [head_dim] if is_latent else [head_dim, value_dim]  # one per array
    scale_bytes = SCALE_BYTES if granularity == "token_head" else 0
    head_bytes = sum(width * jnp.dtype(dtype).itemsize + scale_bytes for width in widths)
    bytes_per_token = num_layers * num_kv_heads * head_bytes
    shared_scales = {"head": num_kv_heads, "tensor": 1}.get(granularity or "", 0)
    fixed_bytes = len(widths) * groups.num_caches * shared_scales * SCALE_BYTES
    block_bytes = block_size * bytes_per_token // num_layers * groups.num_caches
    num_blocks = (memory_bytes - fixed_bytes) // block_bytes
    if num_blocks <= NULL_BLOCKS:
        raise ValueError(
            f"memory_bytes must have room for two blocks, one of them the null block; got {memory_bytes=}, which holds "
            f"{max(num_blocks, 0)} blocks of {block_bytes} bytes. Pass at least "
            f"{(NULL_BLOCKS + 1) * block_bytes + fixed_bytes}."
        )
    blocks_needed = sum(groups.num_blocks(length, block_size=block_size) for length in lengths)
    return CacheCapacity(
        block_size=block_size,
        bytes_per_token=bytes_per_token,
        num_blocks=num_blocks,
        num_bytes=num_blocks * block_bytes + fixed_bytes,
        num_tokens=(num_blocks - NULL_BLOCKS) // len(groups.windows) * block_size,
        num_seqs=(num_blocks - NULL_BLOCKS) * len(lengths) // blocks_needed,
        max_length=max_length,
        num_contiguous_seqs=(memory_bytes - fixed_bytes) // (max_length * bytes_per_token),
    )
