"""Tokens a second of `jaxpaged.Engine` over the lengths of a chat log, against its own steps and its floor.

    python -m benchmarks.engine.throughput               # Llama-3-8B's shape; about 4 minutes on an H100
    python -m benchmarks.engine.throughput --model 135m
    python -m benchmarks.engine.throughput --model v2lite        # DeepSeek-V2-Lite's latents, an MLP for its experts
    python -m benchmarks.engine.throughput --model toy   # on a CPU, to try the script out

Random bfloat16 weights, greedy, no stop tokens. First the logits of two layers are compared with those of
"xla", in a step of single tokens and in one with chunks. Each run checks that every request got the number of
tokens it asked for. With --exact, logprobs of a request alone and among others are compared bit by bit. Rows of the
table:

- engine: `Engine.generate`;
- batches: the same engine, given one full batch of requests after the other;
- sampled: `Engine.generate` with the parameters of --sampled, such as `temperature=1 top_p=0.95 top_k=50`.

`of steps` is the time of the run's steps, measured one kind at a time, over the time of the run. `of floor` is the time
of its bytes (weights, keys and values) and products at the measured rates, over the time of the run.
"""

import argparse
import ast
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checks import poisoned, worst_error
from benchmarks.engine.costs import Costs, product_rate
from benchmarks.engine.model import CONFIGS, packed_model, random_weights
from benchmarks.engine.steps import Steps, name_kind, scheduling_microseconds
from benchmarks.engine.workload import (
    BLOCK_SIZE,
    SIZES,
    Request,
    Sizes,
    create_caches,
    create_engine,
    run_work,
    workload,
)
from benchmarks.harness import add_output, add_xla, open_store, read_bandwidth
from benchmarks.models.decode_step import MOST_ERROR, cache_copies
from benchmarks.models.llama_step import LlamaConfig
from jaxpaged import BlockAllocator, Engine, Requests, SamplingParams, Scheduler
from jaxpaged._engine.kinds import Kind
from jaxpaged._engine.slices import apply_model, step_attention

CHECKED_LAYERS = 2
CHECKED_REQUESTS, CHECKED_TOKENS = 8, 16  # of an exact engine


def check(config: LlamaConfig) -> float:
    """The worst error of a logit by the default implementation against "xla", over the largest logit of its row."""
    config = dataclasses.replace(config, num_layers=CHECKED_LAYERS)
    weights = random_weights(config)
    scheduler = Scheduler.create(max_requests=8, num_seats=8, max_length=64)
    allocator = BlockAllocator.create(num_blocks=64, block_size=BLOCK_SIZE, num_seqs=8, max_blocks_per_seq=4)
    prompts = jax.random.randint(jax.random.key(0), (8, 32), 0, config.vocab_size)
    lengths = jnp.asarray([1, 2, 7, 16, 17, 31, 32, 20], jnp.int32)
    scheduler, _, _ = scheduler.submit(allocator, Requests(prompts, lengths, jnp.int32(8)))
    caches, worst = create_caches(config, 64), 0.0
    for chunk in (64, 64, 0):
        scheduler, allocator, step = scheduler.admit(allocator).plan(allocator, chunk_tokens=chunk)
        attend = step_attention(allocator, step, Kind(8 + chunk, 8, is_mixed=chunk > 0), caches)

        def run(weights: Any, caches: Any, implementation: Any, step: Any = step, attend: Any = attend) -> Any:
            return apply_model(packed_model(config, implementation=implementation), weights, caches, step, attend)

        jitted = jax.jit(run, static_argnums=2)
        _, expected = jitted(weights, caches, "xla")
        caches, logits = poisoned(jitted, weights, caches, None)
        sampled = np.asarray(step.is_sampled)
        error = worst_error("the logits", logits[sampled], expected[sampled], most=MOST_ERROR)
        worst = max(worst, error)
        scheduler, allocator = scheduler.commit(allocator, step, logits.argmax(axis=-1).astype(jnp.int32))
    return worst


