"""Loops for benchmarks/allocator/operations.py: each operation of the allocator is the body of a loop inside one jit.

Every step changes the state that the loop carries, so XLA can neither hoist nor drop a step: sequences grow or shrink
by a token, beams change places, prompts are looked up in rotated order.

An iteration runs `UNROLL` steps, and the trip count is static. With a dynamic trip count the host of a GPU would read
the loop's condition, which is slower than most operations and would hide their time.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpaged import BlockAllocator, PrefixCache

BLOCK_SIZE, PROMPT_LENGTH = 16, 256
NUM_STEPS, UNROLL = 256, 8  # steps per dispatch, and per iteration of its loop


@dataclasses.dataclass(frozen=True)
class Point:
    """A case: sizes, and how much of the pool the sequences hold when the loop begins."""

    num_seqs: int
    num_blocks: int
    max_blocks: int
    length: int  # tokens at the start, at most; each sequence has up to a block less


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoopState:
    allocator: BlockAllocator
    prefix_cache: PrefixCache | None
    prompts: jax.Array | None  # int32 [seqs, PROMPT_LENGTH]
    result: jax.Array  # int32 [seqs], result of the last step
    total: jax.Array  # int32 [seqs], sum over all steps: XLA must compute each of them
    ok: jax.Array  # bool [seqs], false after a refusal in any step


Body = Callable[[jax.Array, LoopState], LoopState]


def append(i: jax.Array, state: LoopState) -> LoopState:
    """A token for every sequence: what a decode step does."""
    allocator, slots, ok = state.allocator.append(jnp.ones_like(state.result))
    return dataclasses.replace(state, allocator=allocator, result=slots, ok=state.ok & ok)


def append_and_free(i: jax.Array, state: LoopState) -> LoopState:
    """A token for every sequence, and one sequence in 64 ends and starts again."""
    state = append(i, state)
    rows = jnp.arange(state.result.size, dtype=jnp.int32)
    return dataclasses.replace(state, allocator=state.allocator.free((rows + i) % 64 == 0))


def reorder(i: jax.Array, state: LoopState) -> LoopState:
    """Beam search of width 4: the first beam is kept twice, the last is dropped, the others change places."""
    rows = jnp.arange(state.result.size, dtype=jnp.int32)
    parents = rows // 4 * 4 + jnp.asarray([0, 0, 2, 1], jnp.int32)[rows % 4]
    parents = jnp.minimum(parents, rows.size - 1)
    allocator, (_, destination_ids), ok = state.allocator.fork(parents, replace=True)
    return dataclasses.replace(state, allocator=allocator, result=destination_ids, ok=state.ok & ok)


def rollback(i: jax.Array, state: LoopState) -> LoopState:
    """Removes the newest token of every sequence."""
    allocator, (_, destination_ids), ok = state.allocator.rollback(state.allocator.lengths - 1)
    return dataclasses.replace(state, allocator=allocator, result=destination_ids, ok=state.ok & ok)


def free(i: jax.Array, state: LoopState) -> LoopState:
    """Frees one sequence per step. After the last one a step changes nothing but costs the same."""
    rows = jnp.arange(state.result.size, dtype=jnp.int32)
    return dataclasses.replace(state, allocator=state.allocator.free(rows == i))


def match_prefix(i: jax.Array, state: LoopState) -> LoopState:
    """Matches a prompt for every sequence, half of them cached, and frees all again: subtract the cost of `free`."""
    assert state.prompts is not None
    assert state.prefix_cache is not None
    prompts = jnp.roll(state.prompts, 1, axis=0)
    lengths = jnp.full_like(state.result, prompts.shape[1])
    prefix_cache, allocator, num_cached = state.prefix_cache.match_prefix(state.allocator, prompts, lengths)
    allocator = allocator.free(jnp.ones_like(state.ok))
    return LoopState(allocator, prefix_cache, prompts, num_cached, state.total, state.ok)


BODIES: dict[str, Body] = {
    "append": append,
    "append, free": append_and_free,
    "free": free,
    "fork, replace": reorder,
    "rollback": rollback,
    "match_prefix, free": match_prefix,
}


def start(point: Point, *, prompts: bool = False) -> LoopState:
    return _start_prompts(point) if prompts else _start_sequences(point)


@functools.partial(jax.jit, static_argnames="point")
def _start_sequences(point: Point) -> LoopState:
    """Sequences that grew together, a block at a time. The last block of a first beam is never full."""
    allocator = BlockAllocator.create(
        num_blocks=point.num_blocks, block_size=BLOCK_SIZE, num_seqs=point.num_seqs, max_blocks_per_seq=point.max_blocks
    )
    block = jnp.full(point.num_seqs, BLOCK_SIZE, jnp.int32)
    rounds = point.length // BLOCK_SIZE - 1
    allocator = lax.fori_loop(0, rounds, lambda _, held: held.append(block, q_len=BLOCK_SIZE)[0], allocator)
    rest = BLOCK_SIZE - 1 - jnp.arange(point.num_seqs, dtype=jnp.int32) % BLOCK_SIZE
    allocator, _, ok = allocator.append(rest, q_len=BLOCK_SIZE)
    return LoopState(allocator, None, None, jnp.zeros_like(block), jnp.zeros_like(block), ok)


@functools.partial(jax.jit, static_argnames="point")
def _start_prompts(point: Point) -> LoopState:
    """Empty rows. Every other prompt is cached in blocks that no sequence holds."""
    allocator = BlockAllocator.create(
        num_blocks=point.num_blocks, block_size=BLOCK_SIZE, num_seqs=point.num_seqs, max_blocks_per_seq=point.max_blocks
    )
    prompts = jax.random.randint(jax.random.key(0), (point.num_seqs, PROMPT_LENGTH), 0, 1 << 16, jnp.int32)
    is_even = jnp.arange(point.num_seqs, dtype=jnp.int32) % 2 == 0
    allocator, slots, ok = allocator.append(jnp.where(is_even, PROMPT_LENGTH, 0), q_len=PROMPT_LENGTH)
    prefix_cache, allocator = PrefixCache.create(num_blocks=point.num_blocks, block_size=BLOCK_SIZE).insert(
        allocator, prompts
    )
    allocator = allocator.free(jnp.ones_like(ok))
    return LoopState(allocator, prefix_cache, prompts, slots[:, 0], jnp.zeros_like(slots[:, 0]), ok)


@functools.partial(jax.jit, static_argnames=("body", "num_steps", "unroll"))
def run(state: LoopState, *, body: Body, num_steps: int = NUM_STEPS, unroll: int = UNROLL) -> LoopState:
    def step(i: jax.Array, state: LoopState) -> LoopState:
        after = body(i, state)
        after = dataclasses.replace(after, total=state.total + after.result)
        # Keeps XLA from fusing two steps of one iteration.
        return lax.optimization_barrier(after)

    return lax.fori_loop(0, num_steps, step, state, unroll=unroll)


def check(name: str, before: LoopState, after: LoopState, num_steps: int) -> None:
    """Raises unless the invariants hold, no sequence was refused, and the state is right."""
    broken = after.allocator.broken_invariants()
    lengths, old = np.asarray(after.allocator.lengths), np.asarray(before.allocator.lengths)
    rows = np.arange(lengths.size)
    expected = {
        "append": old + num_steps,
        "rollback": old - num_steps,
        "free": np.where(rows < num_steps, 0, old),
        "match_prefix, free": 0 * old,
    }.get(name, lengths)
    results = np.asarray(after.result)
    good = {
        "match_prefix, free": (results > 0).sum() == (lengths.size + 1) // 2,
        "fork, replace": (results > 0).sum() == lengths.size // 4,
    }.get(name, True)
    if broken or not bool(after.ok.all()) or not np.array_equal(lengths, expected) or not good:
        raise AssertionError(f"{name}: {broken=}, ok={after.ok.all()}, {lengths=}, {expected=}, {results=}")
