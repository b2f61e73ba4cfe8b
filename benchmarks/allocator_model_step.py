"""The allocator's share of a decode step: a model of Llama-3-8B's shape, with three ways to say where tokens go.

- `jaxpaged`: `BlockAllocator.append` in each step of one `lax.while_loop`.
- `tables filled beforehand`: the same loop, but every block was handed out before it began: no allocator at all.
- `host`: `benchmarks/host_allocator.py`, and a jitted step for each token. Before it knows which sequences end it waits
  for the tokens; then it sends tables, lengths and slots.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import decode_step, llama_step
from benchmarks.decode_step import BLOCK_SIZE, FEW_STEPS, State
from benchmarks.harness import compile_all
from benchmarks.host_allocator import HostAllocator
from benchmarks.llama_step import MODELS, Apply
from jaxpaged import BlockAllocator

MODEL, ROUNDS, HOST_STEPS = "fused", 3, 24


def step_without(apply: Apply, weights: Any, state: State) -> tuple[State, jax.Array]:
    """The next slots are read from tables that are filled already."""
    allocator = dataclasses.replace(state.allocator, lengths=state.allocator.lengths + 1)
    positions = allocator.positions(1)
    ids = jnp.take_along_axis(allocator.block_tables, positions // BLOCK_SIZE, axis=1)
    caches, logits = apply(
        weights, state.tokens, state.caches, allocator, (ids * BLOCK_SIZE + positions % BLOCK_SIZE)[:, 0]
    )
    return State(logits.argmax(axis=-1).astype(jnp.int32), caches, allocator), logits


def host_step(apply: Apply, weights: Any, state: State, slots: jax.Array) -> State:
    caches, logits = apply(weights, state.tokens, state.caches, state.allocator, slots)
    return State(logits.argmax(axis=-1).astype(jnp.int32), caches, state.allocator)


def fill_tables(allocator: BlockAllocator) -> BlockAllocator:
    """All blocks that the rows can take are in them, the lengths as they were."""
    room = allocator.block_tables.shape[1] * BLOCK_SIZE
    filled, _, ok = allocator.append(room - allocator.lengths, max_tokens=room)
    if not bool(ok.all()):
        raise AssertionError("the pool is too small for full tables")
    return dataclasses.replace(filled, lengths=allocator.lengths)


def time_host(compiled: Any, weights: Any, state: State, num_steps: int) -> tuple[State, list[float]]:
    """Seconds of each step."""
    allocator, template, times = host_allocator(state.allocator), state.allocator, []
    for _ in range(num_steps):
        begun = time.perf_counter()
        slots = allocator.append()
        tables, lengths = allocator.block_tables, np.asarray(allocator.lengths, np.int32)
        slots, tables, lengths = jax.device_put((slots, tables, lengths))
        given = dataclasses.replace(template, block_tables=tables, lengths=lengths)
        state = compiled(weights, dataclasses.replace(state, allocator=given), slots)
        template = state.allocator
        allocator.free(np.asarray(state.tokens) < 0)  # no token ends a sequence here, but to know it takes the wait
        times.append(time.perf_counter() - begun)
    return state, times


def host_allocator(allocator: BlockAllocator) -> HostAllocator:
    num_seqs, max_blocks = allocator.block_tables.shape
    host = HostAllocator(allocator.num_blocks, BLOCK_SIZE, num_seqs, max_blocks)
    while max(host.lengths) < int(allocator.lengths[0]):  # all are of one length
        host.append()
    return host


def measure(shapes: list[str], toy: bool, append_us: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, result) of each shape; `append_us` is what `append` takes in a loop of its own."""
    config = llama_step.toy(2) if toy else llama_step.llama_3_8b(32)
    weights, apply = MODELS[MODEL](config)
    for shape in shapes:
        num_seqs, length = map(int, shape.split("x"))
        state = decode_step.start(config, num_seqs, length)
        forms = {"jaxpaged": state.allocator, "filled": fill_tables(state.allocator), "host": state.allocator}
        arguments = {"jaxpaged": (jnp.int32(1),), "filled": (jnp.int32(1),), "host": (jnp.zeros(num_seqs, jnp.int32),)}
        loop_without = functools.partial(decode_step.loop, step=step_without)
        functions: dict[str, Any] = {"jaxpaged": decode_step.loop, "filled": loop_without, "host": host_step}
        lowered = {
            form: jax.jit(functools.partial(functions[form], apply), donate_argnums=1).lower(
                weights, state, *arguments[form]
            )
            for form in forms
        }
        compiled = compile_all({form: each.compile for form, each in lowered.items()})
        caches = state.caches
        tokens = {}
        seconds: dict[str, list[float]] = {form: [] for form in forms}
        for form in [*forms, *forms] + [*forms] * (ROUNDS - 1):
            first = form not in tokens
            fresh = State(jnp.arange(num_seqs, dtype=jnp.int32), caches, jax.tree.map(jnp.copy, forms[form]))
            if form == "host":
                after, times = time_host(compiled[form], weights, fresh, FEW_STEPS if first else HOST_STEPS)
            elif first:
                after, times = compiled[form](weights, fresh, jnp.int32(FEW_STEPS)), []
            else:
                after, times = decode_step.time_loop(compiled[form], weights, fresh)
            caches = after.caches
            if first:  # the same tokens, whoever says where they go
                tokens[form] = np.asarray(after.tokens)
                np.testing.assert_array_equal(tokens[form], tokens["jaxpaged"])
            else:
                seconds[form] += times
        milliseconds = {form: statistics.median(times) * 1e3 for form, times in seconds.items()}
        share = 1 - milliseconds["filled"] / milliseconds["jaxpaged"]
        result = {"ms": milliseconds, "runs_s": seconds, "share": share}
        yield f"model {shape}", result | {"append_share": append_us / milliseconds["jaxpaged"] / 1e3}
        del state, caches, after, fresh


def line(name: str, result: dict[str, Any]) -> str:
    ms = result["ms"]
    return (
        f"{name}: {ms['jaxpaged']:.3f} ms a step, {ms['filled']:.3f} with tables filled beforehand, "
        f"{ms['host']:.3f} with the host allocator; the allocator's share {result['share']:.2%}, "
        f"as append in a loop of its own {result['append_share']:.2%}"
    )
