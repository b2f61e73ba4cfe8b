"""Random interleavings of every operation against a plain model: under jit, under vmap over four pools, and eagerly.

`HYPOTHESIS_PROFILE=long` runs 20 times the steps, with new random numbers each time.

The machine also models a cache with one number per slot. It writes to the slots of `append`, makes the copies of `fork`
and `rollback`, and poisons every block that is free and not cached. After every step each sequence must read its own
tokens through its table.
"""

import copy
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
from tests.allocator.allocators import free_ids
from tests.allocator_model import Model

SIZES = "num_blocks", "block_size", "num_seqs", "max_blocks_per_seq"
pytestmark = pytest.mark.slow

POISON = -1
LONGER = 20 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 1


def on_allocator(name):
    """A method of the allocator as an operation: state (allocator, prefix cache), ... -> state, results."""

    def operation(state, *args, **static):
        result = getattr(state[0], name)(*args, **static)
        allocator, *rest = result if isinstance(result, tuple) else (result,)
        return (allocator, state[1]), *rest

    return operation


def match_prefix(state, tokens, lengths, salts):
    prefix_cache, allocator, num_cached = state[1].match_prefix(state[0], tokens, lengths, salts=salts)
    return (allocator, prefix_cache), num_cached


def insert(state, tokens, salts):
    return (state[1].insert(state[0], tokens, salts=salts)[::-1],)


def clear(state, allocator):
    """With this allocator, the present one or an earlier one."""
    return (state[1].clear(allocator)[::-1],)


def are_cached(state):
    return state, state[0].pool.is_cached(jnp.arange(state[0].num_blocks, dtype=jnp.int32))


EAGER = {name: on_allocator(name) for name in ("append", "free", "fork", "rollback")}
EAGER |= {operation.__name__: operation for operation in (match_prefix, insert, clear, are_cached)}


def jitted(operation):
    return jax.jit(lambda *args, **static: operation(*args, **static), static_argnames=("q_len", "replace"))


def over_pools(operation):
    return jitted(lambda *args, **static: jax.vmap(lambda *each: operation(*each, **static))(*args))


JITTED = {name: jitted(operation) for name, operation in EAGER.items()}
VMAPPED = {name: over_pools(operation) for name, operation in EAGER.items()}


def draw_tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, 2, count).tolist()  # few different tokens, so that prefixes match


