"""Tokens a second of `jaxpaged.Engine` beside host-driven loops over the same steps.

    python -m benchmarks.engine.host_loops                # shapes of 135M and 1B parameters; about 2 minutes on an H100
    python -m benchmarks.engine.host_loops --models toy   # on a CPU, to try the script out

Random bfloat16 weights, greedy, no stop tokens, the requests of throughput.py. Each run checks that every request got
as many tokens as it asked for. Rows of the table:

- engine: `Engine.generate`;
- host loop: the same plan, model and commit, a step a call, the host choosing the kind of each step by what it reads
  of the step before (sync) or of the one before that (async).
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.engine.model import CONFIGS, packed_model
from benchmarks.engine.steps import Steps
from benchmarks.engine.workload import SIZES, Request, create_engine, run_work, workload
from benchmarks.harness import add_output, add_xla, compile_all, open_store
from jaxpaged import Engine
from jaxpaged._engine.defaults import chosen_compiler_options
from jaxpaged._engine.kinds import next_kind
from jaxpaged._engine.slices import Setup, one_step
from jaxpaged._engine.state import State

REPEATS = 3


def compile_host_step(name: str, engine: Engine, compiler_options: dict[str, Any], index: int) -> Any:
    """A step in a call of its own; whether there is work left, and the kind of the next step."""
    setup = Setup(packed_model(CONFIGS[name]), engine._runner.kinds, engine._options)

    def step(weights: Any, state: State) -> tuple[State, tuple[jax.Array, jax.Array]]:
        state = one_step(setup, weights, state, wants_logprobs=jnp.zeros((), bool), index=index)
        scheduler = state.scheduler.admit(state.allocator)
        kind = next_kind(scheduler, state.allocator, state.num_waited, engine._runner.kinds)
        return dataclasses.replace(state, scheduler=scheduler), (scheduler.has_work, kind)

    jitted = jax.jit(step, donate_argnums=1, compiler_options=compiler_options)
    return jitted.lower(engine._runner.weights, engine._runner.state).compile()


def host_loop(steps: Steps, programs: Sequence[Callable], work: Sequence[Request], lag: int) -> int:
    """The tokens generated. The host reads the flags of the step `lag` before the last one."""
    engine, waiting = steps.engine, deque(work)
    # The kind that is taken before the host has read which is wanted: a token of each seat.
    wide = next(i for i, kind in enumerate(engine._runner.kinds) if kind.width == kind.num_seats)
    num_sent = num_tokens = 0
    while waiting or num_sent:
        while True:  # what was sampled is drained, and others are submitted
            room = min(64, engine._options.max_requests - num_sent)
            arrivals = [waiting.popleft() for _ in range(min(room, len(waiting)))]
            report = steps.run(arrivals)
            num_tokens += int((report.outbox.tokens >= 0).sum())
            num_sent += len(arrivals) - int((report.outbox.finished > 0).sum())
            if not arrivals:
                break
        flags: deque[tuple[jax.Array, jax.Array]] = deque()
        has_work, kind = num_sent > 0, wide
        for _ in range(engine._options.steps_per_slice):
            if len(flags) > lag:
                has_work, kind = (flag.item() for flag in flags.popleft())
            if not has_work:
                break
            engine._runner.state_of_slice, flag = programs[kind](engine._runner.weights, engine._runner.state_of_slice)
            for array in flag:
                array.copy_to_host_async()
            flags.append(flag)
    return num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["135m", "1b"], choices=tuple(CONFIGS))
    parser.add_argument("--requests", type=int, default=512)
    add_xla(parser)
    add_output(parser)
    options = parser.parse_args()
    options.toy = "toy" in options.models
    store = open_store("engine_loops", options)
    compiler_options = chosen_compiler_options(options.xla)
    jobs: dict[Any, Callable] = {
        name: functools.partial(create_engine, name, compiler_options=compiler_options) for name in options.models
    }
    engines = compile_all(jobs)
    jobs = {
        (name, i): functools.partial(compile_host_step, name, engine, compiler_options, i)
        for name, engine in engines.items()
        for i in range(len(engine._runner.kinds))
    }
    host_steps = compile_all(jobs)
    for name, engine in engines.items():
        work = workload(options.requests, SIZES[name].longest)
        programs = [host_steps[name, i] for i in range(len(engine._runner.kinds))]
        host = functools.partial(host_loop, Steps(engine, SIZES[name]), programs, work)
        runs = {"engine": lambda engine=engine, work=work: run_work(engine, work)}
        runs |= {"host loop sync": functools.partial(host, 0), "host loop async": functools.partial(host, 1)}
        wanted = sum(new for _, new in work)
        for run, function in runs.items():
            rates = []
            for _ in range(REPEATS):
                begin = time.perf_counter()
                if (num_tokens := function()) != wanted:
                    raise AssertionError(f"{num_tokens} tokens instead of {wanted}")
                rates.append(wanted / (time.perf_counter() - begin))
            point = dict(tokens=wanted, tokens_per_s=statistics.median(rates), slowest=min(rates), fastest=max(rates))
            print(f"{name:>5} {run:<16} {point['tokens_per_s']:8.0f} tokens/s", flush=True)
            store.add(f"{name} {run}", point)


if __name__ == "__main__":
    main()
