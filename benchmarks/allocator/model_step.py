"""The allocator's share of a decode step: a model of Llama-3-8B's shape, with three ways to say where tokens go.

- `jaxpaged`: `BlockAllocator.append` in each step of one `lax.while_loop`.
- `tables filled beforehand`: the same loop, but every block was handed out before it began: no allocator at all.
- `host`: `host_allocator.py`, and a jitted step for each token. Before it knows which sequences end it waits for the
  tokens; then it sends tables, lengths and slots.

The share is what the second saves of the first. Both wait for the host to read the loop's condition, once a step.
"""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.allocator.host_allocator import HostAllocator
from benchmarks.checks import poisoned
from benchmarks.harness import compile_all
from benchmarks.models import decode_step, llama_step
from benchmarks.models.decode_step import BLOCK_SIZE, FEW_STEPS, State
from benchmarks.models.llama_step import MODELS, Apply
from jaxpaged import BlockAllocator, KVCache

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
    """All blocks that the rows can take are in them, as the steps would hand them out; the lengths as they were."""
    max_blocks = allocator.block_tables.shape[1]
    room = max_blocks * BLOCK_SIZE

    def grow(_: jax.Array, filled: BlockAllocator) -> BlockAllocator:
        return filled.append(jnp.minimum(BLOCK_SIZE, room - filled.lengths), q_len=BLOCK_SIZE)[0]

    filled = jax.jit(lambda filled: lax.fori_loop(0, max_blocks, grow, filled))(allocator)
    if bool((filled.lengths < room).any()):
        raise AssertionError("the pool is too small for full tables")
    return dataclasses.replace(filled, lengths=allocator.lengths)


def without_keys(caches: tuple[KVCache, ...]) -> tuple[KVCache, ...]:
    """Zeros for the keys of the first layer, so that `broken_invariants` sees where a step writes."""
    return dataclasses.replace(caches[0], k=jnp.zeros_like(caches[0].k)), *caches[1:]


def check(form: str, after: State, wanted: State, length: int) -> None:
    """Raises unless all steps since `length` use the same blocks and give the same tokens as `wanted`."""
    lengths, allocator = np.asarray(wanted.allocator.lengths), wanted.allocator
    np.testing.assert_array_equal(after.allocator.lengths, lengths, err_msg=form)
    is_held = np.arange(allocator.block_tables.shape[1]) * BLOCK_SIZE < lengths[:, None]
    tables, wanted_tables = (np.asarray(state.allocator.block_tables)[is_held] for state in (after, wanted))
    np.testing.assert_array_equal(tables, wanted_tables, err_msg=form)

    positions = np.arange(length, lengths[0])  # all are of one length
    is_new = np.zeros((allocator.num_blocks, BLOCK_SIZE), np.bool_)
    is_new[np.asarray(allocator.block_tables)[:, positions // BLOCK_SIZE], positions % BLOCK_SIZE] = True
    is_written = jax.jit(lambda k: (k != 0).any(axis=(2, 3)))(after.caches[0].k)
    np.testing.assert_array_equal(is_written, is_new, err_msg=form)

    # On a GPU each of the three programs has its own choice of algorithms for the products, so that logits differ in
    # their last bits. With random weights the two best of a row may be nearer than that, and then it goes its own way.
    agree = float((np.asarray(after.tokens) == np.asarray(wanted.tokens)).mean())
    least = 1.0 if jax.default_backend() == "cpu" else 0.75
    if agree < least:
        raise AssertionError(
            f"{form}: {agree:.0%} of the tokens equal those of `jaxpaged`; at least {least:.0%} must be"
        )


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
        wanted: State | None = None  # without its caches, which the next form takes over
        seconds: dict[str, list[float]] = {form: [] for form in forms}
        for turn, form in itertools.product(range(1 + ROUNDS), forms):
            first = turn == 0
            caches = without_keys(caches) if first else caches
            fresh = State(jnp.arange(num_seqs, dtype=jnp.int32), caches, jax.tree.map(jnp.copy, forms[form]))
            if form == "host":
                after, times = time_host(compiled[form], weights, fresh, FEW_STEPS if first else HOST_STEPS)
            elif first:
                after, times = poisoned(compiled[form], weights, fresh, jnp.int32(FEW_STEPS)), []
            else:
                after, times = decode_step.time_loop(compiled[form], weights, fresh)
            caches = after.caches
            if first:
                wanted = wanted or dataclasses.replace(after, caches=())
                check(form, after, wanted, length)
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
