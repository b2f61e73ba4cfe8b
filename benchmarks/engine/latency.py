"""How long steps take for other requests while a long prompt is computed, and while short ones are.

    python -m benchmarks.engine.latency                 # Llama-3-8B's shape, 8 of its layers; two minutes on an H100
    python -m benchmarks.engine.latency --model toy     # on a CPU, to try the script out

All seats but one of 32 decode, and each step has a full chunk of prompts: of short ones, or of one prompt of eight
times `longest` tokens. Steps are timed one by one, in slices of one step, and include the host's part. Each time is the
median of 20 repeats; p99 is taken over the steps. Milliseconds.
"""

import argparse
import dataclasses
import time

import numpy as np

from benchmarks.engine.model import CONFIGS, packed_model, random_weights
from benchmarks.engine.steps import Steps
from benchmarks.engine.workload import SIZES, create_caches
from benchmarks.harness import add_output, add_xla, open_store
from jaxpaged import Engine, EngineOptions

LAYERS, REPEATS = 8, 20


def step_milliseconds(steps: Steps, length: int, count: int) -> list[float]:
    """Of each step with a full chunk while `count` prompts of `length` tokens are computed."""
    engine, sizes = steps.engine, steps.sizes
    num_decoding = sizes.seats - max(1, sizes.seats // 32)
    steps.clear()
    steps.submit_random(num_decoding, sizes.many, sizes.longest)
    steps.run(num_steps=2)
    while engine._runner.state.scheduler.num_pending(engine._runner.state.allocator) > 0:
        steps.run(num_steps=1)
    steps.submit_random(count, length, 8)
    milliseconds = []
    for _ in range((length - 1) * count // (sizes.chunk + sizes.seats - num_decoding)):
        before = np.asarray(engine._runner.state.num_of_kind)
        begin = time.perf_counter()
        steps.run(num_steps=1)
        milliseconds.append((time.perf_counter() - begin) * 1e3)
        if (np.asarray(engine._runner.state.num_of_kind) - before)[-1] != 1:
            raise AssertionError("a step without a chunk")
    steps.clear()
    return milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=tuple(CONFIGS))
    add_xla(parser)
    add_output(parser)
    options = parser.parse_args()
    options.toy = options.model == "toy"
    config, sizes = CONFIGS[options.model], SIZES[options.model]
    config = dataclasses.replace(config, num_layers=min(LAYERS, config.num_layers))
    store = open_store(f"engine_latency_{options.model}", options)
    longest = 8 * sizes.longest
    engine = Engine(
        packed_model(config),
        random_weights(config),
        create_caches(config, sizes.num_blocks),
        options=EngineOptions(
            max_num_seqs=sizes.seats or None,
            max_model_len=longest + sizes.longest,
            chunk_tokens=sizes.chunk or None,
            compiler_options=options.xla,
        ),
    )
    steps = Steps(engine, sizes)
    sizes = steps.sizes
    num_short = max(1, sizes.seats // 32)
    cases = {"short prompts": (longest // num_short, num_short), "a long prompt": (longest, 1)}
    for name, case in cases.items():
        step_milliseconds(steps, *case)  # warm
        runs = np.array([step_milliseconds(steps, *case) for _ in range(REPEATS)])
        times = np.median(runs, axis=0)  # of each step
        point = dict(prompts=case[1], tokens=case[0], steps=len(times), repeats=REPEATS)
        point |= dict(median_ms=np.median(times).item(), p99_ms=np.quantile(times, 0.99).item())
        point |= dict(p99_of_all_runs_ms=np.quantile(runs, 0.99).item())
        print(f"{name:>14}  {point}", flush=True)
        store.add(name, point)


if __name__ == "__main__":
    main()
