"""Random interleavings of every operation against a plain model: under jit, under vmap over four pools, and eagerly.

`HYPOTHESIS_PROFILE=long` runs 20 times as many steps, with new random numbers each time.

Beside the books the machine keeps what a cache would hold, a number a slot: written where `append` says, copied as
`fork` and `rollback` say, overwritten with poison in every block that is free and not cached. Each sequence must read
its own tokens through its table after every step.
"""

import copy
import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from jaxpaged import BlockAllocator, PrefixCache
from tests.allocator_model import Model

SIZES = "num_blocks", "block_size", "num_seqs", "max_blocks_per_seq"
pytestmark = pytest.mark.slow

POISON = -1
LONGER = 20 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    allocator: BlockAllocator
    prefix_cache: PrefixCache


def append(state, num_tokens, *, q_len):
    allocator, slots, ok = state.allocator.append(num_tokens, q_len=q_len)
    return dataclasses.replace(state, allocator=allocator), slots, ok


def free(state, seqs):
    return (dataclasses.replace(state, allocator=state.allocator.free(seqs)),)


def fork(state, parents, *, replace):
    allocator, copies, ok = state.allocator.fork(parents, replace=replace)
    return dataclasses.replace(state, allocator=allocator), copies, ok


def rollback(state, lengths):
    allocator, copies, ok = state.allocator.rollback(lengths)
    return dataclasses.replace(state, allocator=allocator), copies, ok


def match_prefix(state, tokens, lengths, salts):
    prefix_cache, allocator, num_cached = state.prefix_cache.match_prefix(state.allocator, tokens, lengths, salts=salts)
    return State(allocator, prefix_cache), num_cached


def insert(state, tokens, salts):
    return (State(*reversed(state.prefix_cache.insert(state.allocator, tokens, salts=salts))),)


def clear(state):
    return (State(*reversed(state.prefix_cache.clear(state.allocator))),)


def go_back(state, old):
    return (State(*reversed(state.prefix_cache.clear(old))),)


def look(state):
    """What the machine compares that is not an attribute."""
    allocator = state.allocator
    return allocator.pool.is_cached(jnp.arange(allocator.num_blocks, dtype=jnp.int32)), allocator.num_held


OPERATIONS = (
    append,
    free,
    fork,
    rollback,
    match_prefix,
    insert,
    clear,
    go_back,
    look,
)
STATIC = ("q_len", "replace")
EAGER = {f.__name__: f for f in OPERATIONS}


def jitted(operation):
    return jax.jit(lambda *args, **static: operation(*args, **static), static_argnames=STATIC)


def over_pools(operation):
    return jitted(lambda *args, **static: jax.vmap(lambda *each: operation(*each, **static))(*args))


JITTED = {f.__name__: jitted(f) for f in OPERATIONS}
VMAPPED = {f.__name__: over_pools(f) for f in OPERATIONS}


