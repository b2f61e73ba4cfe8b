"""Creates a `jaxpaged.Engine` for the model of llama.py."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

import jaxpaged
from jaxpaged.grammar import Vocabulary
from lib.adapters import set_adapters
from lib.llama import Llama
from lib.llama_config import LlamaConfig
from lib.routed_experts import keep_experts, kept_experts
from lib.tensor_parallel import create_on

CHUNK_TOKENS = 256


def layer_windows(config: LlamaConfig) -> Sequence[int | None]:
    return [None] * config.num_layers if config.windows is None else config.windows


def create_engine(
    model: Llama,
    config: LlamaConfig,
    options: jaxpaged.EngineOptions,
    *,
    block_size: int,
    dtype: str,
    num_blocks: int | None = None,
    mesh: Mesh | None = None,
    device: jax.Device | None = None,
    vocabulary: Vocabulary | None = None,
    returns_experts: bool = False,
) -> jaxpaged.Engine:
    """Creates an engine for the model. Its weights are `nnx.state(model)`.

    With `num_blocks=None` the pool has room for `max_num_seqs` requests of `max_model_len` tokens, which `options` must
    then set. `mesh` is the mesh of a model that tensor_parallel.py has sharded. `device` is the model's device, or the
    first of its mesh, if that is not JAX's default device. With a `vocabulary`, requests may have grammars.
    With `returns_experts`, `Completion.aux` has the experts that each token used in each layer (`routed_experts.py`).
    """
    graph, weights = nnx.split(model)
    groups = jaxpaged.layer_groups(layer_windows(config))

    def apply(
        weights: nnx.State,
        tokens: jax.Array,  # int32 [tokens]
        positions: jax.Array,
        caches: Sequence[jaxpaged.KVCache],  # one for each layer of a group
        step: jaxpaged.AttentionStep,
    ) -> tuple[Any, ...]:
        model, new_caches = nnx.merge(graph, weights), list(caches)
        if step.adapters is not None:
            set_adapters(model, step.adapters)
        if returns_experts:
            keep_experts(model.layers)
        x = model.embed(tokens)
        for layer, (index, group) in zip(model.layers, groups.layers, strict=True):
            new_caches[index], x = layer(x, new_caches[index], step.group(group))
        return tuple(new_caches), x, kept_experts(model.layers) if returns_experts else None

    def head(weights: nnx.State, x: jax.Array) -> jax.Array:  # [rows, features]
        return nnx.merge(graph, weights).logits(x)

    chunk_tokens = options.chunk_tokens or CHUNK_TOKENS
    if num_blocks is None:
        assert options.max_num_seqs is not None
        assert options.max_model_len is not None
        of_request = groups.num_blocks(options.max_model_len, block_size=block_size, chunk_tokens=chunk_tokens)
        num_blocks = 1 + options.max_num_seqs * of_request
    create = functools.partial(
        jaxpaged.KVCache.create,
        num_blocks=num_blocks,
        block_size=block_size,
        **config.cache_sizes,
        dtype=dtype,
    )
    if mesh is not None:
        create = functools.partial(create_on, mesh, create)
    options = dataclasses.replace(
        options, vocab_size=config.vocab_size, windows=groups.windows, chunk_tokens=chunk_tokens
    )
    with contextlib.nullcontext() if device is None else jax.default_device(device):
        caches = tuple(create() for _ in range(groups.num_caches))
        if device is not None and mesh is None:
            caches = jax.device_put(caches, device)  # copies nothing: commits them to their device
        return jaxpaged.Engine(apply, weights, caches, head=head, vocabulary=vocabulary, options=options)