def check_exact(engine: Engine, work: Sequence[Request]) -> int:
    """Raises if a request's logprobs alone differ from those among others. Returns how many were compared."""
    params = SamplingParams(max_tokens=CHECKED_TOKENS, temperature=0, logprobs=True)
    prompts = [prompt for prompt, _ in work]
    together = engine.generate(prompts, params)
    some = range(0, len(prompts), -(-len(prompts) // CHECKED_REQUESTS))
    alone = [engine.generate([prompts[i]], params)[0].outputs for i in some]
    differing = [i for i, outputs in zip(some, alone, strict=True) if outputs != together[i].outputs]
    if differing:
        raise AssertionError(f"{len(differing)} of {len(alone)} requests have other logprobs alone than among others")
    return len(alone) * CHECKED_TOKENS


def timed_run(engine: Engine, function: Callable[[], int], work: Sequence[Request], costs: Costs) -> dict[str, Any]:
    wanted = sum(new for _, new in work)
    before, kinds_before = engine.stats(), np.asarray(engine._runner.state.num_of_kind)
    begin = time.perf_counter()
    num_tokens = function()
    seconds = time.perf_counter() - begin
    if num_tokens != wanted:
        raise AssertionError(f"{num_tokens} tokens instead of {wanted}")
    after = engine.stats()
    num_steps = after.num_steps - before.num_steps
    num_of_kind = (np.asarray(engine._runner.state.num_of_kind) - kinds_before).tolist()
    names = map(name_kind, engine._runner.kinds)
    result: dict[str, Any] = dict(requests=len(work), tokens=num_tokens, seconds=seconds, tokens_per_s=wanted / seconds)
    result["steps"] = dict(zip(names, num_of_kind, strict=True))
    if num_steps:
        result |= dict(
            of_steps=costs.of_steps(num_of_kind, work) / seconds,
            of_floor=costs.floor(num_of_kind, work) / seconds,
            preempted=after.num_preempted - before.num_preempted,
            slices=after.num_slices - before.num_slices,
        )
    return result


def line(name: str, point: dict[str, Any]) -> str:
    kinds = ", ".join(f"{count} {name}" for name, count in point["steps"].items())
    text = f"{name:<20} {point['tokens_per_s']:8.0f} tokens/s, {point['seconds']:6.2f} s, steps {kinds}"
    if "of_steps" in point:
        text += (
            f", {point['of_steps']:.0%} of steps, {point['of_floor']:.0%} of floor, {point['preempted']} preempted, "
            f"{point['slices']} slices"
        )
    return text


def of_program(engine: Engine) -> dict[str, Any]:
    """What the compiled slice copies, and how much memory it takes besides the caches."""
    memory = engine._runner.program.run.memory_analysis()
    return {
        "cache_copies": cache_copies(engine._runner.program.run.as_text() or "", engine._runner.state.caches[0]),
        "temporary_bytes": memory.temp_size_in_bytes if memory else None,
    }


def make_runs(
    engine: Engine, work: list[Request], sizes: Sizes, options: argparse.Namespace
) -> dict[str, tuple[Callable[[], int], list[Request]]]:
    """By the row of the table: what is run, and its requests."""
    runs: dict[str, tuple[Callable[[], int], list[Request]]] = {
        f"engine {count}": (functools.partial(run_work, engine, work[:count]), work[:count])
        for count in options.requests
    }
    if not options.only_engine:
        part = work[: min(options.requests)]
        runs[f"batches {len(part)}"] = functools.partial(run_work, engine, part, sizes.seats), part
    if options.sampled:
        for count in options.requests:
            run = functools.partial(run_work, engine, work[:count], **options.sampled)
            runs[f"sampled {count}"] = run, work[:count]
    return runs


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=tuple(CONFIGS))
    parser.add_argument("--requests", nargs="+", type=int, default=[1024, 512])
    parser.add_argument("--seats", type=int, help="instead of the engine's own, as the next two")
    parser.add_argument("--chunk", type=int, help="tokens of prompts in a step")
    parser.add_argument("--widths", nargs="*", type=int, help="rows of narrower steps")
    parser.add_argument("--steps-per-slice", type=int)
    add_xla(parser)
    parser.add_argument("--sampled", nargs="*", default=[], metavar="NAME=NUMBER", help="a run that is not greedy")
    parser.add_argument("--exact", action="store_true", help="an exact engine")
    parser.add_argument("--only-engine", action="store_true", help="no batches")
    add_output(parser)
    options = parser.parse_args()
    options.toy = options.model.startswith("toy")
    options.sampled = {name: ast.literal_eval(value) for name, value in (text.split("=") for text in options.sampled)}
    return options


def main() -> None:
    options = parse_options()
    config, sizes = CONFIGS[options.model], SIZES[options.model]
    sizes = dataclasses.replace(sizes, seats=options.seats or sizes.seats, chunk=options.chunk or sizes.chunk)
    store = open_store(f"engine_{options.model}{'_exact' if options.exact else ''}", options)
    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - started:5.0f} s] {text}", flush=True)

    bandwidth, products = read_bandwidth(), product_rate(options.xla)
    rates = f"{bandwidth / 1e9:.0f} GB/s, {products / 1e12:.0f} TFLOP/s"
    say(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {rates}")
    say(f"error of a logit {check(config):.1e}")
    weights, begin = random_weights(config), time.perf_counter()
    engine = create_engine(
        options.model,
        weights,
        max_num_seqs=sizes.seats or None,
        chunk_tokens=sizes.chunk or None,
        widths=options.widths,
        steps_per_slice=options.steps_per_slice,
        batch_invariant=options.exact,
        compiler_options=options.xla,
    )
    sizes = sizes.of(engine)
    program = {"compile_s": time.perf_counter() - begin} | of_program(engine)
    program |= {"seats": sizes.seats, "chunk": sizes.chunk, "widths": engine.stats().widths}
    say(", ".join(f"{name} {value}" for name, value in program.items()))

    steps = Steps(engine, sizes)
    times = steps.measure()
    scheduling = {chunk: scheduling_microseconds(engine, steps, chunk) for chunk in (0, sizes.chunk)}
    say(", ".join(f"{name} {value:.3f}" for name, value in times.items()))
    costs = Costs.of(config, weights, engine, times, bandwidth=bandwidth, products=products)
    work = workload(max(options.requests), sizes.longest)
    if options.exact:
        say(f"{check_exact(engine, work)} tokens have the same logprobs alone and among others, to the last bit")
    points = {}
    for name, (function, requests) in make_runs(engine, work, sizes, options).items():
        points[name] = timed_run(engine, function, requests, costs)
        say(line(name, points[name]))
        store.add(name, points[name])
    scheduled = {"scheduling_us": scheduling[0], "scheduling_mixed_us": scheduling[sizes.chunk]}
    store.add("steps", times | scheduled | program | {"read_bytes_per_s": bandwidth, "flops_per_s": products})

    print(f"\n{options.model}, {sizes.seats} seats, chunks of {sizes.chunk}, {jax.devices()[0].device_kind}")
    each = ", ".join(f"{name[:-3]} {value:.2f}" for name, value in times.items() if name.endswith("_ms"))
    print(f"ms a step: {each}; plan and commit {scheduling[0]:.0f} us, mixed {scheduling[sizes.chunk]:.0f} us")
    for name, point in points.items():
        print(line(name, point))


if __name__ == "__main__":
    main()
