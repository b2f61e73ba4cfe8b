"""Single steps of an engine: how long each kind takes, and its scheduling alone."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.engine.workload import Request, Sizes
from jaxpaged import BlockAllocator, Engine, SamplingParams, Scheduler
from jaxpaged._engine.books import Sent
from jaxpaged._engine.kinds import Kind
from jaxpaged._engine.packing import pack
from jaxpaged._engine.requests import Row


def name_kind(kind: Kind) -> str:
    name = f"{'mixed' if kind.is_mixed else 'single'}_{kind.width}"
    return name if kind.least_spared is None else f"sharing_{name}"


class Steps:
    """Slices by hand, on the state of an engine that has no requests: for times of single steps, and the host loop."""

    def __init__(self, engine: Engine, sizes: Sizes):
        self.engine, self.sizes, self.rng = engine, sizes.of(engine), np.random.default_rng(0)

    def run(self, requests: Sequence[Request] = (), *, num_steps: int = 0, aborts: Sequence[int] = ()) -> Any:
        """Slices with so many steps together; the last one's report, once it is over."""
        engine, runner = self.engine, self.engine._runner
        adapters = range(engine._options.num_adapters) or [None]  # the requests take turns
        rows = [
            Row(0, np.asarray(prompt, np.int32), SamplingParams(max_tokens=new, temperature=0, adapter=adapter), 0)
            for (prompt, new), adapter in zip(requests, itertools.cycle(adapters), strict=False)
        ]
        sent = Sent(rows, list(aborts), engine._books.forgets, version=0)
        words: list[Any] = []
        while num_steps or not words:
            now = min(num_steps, engine._options.steps_per_slice)
            inbox = runner.program.inbox_of(
                sent.rows, sent.aborts, wants_logprobs=False, num_steps=now, forgets=sent.forgets
            )
            words.append(runner.thread.submit(runner.run, runner.weights, pack(inbox), sent))
            num_steps, sent = num_steps - now, Sent([], [], engine._books.forgets, version=0)
        return runner.read([future.result() for future in words][-1])

    def submit_random(self, count: int, length: int, new: int) -> None:
        """Requests with random tokens: equal ones take less power, so that the GPU's clock is higher."""
        self.submit([(self.rng.integers(10, 1000, length).tolist(), new) for _ in range(count)])

    def submit(self, requests: Sequence[Request]) -> None:
        for i in range(0, len(requests), 64):
            refusals = self.run(requests[i : i + 64]).refusals
            if refusals[: len(requests[i : i + 64])].any():
                raise AssertionError(f"refused: {refusals}")

    def clear(self) -> None:
        self.run(aborts=range(self.engine._options.max_requests))

    def milliseconds(self, kind: Kind, few: int, many: int) -> float:
        """A step of this kind, by the slope between few steps and many: with what slices behind the first take."""
        return self.step_and_slice(kind, few, many)[0]

    def step_and_slice(self, kind: Kind, few: int, many: int) -> tuple[float, float]:
        """Milliseconds of a step of this kind, and of the first slice beside its steps, the host's part included."""
        times, before = [], self.count_steps(kind)
        for num_steps in (few, many):
            begin = time.perf_counter()
            self.run(num_steps=num_steps)
            times.append(time.perf_counter() - begin)
        if (found := self.count_steps(kind) - before) != few + many:
            raise AssertionError(f"{found} steps of {name_kind(kind)} instead of {few + many}")
        of_step = (times[1] - times[0]) / (many - few)
        return of_step * 1e3, (times[0] - few * of_step) * 1e3

    def count_steps(self, kind: Kind) -> int:
        return int(self.engine._runner.state.num_of_kind[self.engine._runner.kinds.index(kind)])

    def count_kv(self) -> float:
        """Tokens in the cache."""
        return float(self.engine._runner.state.allocator.lengths.sum())

    def decode(self, count: int, length: int) -> None:
        """Starts `count` sequences of `length` tokens, until each has one token to compute."""
        self.clear()
        self.submit_random(count, length, self.sizes.longest)
        self.run(num_steps=2)
        while self.engine._runner.state.scheduler.num_pending(self.engine._runner.state.allocator) > 0:
            self.run(num_steps=1)

    @property
    def num_decoding(self) -> int:
        """Sequences beside which the widest step is measured: the others bring its prompts."""
        return self.sizes.seats - max(1, self.sizes.seats // 32)

    def prepare(self, kind: Kind, length: int) -> None:
        """The next steps are of this kind, three or more, with sequences of `length` tokens that decode."""
        sizes = self.sizes
        if not kind.is_mixed:
            self.decode(kind.width, length)
        elif kind == self.engine._runner.kinds[-1]:  # prompts for the seats left, that fill the chunk of each step
            self.decode(self.num_decoding, length)
            num_left = sizes.seats - self.num_decoding
            self.submit_random(num_left, min(15 * sizes.chunk // num_left, sizes.longest), 8)
        else:  # a prompt for three steps, beside sequences for a quarter of the rows
            count = max(1, kind.width // 4)
            self.decode(count, length)
            self.submit_random(1, min(3 * (kind.width - count), sizes.longest), 8)

    def measure(self) -> dict[str, float]:
        """Milliseconds of each kind of step, and the tokens of K/V that it reads; with almost all seats decoding, `few`
        and `many` K/V tokens too, for the time of a token. `slice_ms` is what a slice takes beside its steps, with no
        other behind it. An exact engine has the last kind only."""
        sizes, result = self.sizes, {}
        times = (2, 12) if sizes.longest > 64 else (2, 4)
        *narrow, widest = self.engine._runner.kinds
        decoding = next((kind for kind in narrow if kind.width >= self.num_decoding), widest)

        def add(name: str, kind: Kind, repeats: int, times: tuple[int, int]) -> None:
            found = [self.step_and_slice(kind, *times) for _ in range(repeats)]
            result[f"{name}_ms"], of_slice = map(statistics.median, zip(*found, strict=True))
            result.setdefault("slice_ms", of_slice)
            result[f"{name}_kv"] = self.count_kv()

        for kind in narrow:
            self.prepare(kind, sizes.few)
            add(name_kind(kind), kind, 1 if kind.is_mixed else 3, (1, 2) if kind.is_mixed else times)
        for name, length in (("few", sizes.few), ("many", sizes.many)):
            self.decode(self.num_decoding, length)
            add(name, decoding, 3, times)
        self.prepare(widest, sizes.many)
        add(name_kind(widest), widest, 1, (2, 8) if sizes.longest > 64 else (1, 2))
        self.clear()
        return result


def scheduling_microseconds(engine: Engine, steps: Steps, chunk: int) -> float:
    """`plan` and `commit` of a step in which every seat decodes, in a loop without a model."""
    steps.submit([([1] * 4, steps.sizes.longest)] * steps.sizes.seats)
    steps.run(num_steps=8)

    @jax.jit
    def schedule(scheduler: Scheduler, allocator: BlockAllocator, num_steps: Any) -> Any:
        def body(_: Any, carry: Any) -> Any:
            scheduler, allocator, step = carry[0].admit(carry[1]).plan(carry[1], chunk_tokens=chunk)
            used = (step.tokens[step.last] + step.slots[step.last]) & 1  # all of the step is needed
            scheduler, allocator = scheduler.commit(allocator, step, used)
            return dataclasses.replace(scheduler, num_steps=jnp.zeros_like(scheduler.num_steps)), allocator

        return jax.lax.fori_loop(0, num_steps, body, (scheduler, allocator))

    state = engine._runner.state
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
