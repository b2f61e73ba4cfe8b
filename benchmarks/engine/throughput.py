"""Tokens a second of `jaxpaged.Engine` over a chat log's lengths, beside its own steps and its floor.

    python -m benchmarks.engine.throughput               # Llama-3-8B's shape, 256 seats; about 4 minutes on an H100
    python -m benchmarks.engine.throughput --model 135m
    python -m benchmarks.engine.throughput --model toy   # on a CPU, to try the script out

Random bfloat16 weights, greedy, no stop tokens. Before anything is timed, the logits of two layers are compared with
those of the "xla" implementation, in a step of single tokens and in one with chunks, and each run checks that every
request got as many tokens as it asked for. With --exact logprobs are compared alone and among others, bit by bit. Rows
of the table:

- engine: `Engine.generate`;
- batches: the same engine, given as many requests as it has seats, one batch after the other.

`of steps` is the time that the same steps take by themselves, over the time of the run; `of floor` the time of the
bytes (weights, keys and values) and products at the measured rates, over the same.
"""

import argparse
import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checks import poisoned, worst_error
from benchmarks.engine.model import CONFIGS, packed_model, random_weights
from benchmarks.harness import add_output, open_store, random, read_bandwidth, slope_microseconds
from benchmarks.models.decode_step import MOST_ERROR, cache_copies
from benchmarks.models.llama_step import LlamaConfig
from jaxpaged import BlockAllocator, Engine, KVCache, SamplingParams, Scheduler
from jaxpaged._engine.requests import Row
from jaxpaged._engine.slices import Kind, apply_model, step_attention

BLOCK_SIZE = 16
CHECKED_LAYERS = 2
CHECKED_REQUESTS, CHECKED_TOKENS = 8, 16  # of an exact engine
Request = tuple[list[int], int]  # a prompt, and how many new tokens are wanted


@dataclasses.dataclass(frozen=True)
class Sizes:
    seats: int
    chunk: int
    longest: int  # prompt, and as many new tokens
    num_blocks: int
    few: int  # tokens of a short sequence in the measurement of single steps
    many: int


KINDS = ("narrow", "few", "mixed")  # as the engine has them; an exact one has the last alone
SIZES = {name: Sizes(256, 512, 1024, 16_384, 16, 512) for name in CONFIGS} | {"toy": Sizes(8, 16, 64, 128, 4, 32)}


def workload(count: int, longest: int) -> list[Request]:
    """Lengths as in a chat log: log-normal, cut to `longest`."""
    rng = np.random.default_rng(0)
    prompts = rng.lognormal(4.6, 1.0, count).clip(4, longest).astype(int)
    new = rng.lognormal(5.3, 0.8, count).clip(8, longest).astype(int)
    return [(rng.integers(10, 1000, length).tolist(), int(wanted)) for length, wanted in zip(prompts, new, strict=True)]


def create_caches(config: LlamaConfig, num_blocks: int) -> tuple[KVCache, ...]:
    create = functools.partial(
        KVCache.create,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=jnp.bfloat16,
    )
    return tuple(create() for _ in range(config.num_layers))


def check(config: LlamaConfig) -> float:
    """The worst error of a logit by the default implementation against "xla", over the largest logit of its row."""
    config = dataclasses.replace(config, num_layers=CHECKED_LAYERS)
    weights = random_weights(config)
    scheduler = Scheduler.create(max_requests=8, num_seats=8, max_length=64)
    allocator = BlockAllocator.create(num_blocks=64, block_size=BLOCK_SIZE, num_seqs=8, max_blocks_per_seq=4)
    prompts = jax.random.randint(jax.random.key(0), (8, 32), 0, config.vocab_size)
    lengths = jnp.asarray([1, 2, 7, 16, 17, 31, 32, 20], jnp.int32)
    scheduler, _, _ = scheduler.submit(allocator, prompts, lengths, jnp.full(8, 8, jnp.int32))
    caches, worst = create_caches(config, 64), 0.0
    for chunk in (64, 64, 0):
        scheduler, allocator, step = scheduler.plan(allocator, chunk_tokens=chunk)
        attend = step_attention(allocator, step, Kind(8 + chunk, 8))

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


