"""Prompts to tokens in one call: an engine sized by the prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpaged._cache.kv_cache import KVCache
from jaxpaged._engine.engine import DEFAULTS, Engine
from jaxpaged._engine.logit_params import num_listed
from jaxpaged._engine.records import RequestOutput
from jaxpaged._engine.requests import checked_prompt, params_for_each
from jaxpaged._engine.sampling_params import SamplingParams
from jaxpaged._grammar.vocabulary import Vocabulary
from jaxpaged._integers import checked_size
from jaxpaged._slice.drafting import Draft
from jaxpaged._slice.model import Apply, ApplyHead
from jaxpaged._slice.options import EngineOptions
from jaxpaged._slice.process_logits import ProcessLogits

MOST_AT_ONCE, MOST_CHUNK_TOKENS = 64, 256


def generate(
    apply: Apply,
    weights: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    head: ApplyHead | None,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: DTypeLike = jnp.bfloat16,
    block_size: int = 16,
    draft: Draft | None = None,
    process_logits: ProcessLogits | None = None,
    vocabulary: Vocabulary | None = None,
    options: EngineOptions = DEFAULTS,
    progress: bool = False,
) -> list[RequestOutput]:
    """Continues prompts with a model: prefill, decoding, sampling, stop tokens, n completions, logprobs.

    Makes an `Engine` with one cache per layer and enough blocks for the completions that run at once, by default up to
    64. Every call compiles a new engine. To call it again or to change the weights, make an `Engine` yourself.

    Args:
        apply: the model, `caches, hidden = apply(weights, tokens, positions, caches, step)`, as in `Engine`.
            `caches` is a tuple of one `KVCache` per layer.
        weights: a pytree of arrays, passed to `apply`.
        prompts: the token ids of each prompt.
        params: one for all prompts, or one for each.
        head: `logits = head(weights, hidden)`, as in `Engine`; None: `apply` returns logits.
        num_layers: layers with a cache.
        num_kv_heads: KV heads of a layer.
        head_dim: size of a head.
        dtype: dtype of the caches.
        block_size: tokens in a block.
        draft: as in `Engine`.
        process_logits: as in `Engine`.
        vocabulary: as in `Engine`.
        options: options of the engine. Sizes that are None follow from the prompts and params, and so do larger
            `num_stop_ids`, `num_listed_tokens`, `num_logits_ints`, `num_logits_floats` and `max_logprobs`, and a prefix
            cache for `n` completions.
        progress: draw a progress bar on stderr.

    Returns:
        The output of each prompt, in order.

    Raises:
        ValueError: no prompts, another number of params than of prompts, an empty prompt, a size that is no int or
            below 1, a request that the options rule out, or an `apply` with a wrong result.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpaged
        >>> embedding = jax.random.normal(jax.random.key(0), (50, 2, 32))  # a vocabulary of 50, two heads
        >>> def apply(weights, tokens, positions, caches, step):
        ...     x = weights[tokens]
        ...     cache, out = step.attend(x, x, x, caches[0])
        ...     return (cache,), x + out
        >>> def head(weights, hidden):
        ...     return jnp.einsum("shd,vhd->sv", hidden, weights)
        >>> params = jaxpaged.SamplingParams(max_tokens=4, temperature=0, stop_token_ids=(7,))
        >>> sizes = dict(num_layers=1, num_kv_heads=2, head_dim=32, dtype="float32")
        >>> [output] = jaxpaged.generate(apply, embedding, [[3, 1, 4]], params, head=head, **sizes)
        >>> len(output.outputs[0].token_ids)
        4
    """
    each = params_for_each(prompts, params)
    if not each:
        raise ValueError("pass at least one prompt; got none.")
    lengths = [len(checked_prompt(prompt)) for prompt in prompts]
    block_size, num_layers = checked_size("block_size", block_size), checked_size("num_layers", num_layers)
    max_num_seqs = options.max_num_seqs or min(MOST_AT_ONCE, sum(request.n for request in each))
    max_model_len = options.max_model_len or max(
        length + request.max_tokens for length, request in zip(lengths, each, strict=True)
    )
    options = dataclasses.replace(
        options,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        chunk_tokens=options.chunk_tokens or max(1, min(MOST_CHUNK_TOKENS, sum(lengths))),
        num_stop_ids=max(options.num_stop_ids, *(len(request.stop_token_ids) for request in each)),
        num_listed_tokens=max(options.num_listed_tokens, *map(num_listed, each)),
        num_logits_ints=max(options.num_logits_ints, *(len(request.logits_ints) for request in each)),
        num_logits_floats=max(options.num_logits_floats, *(len(request.logits_floats) for request in each)),
        max_logprobs=max(options.max_logprobs, *(request.top_logprobs for request in each)),
        # A prompt of n completions is computed once.
        prefix_cache=options.prefix_cache or any(request.n > 1 for request in each),
    )
    caches = tuple(
        KVCache.create(
            num_blocks=1 + len(options.windows) * max_num_seqs * -(-max_model_len // block_size),
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
        )
        for _ in range(num_layers)
    )
    functions: Any = dict(head=head, draft=draft, process_logits=process_logits, vocabulary=vocabulary)
    engine = Engine(apply, weights, caches, **functions, options=options)
    return engine.generate(prompts, each, progress=progress)
