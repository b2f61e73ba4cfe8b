"""Generates a batch of sequences: prefill, the decode loop, and the host code that runs them.

Prefill is one jitted call over the ragged batch. Decoding is one `jax.jit` around `lax.while_loop`: allocate, write,
attend, sample, stop and free, without the host until the loop ends.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

import jaxpaged
from lib.llama import Llama
from lib.prefill import Caches, Prompts, pad_prompts, write_prompts
from lib.sampling import Sampling, sample
from lib.shared_prefix import share_prefix
from lib.tensor_parallel import on_mesh, replicate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generation:
    """State of a batch of sequences during generation."""

    caches: Caches
    allocator: jaxpaged.BlockAllocator
    keys: jax.Array  # a random key for each sequence
    tokens: jax.Array  # int32 [seqs, max_new_tokens], generated tokens
    num_tokens: jax.Array  # int32 [seqs], number of generated tokens
    limits: jax.Array  # int32 [seqs], maximum of num_tokens
    running: jax.Array  # bool [seqs]
    starved: jax.Array  # bool [seqs], stopped because the pool had no free block
    num_cached: jax.Array  # int32 [seqs], prompt tokens that were found in the prefix cache
    peak_blocks: jax.Array  # int32 [], maximum number of blocks held at once
    peak_unshared: jax.Array  # int32 [], the same without sharing


def claim(
    state: Generation, num_tokens: jax.Array, *, q_len: int | None = None
) -> tuple[Generation, jax.Array, jax.Array]:
    """Appends room for new tokens of the running sequences. Returns the new state, the slots, and which may advance.

    A sequence that gets no block waits for one. If all sequences wait, the last one stops and frees its blocks.
    """
    allocator, slots, ok = state.allocator.append(jnp.where(state.running, num_tokens, 0), q_len=q_len)
    advanced = state.running & ok
    seqs = jnp.arange(advanced.shape[0])
    stopped = ~advanced.any() & (seqs == jnp.where(state.running, seqs, -1).max())
    state = dataclasses.replace(
        state, allocator=allocator, running=state.running & ~stopped, starved=state.starved | stopped
    )
    return state, slots, advanced


def num_entries(allocator: jaxpaged.BlockAllocator) -> jax.Array:
    """Number of blocks that the sequences would hold without sharing, int32 []."""
    return (-(-allocator.lengths // allocator.block_size)).sum(dtype=jnp.int32)


def retire(state: Generation) -> Generation:
    """Updates the peak counts, and frees the sequences that no longer run."""
    return dataclasses.replace(
        state,
        allocator=state.allocator.free(~state.running),
        peak_blocks=jnp.maximum(state.peak_blocks, state.allocator.num_held),
        peak_unshared=jnp.maximum(state.peak_unshared, num_entries(state.allocator)),
    )


def extend(state: Generation, tokens: jax.Array, counts: jax.Array, eos_ids: tuple[int, ...]) -> Generation:
    """Appends the first `counts` tokens of each row of `tokens`, int32 [seqs, n]. Frees sequences that end."""
    rank = jnp.arange(tokens.shape[1])[None]
    is_eos = jnp.isin(tokens, jnp.asarray(eos_ids, jnp.int32))
    num_eos_before = jnp.cumsum(is_eos, axis=1, dtype=jnp.int32) - is_eos.astype(jnp.int32)
    is_new = (rank < counts[:, None]) & (num_eos_before == 0)
    column = jnp.where(is_new, state.num_tokens[:, None] + rank, state.tokens.shape[1])  # past the end: dropped
    num_tokens = state.num_tokens + is_new.sum(axis=1, dtype=jnp.int32)
    ended = (num_tokens >= state.limits) | (is_new & is_eos).any(axis=1)
    seqs = jnp.arange(tokens.shape[0])[:, None]
    state = dataclasses.replace(
        state,
        tokens=state.tokens.at[seqs, column].set(tokens, mode="drop"),
        num_tokens=num_tokens,
        running=state.running & ~ended,
    )
    return retire(state)


def accept(
    state: Generation, advanced: jax.Array, logits: jax.Array, eos_ids: tuple[int, ...], sampling: Sampling
) -> Generation:
    """Samples the next token of the sequences that advanced."""
    token = sample(logits, jax.vmap(jax.random.fold_in)(state.keys, state.num_tokens), sampling)
    return extend(state, token[:, None], advanced.astype(jnp.int32), eos_ids)


# By default XLA computes small products of one row, such as the attention projections of a 1B model, as reductions with
# too few programs for a GPU's bandwidth. [one_row_h200]
DECODE_OPTIONS = {"xla_disable_hlo_passes": "dot-strength-reduction"}


@functools.partial(jax.jit, static_argnames=("graph", "eos_ids", "sampling"), donate_argnames="state")
def prefill(
    graph: nnx.GraphDef,
    weights: nnx.State,
    state: Generation,
    prompts: Prompts,
    prefix: Prompts | None,  # one row, the common beginning of all prompts
    eos_ids: tuple[int, ...],
    sampling: Sampling,
) -> Generation:
    """Writes the prompts into the cache and samples each sequence's first token."""
    model = nnx.merge(graph, weights)
    caches, allocator, num_cached = state.caches, state.allocator, state.num_cached
    if prefix is not None:
        caches, allocator, num_cached = share_prefix(model, caches, allocator, prefix, prompts)
    caches, allocator, logits, ok = write_prompts(model, caches, allocator, prompts, num_cached=num_cached)
    state = dataclasses.replace(
        state, caches=caches, allocator=allocator, running=ok, starved=~ok, num_cached=num_cached
    )
    return accept(state, ok, logits, eos_ids, sampling)