class Steps:
    """Slices by hand, on the state of an engine that has no requests: for times of single steps, and the host loop."""

    def __init__(self, engine: Engine, sizes: Sizes):
        self.engine, self.sizes = engine, sizes

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

    def milliseconds(self, few: int, many: int) -> float:
        """A step, by the slope between slices of few and of many steps; of as many mixed steps in both."""
        times = []
        for num_steps in (few, many):
            begin = time.perf_counter()
            report = self.run(num_steps=num_steps)
            times.append(time.perf_counter() - begin)
            if report.outbox.num_steps != num_steps:
                raise AssertionError(f"{report.outbox.num_steps} steps instead of {num_steps}")
        return (times[1] - times[0]) / (many - few) * 1e3

    def measure(self) -> dict[str, float]:
        """Milliseconds of each kind of step; of single tokens in all seats with short and with long sequences."""
        sizes, result = self.sizes, {}
        num_decoding = sizes.seats - max(1, sizes.seats // 32)
        few, many = (2, 12) if sizes.longest > 64 else (2, 4)
        cases = dict(
            narrow=(sizes.seats // 4, sizes.few),
            few=(num_decoding, sizes.few),
            many=(num_decoding, sizes.many),
        )
        for name, (count, length) in cases.items():
            self.clear()
            self.submit([([1] * length, sizes.longest)] * count)
            self.run(num_steps=2)
            while self.engine._state.scheduler.num_pending(self.engine._state.allocator) > 0:
                self.run(num_steps=1)
            result[f"{name}_ms"] = statistics.median(self.milliseconds(few, many) for _ in range(3))
            result[f"{name}_kv"] = float(self.engine._state.allocator.lengths.sum())
        # Prompts for the seats left, of so many tokens that the chunk of each step is full.
        num_left = sizes.seats - num_decoding
        self.submit([([1] * min(15 * sizes.chunk // num_left, sizes.longest), 8)] * num_left)
        self.run(num_steps=1)
        result["mixed_ms"] = self.milliseconds(2, 8) if sizes.longest > 64 else self.milliseconds(1, 2)
        self.clear()
        return result


def check_exact(engine: Engine, work: Sequence[Request]) -> int:
    """Raises where the logprobs of a request alone are not those that it has among others; how many were compared."""
    params = SamplingParams(max_tokens=CHECKED_TOKENS, temperature=0, logprobs=True)
    prompts = [prompt for prompt, _ in work]
    together = engine.generate(prompts, params)
    some = range(0, len(prompts), -(-len(prompts) // CHECKED_REQUESTS))
    alone = [engine.generate([prompts[i]], params)[0].outputs for i in some]
    differing = [i for i, outputs in zip(some, alone, strict=True) if outputs != together[i].outputs]
    if differing:
        raise AssertionError(f"{len(differing)} of {len(alone)} requests have other logprobs alone than among others")
    return len(alone) * CHECKED_TOKENS


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


def product_rate(compiler_options: dict[str, Any]) -> float:
    """Floating point operations a second of a large product in bfloat16."""
    width = 8192 if jax.default_backend() == "gpu" else 512
    x, w = (random(i, shape=(width, width), dtype="bfloat16") for i in range(2))
    chain = jax.jit(lambda x: x @ w @ w @ w @ w, compiler_options=compiler_options)
    return 2 * width**3 / slope_microseconds(lambda _: chain(x), 4, 0.5) * 1e6


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a run's steps cost by themselves, and by their bytes and products, in seconds."""

    times: dict[str, float]
    kinds: tuple[Kind, ...]
    weight_bytes: int
    kv_bytes: int  # a token
    layer_params: int
    head_params: int
    bandwidth: float
    products: float

    def of_steps(self, num_of_kind: Sequence[int], work: Sequence[Request]) -> float:
        times = self.times
        a_token = (times["many_ms"] - times["few_ms"]) / (times["many_kv"] - times["few_kv"])
        kv = times | {"mixed_kv": times["many_kv"]}
        each = [times[f"{name}_ms"] - a_token * kv[f"{name}_kv"] for name in KINDS[-len(self.kinds) :]]
        steps = sum(number * ms for number, ms in zip(num_of_kind, each, strict=True))
        return (steps + kv_tokens(work) * a_token) / 1e3

    def floor(self, num_of_kind: Sequence[int], work: Sequence[Request]) -> float:
        seconds = kv_tokens(work) * self.kv_bytes / self.bandwidth
        for number, kind in zip(num_of_kind, self.kinds, strict=True):
            logits = min(kind.num_places, kind.num_seats)
            products = 2 * (self.layer_params * kind.num_places + self.head_params * logits) / self.products
            seconds += number * max(self.weight_bytes / self.bandwidth, products)
        return seconds


def kv_tokens(work: Sequence[Request]) -> int:
    """Tokens whose keys and values are read by all the steps of single tokens: the last token is never computed."""
    return sum((new - 1) * len(prompt) + new * (new - 1) // 2 for prompt, new in work)


@contextlib.contextmanager
def seconds_in_slices(engine: Engine) -> Iterator[list[float]]:
    """Of each slice, in the call that runs it. On a GPU a call with a loop in it returns when the loop ends."""
    seconds: list[float] = []
    run_slice = engine._run_slice

    def timed(*args: Any) -> Any:
        begin = time.perf_counter()
        result = run_slice(*args)
        seconds.append(time.perf_counter() - begin)
        return result

    engine._run_slice = timed  # type: ignore[assignment]
    yield seconds
    engine._run_slice = run_slice


def timed_run(engine: Engine, function: Callable[[], int], work: Sequence[Request], costs: Costs) -> dict[str, Any]:
    wanted = sum(new for _, new in work)
    before, kinds_before = engine.stats(), np.asarray(engine._state.num_of_kind)
    with seconds_in_slices(engine) as in_slices:
        begin = time.perf_counter()
        num_tokens = function()
        seconds = time.perf_counter() - begin
    if num_tokens != wanted:
        raise AssertionError(f"{num_tokens} tokens instead of {wanted}")
    after = engine.stats()
    num_steps = after.num_steps - before.num_steps
    num_of_kind = (np.asarray(engine._state.num_of_kind) - kinds_before).tolist()
    result: dict[str, Any] = dict(requests=len(work), tokens=num_tokens, seconds=seconds, tokens_per_s=wanted / seconds)
    result["steps"] = num_of_kind
    if num_steps:
        result |= dict(
            of_steps=costs.of_steps(num_of_kind, work) / seconds,
            of_floor=costs.floor(num_of_kind, work) / seconds,
            preempted=after.num_preempted - before.num_preempted,
            between_slices=1 - sum(in_slices) / seconds,
        )
    return result


def generate(engine: Engine, work: Sequence[Request], batch: int | None = None) -> int:
    count = 0
    for i in range(0, len(work), batch or len(work)):
        part = work[i : i + (batch or len(work))]
        params = [SamplingParams(max_tokens=new, temperature=0) for _, new in part]
        outputs = engine.generate([prompt for prompt, _ in part], params)
        count += sum(len(output.outputs[0].token_ids) for output in outputs)
    return count


def line(name: str, point: dict[str, Any]) -> str:
    kinds = ", ".join(f"{n} {kind}" for n, kind in zip(point["steps"], KINDS[-len(point["steps"]) :], strict=True))
    text = f"{name:<20} {point['tokens_per_s']:8.0f} tokens/s, {point['seconds']:6.2f} s, steps {kinds}"
    if "of_steps" in point:
        text += (
            f", {point['of_steps']:.0%} of steps, {point['of_floor']:.0%} of floor, {point['preempted']} preempted, "
            f"{point['between_slices']:.1%} between slices"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=tuple(CONFIGS))
    parser.add_argument("--requests", nargs="+", type=int, default=[1024, 512])
    parser.add_argument("--chunk", type=int, help="tokens of prompts in a step")
    parser.add_argument("--steps-per-slice", type=int, default=32)
    parser.add_argument("--xla", nargs="*", default=[], metavar="NAME=VALUE", help="options to compile with")
    parser.add_argument("--exact", action="store_true", help="an exact engine")
    parser.add_argument("--only-engine", action="store_true", help="no batches")
    add_output(parser)
    options = parser.parse_args()
    options.toy = options.model == "toy"
    config, sizes = CONFIGS[options.model], SIZES[options.model]
    sizes = dataclasses.replace(sizes, chunk=options.chunk or sizes.chunk)
    store = open_store(f"engine_{options.model}{'_exact' if options.exact else ''}", options)

    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - started:5.0f} s] {text}", flush=True)

    compiler_options = dict(option.split("=") for option in options.xla)
    bandwidth, products = read_bandwidth(), product_rate(compiler_options)
    rates = f"{bandwidth / 1e9:.0f} GB/s, {products / 1e12:.0f} TFLOP/s"
    say(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {rates}")
    say(f"error of a logit {check(config):.1e}")
    weights, apply = random_weights(config), packed_model(config)
    begin = time.perf_counter()
    engine = Engine(
        apply,
        weights,
        create_caches(config, sizes.num_blocks),
        num_seats=sizes.seats,
        max_length=2 * sizes.longest,
        chunk_tokens=sizes.chunk,
        steps_per_slice=options.steps_per_slice,
        exact=options.exact,
        compiler_options=compiler_options,
    )
    compile_seconds = time.perf_counter() - begin
    copies = cache_copies(engine._run_slice.as_text() or "", engine._state.caches[0])
    memory = engine._run_slice.memory_analysis()
    temporary_bytes = memory.temp_size_in_bytes if memory else None
    say(f"compiled in {compile_seconds:.0f} s, {copies} copies of a cache, {temporary_bytes} bytes temporary")

    steps = Steps(engine, sizes)
    times = steps.measure()
    scheduling = {chunk: scheduling_microseconds(engine, steps, chunk) for chunk in (0, sizes.chunk)}
    say(", ".join(f"{name} {value:.3f}" for name, value in times.items()))
    layer_params = sum(leaf.size for leaf in jax.tree.leaves(weights["layers"]))
    head_params = config.vocab_size * config.features
    costs = Costs(
        times=times,
        kinds=engine._kinds,
        weight_bytes=2 * (layer_params + head_params),
        kv_bytes=2 * config.num_layers * config.num_kv_heads * config.head_dim * 2,
        layer_params=layer_params,
        head_params=head_params,
        bandwidth=bandwidth,
        products=products,
    )

    work = workload(max(options.requests), sizes.longest)
    if options.exact:
        say(f"{check_exact(engine, work)} tokens have the same logprobs alone and among others, to the last bit")
    runs: dict[str, tuple[Callable[[], int], list[Request]]] = {
        f"engine {count}": (functools.partial(generate, engine, work[:count]), work[:count])
        for count in options.requests
    }
    if not options.only_engine:
        part = work[: min(options.requests)]
        runs[f"batches {len(part)}"] = functools.partial(generate, engine, part, sizes.seats), part
    points = {}
    for name, (function, requests) in runs.items():
        points[name] = timed_run(engine, function, requests, costs)
        say(line(name, points[name]))
        store.add(name, points[name])
    summary = dict(
        times,
        scheduling_us=scheduling[0],
        scheduling_mixed_us=scheduling[sizes.chunk],
        compile_s=compile_seconds,
        cache_copies=copies,
        temporary_bytes=temporary_bytes,
        read_bytes_per_s=bandwidth,
        flops_per_s=products,
    )
    store.add("steps", summary)

    print(f"\n{options.model}, {sizes.seats} seats, chunks of {sizes.chunk}, {jax.devices()[0].device_kind}")
    print(
        f"ms a step: narrow {times['narrow_ms']:.2f}, wide {times['few_ms']:.2f} to "
        f"{times['many_ms']:.2f}, mixed {times['mixed_ms']:.2f}; "
        f"plan and commit {scheduling[0]:.0f} us, mixed {scheduling[sizes.chunk]:.0f} us"
    )
    for name, point in points.items():
        print(line(name, point))


if __name__ == "__main__":
    main()