class AllocatorMachine(RuleBasedStateMachine):
    # Sizes, and the windows of groups of layers. Few, because each one compiles.
    SHAPES: tuple = (((4, 1, 2, 3), (None,)), ((500, 16, 4, 40), (None,)))
    NUM_POOLS = 1
    num_steps = 0
    operations = JITTED

    @initialize(data=st.data())
    def create(self, data: st.DataObject) -> None:
        self.shape, windows = data.draw(st.sampled_from(self.SHAPES))
        # Without a group that keeps all blocks, matches depend on the order in which blocks are overwritten.
        self.has_cache = windows[0] is None
        num_blocks, block_size, _, max_blocks = self.shape
        self.width = max_blocks * block_size
        self.models = [Model(*self.shape, windows) for _ in range(self.NUM_POOLS)]
        self.contents = [np.full(num_blocks * block_size, POISON) for _ in self.models]
        state = (
            BlockAllocator.create(**dict(zip(SIZES, self.shape, strict=True)), windows=windows),
            PrefixCache.create(num_blocks=num_blocks, block_size=block_size, num_groups=len(windows)),
        )
        self.state = state if self.NUM_POOLS == 1 else jax.tree.map(lambda x: jnp.stack([x] * self.NUM_POOLS), state)
        self.earlier: list[tuple[BlockAllocator, list[Model], list[np.ndarray]]] = []

    def run(self, name: str, *args: list[np.ndarray] | BlockAllocator, **static: object) -> list[list]:
        """Arrays for each pool in, a list of results for each pool out."""

        def one(arg: list[np.ndarray] | BlockAllocator) -> object:
            if isinstance(arg, BlockAllocator):
                return arg
            return jnp.asarray(arg[0] if self.NUM_POOLS == 1 else np.stack(arg))

        self.state, *results = self.operations[name](self.state, *map(one, args), **static)
        return self.by_pool(results)

    def by_pool(self, tree: object) -> list:
        tree = jax.tree.map(np.asarray, tree)
        return [tree if self.NUM_POOLS == 1 else jax.tree.map(lambda x, i=i: x[i], tree) for i in range(self.NUM_POOLS)]

    def each(self, seed: int) -> list[tuple[Model, np.random.Generator]]:
        return [(model, np.random.default_rng([seed, i])) for i, model in enumerate(self.models)]

    @rule(seed=st.integers(0, 2**31), q_len=st.sampled_from([1, 7, 40]))
    def append(self, seed: int, q_len: int) -> None:
        counts, expected = [], []
        for model, rng in self.each(seed):
            kind = rng.integers(4)
            few = rng.integers(-1 if kind == 0 else 0, q_len + 2 if kind < 2 else 4, model.num_seqs)
            counts.append(few.astype(np.int32))
            new = [draw_tokens(rng, max(n, 0)) for n in few.tolist()]
            expected.append((new, *model.append(new, few.tolist(), q_len)))
        results = self.run("append", counts, q_len=q_len)
        for contents, (slots, ok), (new, rows, oks) in zip(self.contents, results, expected, strict=True):
            assert ok.tolist() == oks
            assert slots.reshape(-1, q_len).tolist() == [[len(contents)] * (q_len - len(row)) + row for row in rows]
            for index, row in enumerate(rows):
                if oks[index % len(oks)]:
                    contents[row] = new[index % len(oks)]

    @rule(seed=st.integers(0, 2**31))
    def free(self, seed: int) -> None:
        marks = [rng.random(model.num_seqs) < rng.choice([0.2, 0.5, 1]) for model, rng in self.each(seed)]
        for model, marked in zip(self.models, marks, strict=True):
            model.free_rows(marked.tolist())
        self.run("free", marks)

    @rule(seed=st.integers(0, 2**31), replace=st.booleans())
    def fork(self, seed: int, replace: bool) -> None:
        args, expected = [], []
        for model, rng in self.each(seed):
            rows = model.num_seqs
            low, high = (-2, rows + 1) if rng.integers(3) == 0 else (0, rows)
            args.append(rng.integers(low, high, rows).astype(np.int32))
            expected.append(model.fork(args[-1].tolist(), replace))
        self.check_copies(expected, self.run("fork", args, replace=replace))

    @rule(seed=st.integers(0, 2**31))
    def rollback(self, seed: int) -> None:
        args, expected = [], []
        for model, rng in self.each(seed):
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
        """(slot, token) of each token that the row's window has not passed."""
        tokens = list(enumerate(model.tokens[row % model.num_seqs]))
        return [(model.slot(row, i), token) for i, token in tokens[model.passed[row] * model.block_size :]]

    @rule(seed=st.integers(0, 2**31))
    def match_prefix(self, seed: int) -> None:
        if not self.has_cache:
            return
        tokens, lengths, salts, expected = [], [], [], []
        for model, rng in self.each(seed):
            keys = list(model.cached.values()) or [(0, 0)]
            prompts, of_rows = [], []
            for _ in range(model.num_seqs):
                salt, *prompt = keys[rng.integers(len(keys))]
                salt = salt[0] if isinstance(salt, tuple) else salt
                prompt = (prompt + draw_tokens(rng, rng.integers(0, 4)))[: self.width]
                prompts.append(prompt if rng.random() < 0.7 else draw_tokens(rng, rng.integers(0, self.width)))
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
        for model, rng in self.each(seed):
            model.salts = [
                salt if length else int(rng.integers(2))
                for salt, length in zip(model.salts, model.lengths, strict=True)
            ]
            tokens.append(self.padded(rng, model.tokens))
            salts.append(np.asarray(model.salts, np.int32))
            model.insert(self.width)
        self.run("insert", tokens, salts)

    @rule(wanted=st.integers(0, 3))
    def clear(self, wanted: int) -> None:
        if wanted or not self.has_cache:  # rarer than other operations, or little is ever cached
            return
        for model in self.models:
            model.clear()
        self.run("clear", self.state[0])

    def padded(self, rng: np.random.Generator, rows: list[list[int]]) -> np.ndarray:
        array = rng.integers(0, 2, (len(rows), self.width), np.int32)
        for row, tokens in zip(array, rows, strict=True):
            row[self.width - len(tokens) :] = tokens
        return array

    @rule()
    def keep(self) -> None:
        contents = [each.copy() for each in self.contents]
        self.earlier = [*self.earlier[-2:], (self.state[0], copy.deepcopy(self.models), contents)]

    @rule(which=st.integers(0, 2))
    def go_back(self, which: int) -> None:
        if not self.earlier:
            return
        allocator, old, contents = self.earlier[which % len(self.earlier)]
        if not all(model.has_kept_blocks_of(each) for model, each in zip(self.models, old, strict=True)):
            return
        for each, then, now in zip(old, contents, self.contents, strict=True):
            for row in range(len(each.blocks)):  # the tokens of the old sequences are still there
                assert all(now[slot] == token == then[slot] for slot, token in self.kept_tokens(each, row))
        self.models = [model.rolled_back_to(each) for model, each in zip(self.models, old, strict=True)]
        if self.has_cache:
            self.run("clear", allocator)
        else:
            self.state = (allocator, self.state[1])

    @invariant()
    def agrees(self) -> None:
        type(self).num_steps += 1
        cached = self.run("are_cached")
        for i, (allocator, _) in enumerate(self.by_pool(self.state)):
            self.compare(allocator, self.models[i], self.contents[i], *cached[i])

    def compare(self, allocator: BlockAllocator, model: Model, contents: np.ndarray, cached: np.ndarray) -> None:
        assert allocator.broken_invariants() == ()
        assert allocator.lengths.tolist() == model.lengths
        assert free_ids(allocator) == model.free
        assert int(allocator.num_waiting) == model.num_waiting
        max_blocks = allocator.block_tables.shape[-1]
        for index, row in enumerate(allocator.block_tables.reshape(-1, max_blocks).tolist()):
            held, passed = model.held(index), model.passed[index]  # earlier ones may be anything
            assert row[passed:] == held + [0] * (max_blocks - passed - len(held))
        if allocator.num_passed is not None:
            assert allocator.num_passed.ravel().tolist() == model.passed
        assert set(np.flatnonzero(cached).tolist()) == set(model.cached)
        blocks = contents.reshape(-1, allocator.block_size)
        blocks[[block for block in model.free if block not in model.cached]] = POISON
        for row in range(len(model.blocks)):
            assert all(contents[slot] == token for slot, token in self.kept_tokens(model, row))
        for block, (_, *tokens) in model.cached.items():
            assert blocks[block].tolist() == tokens[-allocator.block_size :]


