"""Single steps of an engine: how long each kind takes, and its scheduling alone."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.engine.workload import Request, Sizes
from jaxpaged import BlockAllocator, Engine, SamplingParams, Scheduler
from jaxpaged._engine.kinds import Kind
from jaxpaged._engine.requests import Row


def name_of(kind: Kind) -> str:
    return f"{'mixed' if kind.is_mixed else 'single'}_{kind.num_places}"


class Steps:
    """Slices by hand, on the state of an engine that has no requests: for times of single steps, and the host loop."""

    def __init__(self, engine: Engine, sizes: Sizes):
        self.engine, self.sizes = engine, sizes.of(engine)

    def run(self, requests: Sequence[Request] = (), *, num_steps: int = 0, aborts: Sequence[int] = ()) -> Any:
        """A slice; what it reports, once it is over."""
        engine = self.engine
        rows = [
            Row(0, np.asarray(prompt, np.int32), SamplingParams(max_tokens=new, temperature=0), 0)
            for prompt, new in requests
        ]
        inbox = engine._inbox_of(rows, aborts, wants_logprobs=False, num_steps=num_steps)
        return jax.tree.map(np.asarray, engine._thread.submit(engine._run, engine._weights, inbox).result())

    def submit(self, requests: Sequence[Request]) -> None:
        for i in range(0, len(requests), 64):
            refusals = self.run(requests[i : i + 64]).refusals
            if refusals[: len(requests[i : i + 64])].any():
                raise AssertionError(f"refused: {refusals}")

    def clear(self) -> None:
        self.run(aborts=range(self.engine._max_requests))

    def milliseconds(self, kind: Kind, few: int, many: int) -> float:
        """A step of this kind, by the slope between a slice of few steps and one of many."""
        times, before = [], self.num_of(kind)
        for num_steps in (few, many):
            begin = time.perf_counter()
            self.run(num_steps=num_steps)
            times.append(time.perf_counter() - begin)
        if (found := self.num_of(kind) - before) != few + many:
            raise AssertionError(f"{found} steps of {name_of(kind)} instead of {few + many}")
        return (times[1] - times[0]) / (many - few) * 1e3

    def num_of(self, kind: Kind) -> int:
        return int(self.engine._state.num_of_kind[self.engine._kinds.index(kind)])

    def decode(self, count: int, length: int) -> None:
        """Sequences of so many tokens, and what they generated meanwhile, that have one token each to compute."""
        self.clear()
        self.submit([([1] * length, self.sizes.longest)] * count)
        self.run(num_steps=2)
        while self.engine._state.scheduler.num_pending(self.engine._state.allocator) > 0:
            self.run(num_steps=1)

    def measure(self) -> dict[str, float]:
        """Milliseconds of each kind of step, and the tokens of K/V that it reads; of the widest of single tokens also
        with long sequences, `many`. An exact engine has the last kind only."""
        sizes, kinds, result = self.sizes, self.engine._kinds, {}
        few, many = (2, 12) if sizes.longest > 64 else (2, 4)
        *narrow, widest = kinds
        for kind in narrow:
            if kind.is_mixed:  # a prompt for three steps, beside sequences for a quarter of the places
                count = max(1, kind.num_places // 4)
                self.decode(count, sizes.few)
                self.submit([([1] * min(3 * (kind.num_places - count), sizes.longest), 8)])
                result[f"{name_of(kind)}_ms"] = self.milliseconds(kind, 1, 2)
            else:
                self.decode(kind.num_places, sizes.few)
                result[f"{name_of(kind)}_ms"] = statistics.median(self.milliseconds(kind, few, many) for _ in range(3))
            result[f"{name_of(kind)}_kv"] = float(self.engine._state.allocator.lengths.sum())
        num_decoding = self.engine.stats().num_seats - max(1, self.engine.stats().num_seats // 32)
        decoding = next((kind for kind in kinds if kind.num_places >= num_decoding), widest)
        for name, length in (("few", sizes.few), ("many", sizes.many)):
            self.decode(num_decoding, length)
            result[f"{name}_ms"] = statistics.median(self.milliseconds(decoding, few, many) for _ in range(3))
            result[f"{name}_kv"] = float(self.engine._state.allocator.lengths.sum())
        # Prompts for the seats left, long enough to fill the chunk of each step.
        num_left = self.engine.stats().num_seats - num_decoding
        length = min(15 * self.engine.stats().chunk_tokens // num_left, sizes.longest)
        self.submit([([1] * length, 8)] * num_left)
        times = (2, 8) if sizes.longest > 64 else (1, 2)
        result[f"{name_of(widest)}_ms"] = self.milliseconds(widest, *times)
        result[f"{name_of(widest)}_kv"] = float(self.engine._state.allocator.lengths.sum())
        self.clear()
        return result


def scheduling_microseconds(engine: Engine, steps: Steps, chunk: int) -> float:
    """`plan` and `commit` of a step in which every seat decodes, in a loop without a model."""
    steps.submit([([1] * 4, steps.sizes.longest)] * steps.sizes.seats)
    steps.run(num_steps=8)

    @jax.jit
    def schedule(scheduler: Scheduler, allocator: BlockAllocator, num_steps: Any) -> Any:
        def body(_: Any, carry: Any) -> Any:
            scheduler, allocator, step = carry[0].plan(carry[1], chunk_tokens=chunk)
            used = (step.tokens[step.last] + step.slots[step.last]) & 1  # all of the step is needed
            scheduler, allocator = scheduler.commit(allocator, step, used)
            return dataclasses.replace(scheduler, num_steps=jnp.zeros_like(scheduler.num_steps)), allocator

        return jax.lax.fori_loop(0, num_steps, body, (scheduler, allocator))

    state = engine._state
    compiled = schedule.lower(state.scheduler, state.allocator, jnp.int32(1)).compile()

    def seconds(num_steps: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(compiled(state.scheduler, state.allocator, jnp.int32(num_steps)))
        return time.perf_counter() - begin

    seconds(1)
    few, many = (4, 40) if steps.sizes.longest > 64 else (2, 8)
    slopes = sorted((seconds(many) - seconds(few)) / (many - few) * 1e6 for _ in range(5))
    steps.clear()
    return slopes[2]
