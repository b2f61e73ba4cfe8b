"""Operations on caches and attention results, for code that needs more than `AttentionStep.attend`.

They write, copy, read and quantise cached keys and values, merge attention results, and attend to a cache whose
sequences are split over devices. All of them work inside `jax.jit`.
"""

from jaxpaged._allocator.prefix_groups import PrefixGroups
from jaxpaged._attention.context_parallel import context_parallel_attention, context_parallel_slots
from jaxpaged._attention.merge import merge_attention
from jaxpaged._cache.copy_blocks import copy_blocks
from jaxpaged._cache.quantise import kv_scale, widen_kv
from jaxpaged._cache.rotate import rotate_and_write_kv
from jaxpaged._cache.split_rotary import split_rotary
from jaxpaged._cache.transfer import gather_kv, scatter_kv
from jaxpaged._cache.write import write_kv
from jaxpaged._publish import publish as _publish

__all__ = [
    "PrefixGroups",
    "context_parallel_attention",
    "context_parallel_slots",
    "copy_blocks",
    "gather_kv",
    "kv_scale",
    "merge_attention",
    "rotate_and_write_kv",
    "scatter_kv",
    "split_rotary",
    "widen_kv",
    "write_kv",
]

_publish(globals())
