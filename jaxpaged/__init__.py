"""jaxpaged: paged attention for JAX."""

import typing as _typing

from jaxpaged._allocator.block_allocator import BlockAllocator
from jaxpaged._allocator.layer_groups import LayerGroups, layer_groups
from jaxpaged._allocator.plot import plot_blocks
from jaxpaged._allocator.prefix_cache import PrefixCache
from jaxpaged._attention.attention_step import AttentionStep
from jaxpaged._attention.context_parallel import context_parallel_attention, context_parallel_slots
from jaxpaged._attention.dense_step import dense_step
from jaxpaged._attention.explain import Explanation, explain
from jaxpaged._attention.merge import merge_attention
from jaxpaged._attention.public import paged_attention
from jaxpaged._attention.reference import paged_attention_reference
from jaxpaged._attention.tree import tree_mask
from jaxpaged._cache.capacity import CacheCapacity, cache_capacity
from jaxpaged._cache.copy_blocks import copy_blocks
from jaxpaged._cache.kv_cache import KVCache
from jaxpaged._cache.layers import CacheLayer
from jaxpaged._cache.quantise import kv_scale, widen_kv
from jaxpaged._cache.rotate import rotate_and_write_kv
from jaxpaged._cache.split_rotary import split_rotary
from jaxpaged._cache.transfer import gather_kv, scatter_kv
from jaxpaged._cache.write import write_kv
from jaxpaged._debug import debug_checks
from jaxpaged._engine.engine import Engine
from jaxpaged._engine.generate import generate
from jaxpaged._engine.options import EngineOptions
from jaxpaged._engine.records import Completion, EngineStats, RequestOutput, SamplingParams, Score
from jaxpaged._engine.rollouts import Rollout
from jaxpaged._latent_modules import LatentSettings
from jaxpaged._lora import lora
from jaxpaged._modules import AttentionSettings
from jaxpaged._rotary_frequencies import rotary_attention_factor, rotary_frequencies
from jaxpaged._scheduler.records import Requests, RequestStatus, Sampling, SubmitStatus
from jaxpaged._scheduler.scheduler import Scheduler
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
    "Explanation",
    "KVCache",
    "LatentSettings",
    "LayerGroups",
    "PrefixCache",
    "RequestOutput",
    "RequestStatus",
    "Requests",
    "Rollout",
    "Sampling",
    "SamplingParams",
    "Scheduler",
    "Score",
    "SubmitStatus",
    "cache_capacity",
    "context_parallel_attention",
    "context_parallel_slots",
    "copy_blocks",
    "debug_checks",
    "dense_step",
    "explain",
    "gather_kv",
    "generate",
    "kv_scale",
    "layer_groups",
    "lora",
    "merge_attention",
    "paged_attention",
    "paged_attention_reference",
    "plot_blocks",
    "rotary_attention_factor",
    "rotary_frequencies",
    "rotate_and_write_kv",
    "scatter_kv",
    "split_rotary",
    "tree_mask",
    "widen_kv",
    "write_kv",
]

# What is public says so: in `help`, errors and pickles. Types are found first, in the modules that name them.
for _public in map(globals().__getitem__, __all__):
    if isinstance(_public, type):
        _public.__annotations__ = _typing.get_type_hints(_public)
    _public.__module__ = __name__
