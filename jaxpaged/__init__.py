"""jaxpaged: paged attention for JAX on NVIDIA GPUs.

This module has the common names. `jaxpaged.ops` has operations on caches and attention results, `jaxpaged.scheduling`
the scheduler for your own serving loop, `jaxpaged.grammar` compiles regexes and JSON schemas, and `jaxpaged.debug` has
tools for finding errors. The Flax modules are in `jaxpaged.nnx` and `jaxpaged.linen`; import these two explicitly.
"""

from jaxpaged import debug as debug
from jaxpaged import grammar as grammar
from jaxpaged import ops as ops
from jaxpaged import scheduling as scheduling
from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._allocator.layer_groups import LayerGroups, layer_groups
from jaxpaged._allocator.prefix_cache import PrefixCache
from jaxpaged._attention.attention_step import AttentionStep
from jaxpaged._attention.dense_step import dense_step
from jaxpaged._attention.public import paged_attention
from jaxpaged._attention.reference import paged_attention_reference
from jaxpaged._attention.tree import tree_mask
from jaxpaged._cache.capacity import CacheCapacity, cache_capacity
from jaxpaged._cache.kv_cache import KVCache
from jaxpaged._cache.layers import CacheLayer
from jaxpaged._engine.engine import Engine
from jaxpaged._engine.generate import generate
from jaxpaged._engine.records import Completion, EngineStats, RequestOutput, Score
from jaxpaged._engine.rollouts import Rollout
from jaxpaged._engine.sampling_params import SamplingParams
from jaxpaged._flax.attention import AttentionSettings
from jaxpaged._flax.latent_attention import LatentSettings
from jaxpaged._flax.lora import lora
from jaxpaged._publish import publish as _publish
from jaxpaged._rotary_frequencies import rotary_attention_factor, rotary_frequencies
from jaxpaged._slice.logits_context import LogitsContext
from jaxpaged._slice.options import EngineOptions
from jaxpaged._version import __version__ as __version__

__all__ = [
    "AttentionSettings",
    "AttentionStep",
    "BlockAllocator",
    "CacheCapacity",
    "CacheLayer",
    "Completion",
    "Engine",
    "EngineOptions",
    "EngineStats",
    "KVCache",
    "LatentSettings",
    "LayerGroups",
    "LogitsContext",
    "PrefixCache",
    "RequestOutput",
    "Rollout",
    "SamplingParams",
    "Score",
    "cache_capacity",
    "dense_step",
    "generate",
    "layer_groups",
    "lora",
    "paged_attention",
    "paged_attention_reference",
    "rotary_attention_factor",
    "rotary_frequencies",
    "tree_mask",
]

_publish(globals())
