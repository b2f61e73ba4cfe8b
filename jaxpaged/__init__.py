"""jaxpaged: paged attention for JAX."""

from jaxpaged._allocator import BlockAllocator
from jaxpaged._attention import paged_attention
from jaxpaged._cache import KVCache, fold_layers, layer_block_tables, layer_slots, unfold_layers, write_kv
from jaxpaged._plot import plot_blocks
from jaxpaged._prefix_cache import PrefixCache
from jaxpaged._reference import paged_attention_reference
from jaxpaged._rotary import rotary_frequencies
from jaxpaged._transfer import copy_blocks
from jaxpaged._zeroing import zero_blocks

__version__ = "0.1.0"

__all__ = [
    "BlockAllocator",
    "KVCache",
    "PrefixCache",
    "copy_blocks",
    "fold_layers",
    "layer_block_tables",
    "layer_slots",
    "paged_attention",
    "paged_attention_reference",
    "plot_blocks",
    "rotary_frequencies",
    "unfold_layers",
    "write_kv",
    "zero_blocks",
]
