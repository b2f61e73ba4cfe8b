"""How many blocks and sequences fit into a memory: arithmetic on Python's integers."""

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
    """The capacity of a memory, from `cache_capacity`. `str` of it is two lines of text.

    Attributes:
        block_size: tokens in a block.
        bytes_per_token: keys, values and scales of a token, in all layers.
        num_blocks: blocks in the pool of each cache, the null block included: the argument of `KVCache.create` and
            `BlockAllocator.create`.
        num_bytes: of all caches.
        num_tokens: what these blocks hold, the null block left out; with windows, if no sequence is longer than them.
        num_seqs: sequences of the given lengths held at once, on average.
        max_length: tokens of the longest sequence that a contiguous cache provides for.
        num_contiguous_seqs: sequences in a contiguous cache of the same memory, dtype and scales.
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
    """How many blocks fit into a memory, and how many sequences into these blocks.

        bytes a token = num_layers * num_kv_heads * ((head_dim + value_dim) * itemsize + bytes of two scales)
        bytes of a latent one = num_layers * num_kv_heads * (head_dim * itemsize + bytes of its scale)
        blocks of a sequence = ceil(length / block_size)

    It agrees to the byte with `KVCache.create`, for a cache of each layer and for a stack. Subtract what else lives on
    the device: weights, activations, and what XLA sets aside. `jax.devices()[0].memory_stats()["bytes_limit"]` is what
    JAX may use of a GPU. With the KV heads sharded over several devices, pass one device's memory and KV heads.

    Args:
        memory_bytes: for the caches of all layers.
        lengths: in tokens, prompt and new ones, of a sample of the sequences: `[420]` if only an average is known.
        num_layers: layers with a cache.
        num_kv_heads: KV heads.
        head_dim: numbers a head.
        value_dim: as in `KVCache.create`, like the next.
        is_latent: whether values are numbers of the keys.
        block_size: tokens in a block.
        dtype: as in `KVCache.create`, like the next.
        scale_per: what has its own scale in a quantised cache.
        max_length: what a contiguous cache provides for each sequence; None: the longest of `lengths`.
        windows: each layer's `sliding_window` or None, for a model whose layers are in `layer_groups`. None: all layers
            share one table.

    Raises:
        ValueError: a size that is no int or below 1, no length, one above `max_length`, a dtype or scale that
            `KVCache.create` does not accept, windows of another number of layers, or a memory too small for one block
            and the null block.

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
        raise ValueError("lengths must have at least one length; pass [average] where no sample is at hand.")
    max_length = max(lengths) if max_length is None else checked_size("max_length", max_length, max(lengths))
    windows = [None] * num_layers if windows is None else list(windows)
    if len(windows) != num_layers:
        raise ValueError(f"windows must have one entry for each layer; got {len(windows)} and {num_layers=}.")
    groups = layer_groups(windows)
    granularity = checked_granularity(dtype, scale_per)

    widths = [head_dim] if is_latent else [head_dim, value_dim]  # one for each array
    scale_bytes = SCALE_BYTES if granularity == "token_head" else 0
    head_bytes = sum(width * jnp.dtype(dtype).itemsize + scale_bytes for width in widths)
    bytes_per_token = num_layers * num_kv_heads * head_bytes
    shared_scales = {"head": num_kv_heads, "tensor": 1}.get(granularity or "", 0)
    fixed_bytes = len(widths) * groups.num_caches * shared_scales * SCALE_BYTES
    block_bytes = block_size * bytes_per_token // num_layers * groups.num_caches
    num_blocks = (memory_bytes - fixed_bytes) // block_bytes
    if num_blocks <= NULL_BLOCKS:
        raise ValueError(
            f"{memory_bytes=} holds {max(num_blocks, 0)} blocks of {block_bytes} bytes, and the null block is one. "
            f"Pass at least {(NULL_BLOCKS + 1) * block_bytes + fixed_bytes}."
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
