"""The part `engine` of several_gpus.py: an engine with a model's heads over several GPUs, and the engine of one GPU.

The model has Llama-3-8B's shape or that of --model, and random bfloat16 weights (sharded_model.py). Requests, seats,
chunks and the pool are the same as in throughput.py; requests are greedy and start in the order given. Engines:

- one: on one GPU; not for 70B, which no GPU holds;
- several: over all GPUs; with jax 0.12 it needs NCCL 2.29 or newer.

The logprobs of some prompts must be equal up to rounding, and each request must get all its tokens. An engine's time
until it is ready begins with the model on the first GPU, or 70B on all, and ends with its first tokens. Points:

- ready: the seconds of each start: sharding the model, creating and compiling the engine, and its first tokens;
- a number of requests: microseconds for all;
- prompts, tokens: the kernels of the first GPU, in microseconds per step and launches per step, in steps with chunks of
  prompts, and in steps with single tokens only. An all-reduce waits for the slowest GPU, and its time includes that.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from benchmarks.engine.model import CONFIGS
from benchmarks.engine.profile_slice import SHOWN, run_slices, split
from benchmarks.engine.sharded_model import is_large, random_model, random_shards
from benchmarks.engine.throughput import worst_nats
from benchmarks.engine.workload import BLOCK_SIZE, SIZES, Request, time_work, workload
from benchmarks.harness import Event, Store, by_kernel, traced
from jaxpaged import Engine, EngineOptions, SamplingParams
from lib.engine_llama import create_engine
from lib.llama import Llama
from lib.tensor_parallel import repeated_kv_heads, shard_model

SEATS = CHUNK = 512  # as the engine of throughput.py chooses them
NUM_REQUESTS = 2048  # in h200/engine_8b.json; fewer are the first of these
NUM_SCORED = 16  # prompts whose logprobs are compared
# All layers, with partial sums rounded to bfloat16: 0.17 over two GPUs, 0.33 over four. Unrelated logits, with a
# standard deviation of 1.3 each, would differ by about 6 somewhere.
MOST_NATS = 1.0
PROFILED_STEPS = 8
# Steps before a profile. 512 requests in 512 seats have chunks of prompts in their first 155 steps or more.
PROFILES = {"prompts": 16, "tokens": 240}


def start(load: Callable[[], Llama], mesh: Mesh | None, model_name: str) -> tuple[Engine, dict[str, float]]:
    """The engine, after its first tokens, and the seconds of its start and of the parts. `mesh`: None on one GPU."""
    config, sizes, times = CONFIGS[model_name], SIZES[model_name], [time.perf_counter()]
    model = load()
    times.append(time.perf_counter())
    engine = create_engine(
        model,
        config if mesh is None else repeated_kv_heads(config, mesh.size),
        options=EngineOptions(
            max_num_seqs=sizes.seats or SEATS,
            max_model_len=2 * sizes.longest,
            chunk_tokens=sizes.chunk or CHUNK,
        ),
        block_size=BLOCK_SIZE,
        dtype="bfloat16",
        num_blocks=sizes.num_blocks,
        mesh=mesh,
    )
    times.append(time.perf_counter())
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    times.append(time.perf_counter())
    parts = [end - begin for begin, end in itertools.pairwise(times)]
    return engine, dict(zip(("shard", "engine", "first_tokens"), parts, strict=True), ready=sum(parts))


def profile(engine: Engine, work: Sequence[Request], first_step: int) -> dict[str, Any]:
    """The kinds of `PROFILED_STEPS` steps or a few more, the GPU's milliseconds, and the longest kernels."""
    steps_per_slice, events = engine.stats().steps_per_slice, list[Event]()
    num_warm, num_slices = (math.ceil(steps / steps_per_slice) for steps in (first_step, PROFILED_STEPS))
    _, kinds = run_slices(engine, work, num_warm, num_slices, traced(events))
    kinds = {kind: count for kind, count in kinds.items() if count}
    times = by_kernel([(name, end - begin) for begin, end, name in events], max(sum(kinds.values()), 1))
    return dict(steps=kinds, **split(events), kernels=dict(itertools.islice(times.items(), SHOWN)))


def sharded_engine(store: Store, counts: Sequence[int], mesh: Mesh, model_name: str) -> None:
    """Adds the points of the engines to the store. Numbers and profiles that have a point are not timed again."""
    config, expected, longest = CONFIGS[model_name], None, SIZES[model_name].longest
    if is_large(config):
        shards = random_shards(config, mesh)
        sides: dict[str, tuple[Callable[[], Llama], Mesh | None]] = {"several": (lambda: shards, mesh)}
    else:
        model = random_model(config)
        sides = {"one": (lambda: model, None), "several": (lambda: shard_model(model, config, mesh), mesh)}
    requests = workload(max(NUM_REQUESTS, *counts), longest)
    prompts = [prompt for prompt, _ in requests[:NUM_SCORED]]

    def add(point: str, key: str, value: Any) -> None:
        store.add(point, store.points.get(point, {}) | {key: value})
        print(f"{point}, {key}: {value}", flush=True)

    for name, (load, where) in sides.items():
        made, seconds = start(load, where, model_name)
        add("engine ready", name, [*store.points.get("engine ready", {}).get(name, []), seconds])
        scores = made.score([prompt[:1] for prompt in prompts], [prompt[1:] for prompt in prompts])
        found = [score.logprobs for score in scores]
        expected = expected or found
        error = worst_nats(found, expected, most=MOST_NATS)
        for count in counts:
            if name not in store.points.get(point := f"engine {count}", {}):
                add(point, "tokens", sum(new for _, new in requests[:count]))
                add(point, f"{name}_error", error)
                add(point, name, time_work(made, requests[:count]))
        for part, first_step in PROFILES.items():
            if name not in store.points.get(point := f"engine {part}", {}):
                add(point, name, profile(made, requests[: made.stats().max_num_seqs], first_step))
        made.sleep()  # frees the caches, before the next engine has its own