class AllocatorMachine(RuleBasedStateMachine):
    SHAPES: tuple = ((4, 1, 2, 3), (500, 16, 4, 40))  # few, since each compiles
    NUM_POOLS = 1
    num_steps = 0
    operations = JITTED

    @initialize(data=st.data())
    def create(self, data: st.DataObject) -> None:
        self.shape, windows = data.draw(st.sampled_from(self.SHAPES)), (None,)
        if len(self.shape) > len(SIZES):
            *self.shape, windows = self.shape
        # Without a group that keeps all blocks, what is found depends on the order in which they are overwritten.
        self.has_cache = windows[0] is None
        num_blocks, block_size, _, max_blocks = self.shape
        self.width = max_blocks * block_size
        self.models = [Model(*self.shape, windows) for _ in range(self.NUM_POOLS)]
        self.contents = [np.full(num_blocks * block_size, POISON) for _ in self.models]
        state = State(
            BlockAllocator.create(**dict(zip(SIZES, self.shape, strict=True)), windows=windows),
            PrefixCache.create(num_blocks=num_blocks, block_size=block_size, num_groups=len(windows)),
        )
        self.state = state if self.NUM_POOLS == 1 else jax.tree.map(lambda x: jnp.stack([x] * self.NUM_POOLS), state)
        self.earlier: list[tuple[BlockAllocator, list[Model], list[np.ndarray]]] = []

    # What runs it: arrays for each pool in, a list of results for each pool out.

    def run(self, name: str, *args: list[np.ndarray] | BlockAllocator, **static: object) -> list[list]:
        def one(arg: list[np.ndarray] | BlockAllocator) -> object:
            if isinstance(arg, BlockAllocator):
                return arg
            return jnp.asarray(arg[0] if self.NUM_POOLS == 1 else np.stack(arg))

        self.state, *results = self.operations[name](self.state, *map(one, args), **static)
        return self.by_pool(results)

    def by_pool(self, tree: object) -> list:
        tree = jax.tree.map(np.asarray, tree)
        return [tree if self.NUM_POOLS == 1 else jax.tree.map(lambda x, i=i: x[i], tree) for i in range(self.NUM_POOLS)]

    def rngs(self, seed: int) -> list[tuple[int, Model, np.random.Generator]]:
        return [(i, model, np.random.default_rng([seed, i])) for i, model in enumerate(self.models)]

    def draw_tokens(self, rng: np.random.Generator, count: int) -> list[int]:
        return [int(token) for token in rng.integers(0, 2, count)]  # few different ones, so that prefixes meet

    @rule(seed=st.integers(0, 2**31), q_len=st.sampled_from([1, 7, 40]))
    def append(self, seed: int, q_len: int) -> None:
        counts, expected = [], []
        for _, model, rng in self.rngs(seed):
            kind = rng.integers(4)
            few = rng.integers(-1 if kind == 0 else 0, q_len + 2 if kind < 2 else 4, model.num_seqs)
            counts.append(few.astype(np.int32))
            new = [self.draw_tokens(rng, max(int(n), 0)) for n in few]
            expected.append((new, *model.append(new, few.tolist(), q_len)))
        for i, (slots, ok) in enumerate(self.run("append", counts, q_len=q_len)):
            new, expected_slots, expected_ok = expected[i]
            assert ok.tolist() == expected_ok
            num_seqs = len(ok)
            for index, (row, these) in enumerate(zip(slots.reshape(-1, q_len).tolist(), expected_slots, strict=True)):
                padding = q_len - len(these)
                assert row[padding:] == these
                assert all(slot >= len(self.contents[i]) for slot in row[:padding])
                if ok[index % num_seqs]:
                    self.contents[i][these] = new[index % num_seqs]
                    self.check_view(self.models[i], index, len(these))

    def check_view(self, model: Model, row: int, num_new: int) -> None:
        """The first of the new tokens sees only blocks that are there."""
        window, position = model.windows[row // model.num_seqs], model.lengths[row % model.num_seqs] - num_new
        if num_new and window is not None:
            assert model.passed[row] <= max(position - (window - 1), 0) // model.block_size

    def marks(self, seed: int) -> list[np.ndarray]:
        return [rng.random(model.num_seqs) < rng.choice([0.2, 0.5, 1]) for _, model, rng in self.rngs(seed)]

    @rule(seed=st.integers(0, 2**31))
    def free(self, seed: int) -> None:
        marks = self.marks(seed)
        for model, mark in zip(self.models, marks, strict=True):
            model.free_rows(mark.tolist())
        self.run("free", marks)

    @rule(seed=st.integers(0, 2**31), replace=st.booleans())
    def fork(self, seed: int, replace: bool) -> None:
        args, expected = [], []
        for _, model, rng in self.rngs(seed):
            rows = model.num_seqs
            low, high = (-2, rows + 1) if rng.integers(3) == 0 else (0, rows)
            args.append(rng.integers(low, high, rows).astype(np.int32))
            expected.append(model.fork(args[-1].tolist(), replace))
        self.check_copies(expected, self.run("fork", args, replace=replace))

    @rule(seed=st.integers(0, 2**31))
    def rollback(self, seed: int) -> None:
        args, expected = [], []
        for _, model, rng in self.rngs(seed):
            lengths = np.asarray(model.lengths)
            cut = rng.integers(0, 1 + np.maximum(np.where(rng.random(len(lengths)) < 0.5, lengths, 3), 0))
            odd = rng.integers(-2, 2, len(lengths)) if rng.integers(4) == 0 else 0
            args.append((np.maximum(lengths - cut, 0) + odd).astype(np.int32))
            expected.append(model.rollback(args[-1].tolist()))
        self.check_copies(expected, self.run("rollback", args))

    def check_copies(self, expected: list, results: list) -> None:
        block_size = self.shape[1]
        for contents, (pairs, expected_ok), (copies, ok) in zip(self.contents, expected, results, strict=True):
            assert ok.tolist() == expected_ok
            sources, destinations = (ids.ravel()[copies[1].ravel() > 0] for ids in copies)
            assert list(zip(sources.tolist(), destinations.tolist(), strict=True)) == pairs
            view = contents.reshape(-1, block_size)
            view[destinations] = view[sources]

    def kept_tokens(self, model: Model, row: int) -> list[tuple[int, int]]:
        """The tokens that the row's window has not passed, with their positions."""
        return list(enumerate(model.tokens[row % model.num_seqs]))[model.passed[row] * model.block_size :]

    @rule(seed=st.integers(0, 2**31))
    def match_prefix(self, seed: int) -> None:
        if not self.has_cache:
            return
        tokens, lengths, salts, expected = [], [], [], []
        for _, model, rng in self.rngs(seed):
            rows = model.num_seqs
            keys = [list(key) for key in model.cached.values()] or [[0]]
            prompts, of_rows = [], []
            for _ in range(rows):
                salt, *prompt = keys[rng.integers(len(keys))]
                salt = salt[0] if isinstance(salt, tuple) else salt
                prompt = (prompt + self.draw_tokens(rng, int(rng.integers(0, 4))))[: self.width]
                prompts.append(
                    prompt if rng.random() < 0.7 else self.draw_tokens(rng, int(rng.integers(0, self.width)))
                )
                of_rows.append(salt if rng.random() < 0.8 else 1 - salt)
            expected.append(model.match_prefix(prompts, of_rows))
            tokens.append(self.padded(rng, prompts))
            lengths.append(np.asarray([len(prompt) for prompt in prompts], np.int32))
            salts.append(np.asarray(of_rows, np.int32))
        for (num_cached,), wanted in zip(self.run("match_prefix", tokens, lengths, salts), expected, strict=True):
            assert num_cached.tolist() == wanted

    @rule(seed=st.integers(0, 2**31))
    def insert(self, seed: int) -> None:
        if not self.has_cache:
            return
        tokens, salts = [], []
        for _, model, rng in self.rngs(seed):
            model.salts = [
                salt if tokens else int(rng.integers(2)) for salt, tokens in zip(model.salts, model.tokens, strict=True)
            ]
            tokens.append(self.padded(rng, model.tokens))
            salts.append(np.asarray(model.salts, np.int32))
            model.insert(self.width)
        self.run("insert", tokens, salts)

    @rule(wanted=st.integers(0, 3))
    def clear(self, wanted: int) -> None:
        if wanted or not self.has_cache:  # not as often as the others, or little is ever cached
            return
        for model in self.models:
            model.clear()
        self.run("clear")

    def padded(self, rng: np.random.Generator, rows: list[list[int]]) -> np.ndarray:
        array = rng.integers(0, 2, (len(rows), self.width), np.int32)
        for row, tokens in zip(array, rows, strict=True):
            row[self.width - len(tokens) :] = tokens
        return array

    @rule()
    def keep(self) -> None:
        contents = [each.copy() for each in self.contents]
        self.earlier = [*self.earlier[-2:], (self.state.allocator, copy.deepcopy(self.models), contents)]

    @rule(which=st.integers(0, 2))
    def go_back(self, which: int) -> None:
        if not self.earlier:
            return
        allocator, old, contents = self.earlier[which % len(self.earlier)]
        if not all(model.has_freed_nothing_of(each) for model, each in zip(self.models, old, strict=True)):
            return
        for each, then, now in zip(old, contents, self.contents, strict=True):
            for row in range(len(each.blocks)):  # what the old one's sequences wrote is still there
                kept = self.kept_tokens(each, row)
                slots = [each.slot(row, token) for token, _ in kept]
                assert now[slots].tolist() == [value for _, value in kept] == then[slots].tolist()
        self.models = [model.gone_back(each) for model, each in zip(self.models, old, strict=True)]
        if self.has_cache:
            self.run("go_back", allocator)
        else:
            self.state = State(allocator, self.state.prefix_cache)

    @invariant()
    def agrees(self) -> None:
        type(self).num_steps += 1
        cached_and_held = self.by_pool(self.operations["look"](self.state))
        for i, state in enumerate(self.by_pool(self.state)):
            self.compare(state.allocator, self.models[i], self.contents[i], *cached_and_held[i])

    def compare(
        self, allocator: BlockAllocator, model: Model, contents: np.ndarray, cached: np.ndarray, num_held: np.ndarray
    ) -> None:
        assert allocator.broken_invariants() == ()
        assert allocator.lengths.tolist() == model.lengths
        pool, num_free = allocator.pool, len(model.free)
        indices = (int(pool.bottom) + np.arange(num_free)) % allocator.num_blocks
        assert pool.free_list[indices].tolist() == model.free
        assert (int(pool.num_free), int(pool.num_waiting)) == (num_free, model.num_waiting)
        max_blocks = allocator.block_tables.shape[-1]
        for index, row in enumerate(allocator.block_tables.reshape(-1, max_blocks).tolist()):
            held, passed = model.held(index), model.passed[index]  # those before may be anything
            assert row[passed:] == held + [0] * (max_blocks - passed - len(held))
        if allocator.num_passed is not None:
            assert allocator.num_passed.ravel().tolist() == model.passed
        assert set(np.flatnonzero(cached).tolist()) == set(model.cached)
        held = {block for row in range(len(model.blocks)) for block in model.held(row)}
        assert sorted([0, *held, *model.free]) == list(range(allocator.num_blocks))
        assert int(num_held) == len(held)
        free = [block for block in model.free if block not in model.cached]
        contents.reshape(-1, allocator.block_size)[free] = POISON
        for row in range(len(model.blocks)):
            kept = self.kept_tokens(model, row)
            assert contents[[model.slot(row, token) for token, _ in kept]].tolist() == [value for _, value in kept]
        for block, (_, *tokens) in model.cached.items():
            assert contents.reshape(-1, allocator.block_size)[block].tolist() == tokens[-allocator.block_size :]


class GroupedMachine(AllocatorMachine):
    """Groups of layers with windows: short ones, ones that are no multiple of a block, and no other group."""

    SHAPES = ((90, 2, 4, 30, (None, 5, 5, 16)), (60, 1, 3, 30, (None, None, 1)), (40, 4, 3, 20, (7,)))


class VmappedMachine(AllocatorMachine):
    """Four independent pools at once, each with arguments of its own."""

    NUM_POOLS = 4
    SHAPES = ((40, 2, 6, 8),)
    operations = VMAPPED


def each_way(name):
    """An operation on four pools under vmap, on each of them under jit, and on each eagerly: to the bit the same."""

    def operation(state, *args, **static):
        together = VMAPPED[name](state, *args, **static)
        for i in range(VmappedMachine.NUM_POOLS):
            one, *of_one = jax.tree.map(lambda x, i=i: x[i], (state, *args))
            for apart in (EAGER[name](one, *of_one, **static), JITTED[name](one, *of_one, **static)):
                same = jax.tree.map(lambda x, y, i=i: np.array_equal(x[i], y), tuple(together), tuple(apart))
                assert jax.tree.all(same), (name, i)
        return together

    return operation


EACH_WAY = {name: each_way(name) for name in EAGER}


class EagerMachine(VmappedMachine):
    SHAPES = ((9, 4, 4, 3),)
    operations = EACH_WAY


def run_machine(machine: type[AllocatorMachine], max_examples: int, steps: int) -> int:
    """How many steps were taken."""
    machine.num_steps = 0
    # Not shrunk: that takes minutes, and the steps of a failure are printed all the same.
    phases = (Phase.generate,)
    examples = settings(max_examples=max_examples * LONGER, stateful_step_count=steps, phases=phases)
    run_state_machine_as_test(machine, settings=examples)
    return machine.num_steps


def test_under_jit():
    assert run_machine(AllocatorMachine, 260, 50) >= 10_000


def test_groups_of_layers():
    assert run_machine(GroupedMachine, 60, 50) >= 2_000


def test_under_vmap_over_four_pools():
    assert run_machine(VmappedMachine, 8, 40) >= 200


def test_jit_and_vmap_equal_the_eager_run():
    assert run_machine(EagerMachine, 2, 20) >= 5


def test_a_mistake_is_found(monkeypatch):
    # The twin: a token too many.
    wrong = {**JITTED, "append": lambda state, counts, **static: JITTED["append"](state, counts + 1, **static)}
    monkeypatch.setattr(AllocatorMachine, "operations", wrong)
    with pytest.raises(AssertionError):
        run_machine(AllocatorMachine, 20, 20)