class GroupedMachine(AllocatorMachine):
    """Groups of layers with windows: short ones, ones that are no multiple of a block, and without other groups."""

    SHAPES = (((90, 2, 4, 30), (None, 5, 5, 16)), ((60, 1, 3, 30), (None, None, 1)), ((40, 4, 3, 20), (7,)))


class VmappedMachine(AllocatorMachine):
    """Four independent pools at once, each with its own arguments."""

    NUM_POOLS = 4
    SHAPES = (((40, 2, 6, 8), (None,)),)
    operations = VMAPPED


def in_all_modes(name):
    """Runs an operation on four pools under vmap, on each under jit, and on each eagerly: results are bit-identical."""

    def operation(state, *args, **static):
        together = VMAPPED[name](state, *args, **static)
        for i in range(VmappedMachine.NUM_POOLS):
            one, *of_one = jax.tree.map(lambda x, i=i: x[i], (state, *args))
            for apart in (EAGER[name](one, *of_one, **static), JITTED[name](one, *of_one, **static)):
                same = jax.tree.map(lambda x, y, i=i: np.array_equal(x[i], y), tuple(together), tuple(apart))
                assert jax.tree.all(same), (name, i)
        return together

    return operation


IN_ALL_MODES = {name: in_all_modes(name) for name in EAGER}


class EagerMachine(VmappedMachine):
    SHAPES = (((9, 4, 4, 3), (None,)),)
    operations = IN_ALL_MODES


def run_machine(machine: type[AllocatorMachine], max_examples: int, steps: int) -> int:
    """The number of steps."""
    machine.num_steps = 0
    # Without shrinking, which needs minutes; the steps of a failure are printed anyway.
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


def test_an_injected_mistake_is_found(monkeypatch):
    # The twin: one token too many.
    wrong = {**JITTED, "append": lambda state, counts, **static: JITTED["append"](state, counts + 1, **static)}
    monkeypatch.setattr(AllocatorMachine, "operations", wrong)
    with pytest.raises(AssertionError):
        run_machine(AllocatorMachine, 20, 20)
