"""What the prefix cache of `jaxpaged.Engine` costs if prompts have nothing in common, and saves if they have.

    python -m benchmarks.engine.prefixes                 # Llama-3-8B's shape; about eight minutes on an H100
    python -m benchmarks.engine.prefixes --model toy     # on a CPU, to try the script out

Random bfloat16 weights, greedy, no stop tokens. Each row is served by three engines: without the cache (off), with it,
where each request reads its prefix for itself (each), and as the engine comes, which reads it once if that pays (on):

- apart: prompts of a chat log's lengths with random tokens, as in `benchmarks.engine.throughput`;
- completions: an eighth of the prompts, 8 completions of each;
- long completions: as many, of prompts twice as long as the longest of `apart`;
- system prompt: the prompts of `apart`, behind 512 tokens that are the same in all.

`change` is the time of a `change_seats` in which all seats are taken and none changes, in a loop of nothing else.
"""

import argparse
import functools
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.engine.model import CONFIGS, packed_model, random_weights
from benchmarks.engine.workload import SIZES, Request, Sizes, create_caches, workload
from benchmarks.harness import add_output, open_store
from benchmarks.models.decode_step import cache_copies
from jaxpaged import BlockAllocator, Engine, EngineOptions, SamplingParams, Scheduler
from jaxpaged._engine import program

ENGINES = "off", "each", "on"
REQUESTS = 512
COMPLETIONS, SYSTEM_PROMPT = 8, 512


def rows(count: int, sizes: Sizes) -> dict[str, tuple[list[Request], int]]:
    """Requests of each row, and completions of each request."""
    apart = workload(count, sizes.longest)
    system = [7] * min(SYSTEM_PROMPT, sizes.longest // 2)
    behind = [([*system, *prompt][: sizes.longest], new) for prompt, new in apart]
    few = apart[: max(1, count // COMPLETIONS)]
    prompts = np.random.default_rng(0).integers(10, 1000, (len(few), 2 * sizes.longest)).tolist()
    long = [(prompt, new) for prompt, (_, new) in zip(prompts, few, strict=True)]
    return {
        "apart": (apart, 1),
        "completions": (few, COMPLETIONS),
        "long completions": (long, COMPLETIONS),
        "system prompt": (behind, 1),
    }


def serve(engine: Engine, requests: Sequence[Request], num_completions: int) -> dict[str, Any]:
    params = [SamplingParams(max_tokens=new, temperature=0, n=num_completions) for _, new in requests]
    before, begin = engine.stats(), time.perf_counter()
    outputs = engine.generate([prompt for prompt, _ in requests], params)
    seconds, after = time.perf_counter() - begin, engine.stats()
    num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    if num_tokens != (wanted := num_completions * sum(new for _, new in requests)):
        raise AssertionError(f"{num_tokens} tokens instead of {wanted}")
    names = "num_computed", "num_found", "num_spared", "num_recomputed", "num_preempted", "num_steps", "num_mixed_steps"
    counts = {name: getattr(after, name) - getattr(before, name) for name in names}
    return dict(requests=len(requests), seconds=seconds, tokens_per_s=num_tokens / seconds) | counts


def change_microseconds(engine: Engine, sizes: Sizes) -> float:
    for request in workload(sizes.seats, sizes.longest):
        engine.add_request(request[0], SamplingParams(max_tokens=sizes.longest, temperature=0))
    for _ in range(2):
        engine.step()
    state = engine._runner.state

    @jax.jit
    def change(scheduler: Scheduler, allocator: BlockAllocator, count: Any) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, carry: carry[0].change_seats(carry[1]), (scheduler, allocator))

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(change(state.scheduler, state.allocator, jnp.int32(count)))
        return time.perf_counter() - begin

    seconds(1)
    few, many = (4, 40) if sizes.longest > 64 else (2, 8)
    slopes = sorted((seconds(many) - seconds(few)) / (many - few) * 1e6 for _ in range(5))
    for request_id in list(engine._books.requests):
        engine.abort(request_id)
    while engine.has_unfinished_requests:
        engine.step()
    return slopes[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=tuple(CONFIGS))
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES)
    add_output(parser)
    options = parser.parse_args()
    options.toy = options.model == "toy"
    config, sizes = CONFIGS[options.model], SIZES[options.model]
    store = open_store(f"engine_prefixes_{options.model}", options)
    weights = random_weights(config)
    options_of = functools.partial(
        EngineOptions,
        max_num_seqs=sizes.seats or None,
        max_model_len=3 * sizes.longest,
        chunk_tokens=sizes.chunk or None,
    )
    for name in options.engines:
        begin = time.perf_counter()
        caches, prefix_cache = create_caches(config, sizes.num_blocks), name != "off"
        least_spared = program.chosen_least_spared if name == "on" else lambda _: None
        with mock.patch.object(program, "chosen_least_spared", least_spared):
            engine = Engine(packed_model(config), weights, caches, options=options_of(prefix_cache=prefix_cache))
        del caches
        point: dict[str, Any] = dict(compile_s=time.perf_counter() - begin)
        point["cache_copies"] = cache_copies(engine._runner.program.run.as_text() or "", engine._runner.state.caches[0])
        if prefix_cache:
            point["change_us"] = change_microseconds(engine, sizes.of(engine))
        store.add(name, point)
        print(f"{name}: {point}", flush=True)
        for row, (requests, num_completions) in rows(options.requests, sizes).items():
            engine.update_weights(weights)  # nothing is found of the row before
            point = serve(engine, requests, num_completions)
            store.add(f"{row}, {name}", point)
            text = f"{row + ', ' + name:20} {point['tokens_per_s']:8.0f} tokens/s, {point['seconds']:6.2f} s, "
            text += (
                f"{point['num_computed']} computed, {point['num_found']} found, {point['num_spared']} spared, "
                f"{point['num_preempted']} preempted, "
            )
            print(text + f"{point['num_mixed_steps']} of {point['num_steps']} steps with a chunk", flush=True)
        del engine  # and its caches, before there are others


if __name__ == "__main__":
    main()