@functools.partial(jax.jit, static_argnames=("graph", "eos_ids", "sampling", "share_reads"), donate_argnames="state")
def decode(
    graph: nnx.GraphDef,
    weights: nnx.State,
    state: Generation,
    num_steps: jax.Array,
    eos_ids: tuple[int, ...],
    sampling: Sampling,
    share_reads: bool = False,  # attention reads a shared prefix once for all sequences
) -> Generation:
    """Generates up to `num_steps` tokens for every running sequence."""
    model = nnx.merge(graph, weights)

    def go_on(carry: tuple[jax.Array, Generation]) -> jax.Array:
        i, state = carry
        return (i < num_steps) & state.running.any()

    def one_token(carry: tuple[jax.Array, Generation]) -> tuple[jax.Array, Generation]:
        i, state = carry
        state, slots, advanced = claim(state, state.running.astype(jnp.int32))
        last = jnp.take_along_axis(state.tokens, jnp.maximum(state.num_tokens - 1, 0)[:, None], axis=1)[:, 0]
        groups = state.allocator.prefix_groups() if share_reads else None
        step = jaxpaged.AttentionStep.create(state.allocator, slots, prefix_groups=groups)
        caches, x = model(last, state.caches, step)
        state = dataclasses.replace(state, caches=caches)
        return i + 1, accept(state, advanced, model.logits(x), eos_ids, sampling)

    return lax.while_loop(go_on, one_token, (jnp.int32(0), state))[1]


@dataclasses.dataclass
class Timing:
    """Seconds spent in each phase, and the attention implementations of prefill and decode."""

    compile: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    attention: dict[str, str] = dataclasses.field(default_factory=dict)


def run_generation(
    model: Llama,
    state: Generation,
    prompts: list[list[int]],
    eos_ids: tuple[int, ...],
    sampling: Sampling,
    *,
    steps_at_once: int,
    look: Callable[[Generation], None] = lambda state: None,
    prefix: list[int] | None = None,
    mesh: Mesh | None = None,
) -> tuple[Generation, Timing]:
    """Runs `state` to its end. Calls `look` after the prefill and after every `steps_at_once` decode steps.

    A `prefix` of all prompts is computed once. `mesh` is the mesh of model and state.
    """
    graph, weights = nnx.split(model)
    timing = Timing()

    def timed(name: str, function: Callable, *arguments: Any) -> Any:
        begin = time.perf_counter()
        result = jax.block_until_ready(function(*arguments))
        setattr(timing, name, getattr(timing, name) + time.perf_counter() - begin)
        return result

    shared = None if prefix is None else pad_prompts([prefix])
    padded = pad_prompts(prompts, num_cached=0 if prefix is None else len(prefix))
    num_steps = jnp.int32(steps_at_once)
    if mesh is not None:
        padded, shared, num_steps = replicate(mesh, (padded, shared, num_steps))
    run_prefill, run_decode = (program if mesh is None else on_mesh(mesh, program) for program in (prefill, decode))
    first = timed("compile", run_prefill.lower(graph, weights, state, padded, shared, eos_ids, sampling).compile)
    arguments = graph, weights, state, num_steps, eos_ids, sampling, prefix is not None
    more = timed("compile", run_decode.lower(*arguments).compile, DECODE_OPTIONS)
    for name, program in (("prefill", first), ("decode", more)):
        timing.attention[name] = "mosaic_gpu" if "mosaic_gpu" in program.as_text() else "xla"
    state = timed("prefill", first, weights, state, padded, shared)
    look(state)
    while bool(state.running.any()):
        state = timed("decode", more, weights, state, num_steps)
        look(state)
    return state, timing


def generated(state: Generation) -> list[list[int]]:
    rows, counts = np.asarray(state.tokens), np.asarray(state.num_tokens)
    return [row[:count].tolist() for row, count in zip(rows, counts, strict=True)]
