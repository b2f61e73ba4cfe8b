"""Tokens a second of `jaxpaged.Engine` over the lengths of a chat log, against the floor of its bytes and products.

    python -m benchmarks.engine.throughput               # Llama-3-8B's shape; about 4 minutes on an H100
    python -m benchmarks.engine.throughput --model v2lite        # DeepSeek-V2-Lite's latents, an MLP for its experts
    python -m benchmarks.engine.throughput --model toy   # on a CPU, to try the script out

Random bfloat16 weights, greedy, no stop tokens. First the logprobs of tokens that two layers have generated are
compared with "xla". Each run checks that every request got the number of tokens it asked for. Rows of the table:

- engine: `Engine.generate`;
- sampled: `Engine.generate` with the parameters of --sampled, such as `temperature=1 top_p=0.95 top_k=50`.

`of floor` is the time of the run's bytes (weights, keys and values) and products at the measured rates, over the time
of the run.
"""

import argparse
import ast
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.checks import poisoned, require
from benchmarks.engine.model import CONFIGS, packed_head, packed_model, random_weights
from benchmarks.engine.workload import (
    SIZES,
    Request,
    create_caches,
    create_engine,
    run_work,
    workload,
)
from benchmarks.harness import add_output, add_xla, open_store, random, read_bandwidth, slope_microseconds
from jaxpaged import Engine, EngineOptions, SamplingParams
from lib.llama_config import LlamaConfig

CHECKED_LAYERS, CHECKED_TOKENS = 2, 8
MOST_NATS = 0.3  # logits of two implementations differ by up to 2% of the largest, which is about 6


def worst_nats(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """The largest difference of a logprob. Raises `AssertionError` if it is no rounding."""
    pairs = (zip(*both, strict=True) for both in zip(ours, theirs, strict=True))
    worst = max(abs(our - their) for each in pairs for our, their in each)
    require(worst <= MOST_NATS, f"logprobs differ by {worst:.3f} nats, at most {MOST_NATS} is right")
    return worst


def check(config: LlamaConfig) -> float:
    """In nats: logprobs of generated tokens, by the default implementation, against the scores by "xla"."""
    config = dataclasses.replace(config, num_layers=CHECKED_LAYERS)
    weights = random_weights(config)

    def create(**options: Any) -> Engine:
        return Engine(
            packed_model(config, **options),
            weights,
            create_caches(config, 64),
            head=packed_head(config),
            options=EngineOptions(max_num_seqs=8, max_model_len=64, chunk_tokens=64),
        )

    prompts = [prompt for prompt, _ in workload(8, 32)]
    params = SamplingParams(max_tokens=CHECKED_TOKENS, temperature=0, logprobs=True)
    found = [output.outputs[0] for output in poisoned(create().generate, prompts, params)]
    scores = create(implementation="xla").score(prompts, [each.token_ids for each in found])
    return worst_nats([each.logprobs or [] for each in found], [score.logprobs for score in scores])


def product_rate(compiler_options: dict[str, Any] | None, seconds: float = 0.5) -> float:
    """Floating point operations a second of a large product in bfloat16."""
    width = 8192 if jax.default_backend() == "gpu" else 512
    x, w = (random(i, shape=(width, width), dtype="bfloat16") for i in range(2))
    chain = jax.jit(lambda x: x @ w @ w @ w @ w, compiler_options=compiler_options)
    return 2 * width**3 / slope_microseconds(lambda _: chain(x), 4, seconds) * 1e6


@dataclasses.dataclass(frozen=True)
class Floor:
    """Seconds that the bytes or the products of steps need, whichever is longer."""

    layer_params: int
    head_params: int
    kv_bytes: int  # per token
    num_seats: int
    bandwidth: float
    products: float

    @classmethod
    def of(cls, config: LlamaConfig, weights: Any, num_seats: int, **rates: float) -> "Floor":
        layer_params = sum(leaf.size for leaf in jax.tree.leaves(weights["layers"]))
        heads, width = config.num_kv_heads, 2 * config.head_dim
        if config.latent is not None:
            heads, width = 1, config.latent.kv_lora_rank + config.latent.qk_rope_head_dim
        kv_bytes = 2 * config.num_layers * heads * width
        return cls(layer_params, config.vocab_size * config.features, kv_bytes, num_seats, **rates)

    def seconds(self, steps: dict[str, int], work: Sequence[Request]) -> float:
        # Steps of single tokens read these keys and values; the last token is never computed.
        kv_tokens = sum((new - 1) * len(prompt) + new * (new - 1) // 2 for prompt, new in work)
        total = kv_tokens * self.kv_bytes / self.bandwidth
        for name, number in steps.items():
            kind, rows = name.split("_")
            logits = self.num_seats if kind == "mixed" else int(rows)
            products = 2 * (self.layer_params * int(rows) + self.head_params * logits) / self.products
            total += number * max(2 * (self.layer_params + self.head_params) / self.bandwidth, products)
        return total


def timed_run(engine: Engine, work: Sequence[Request], floor: Floor, **sampling: Any) -> dict[str, Any]:
    wanted = sum(new for _, new in work)
    before = engine.stats()
    begin = time.perf_counter()
    num_tokens = run_work(engine, work, **sampling)
    seconds = time.perf_counter() - begin
    require(num_tokens == wanted, f"{num_tokens} tokens instead of {wanted}")
    after = engine.stats()
    steps = {name: count - before.steps_by_kind[name] for name, count in after.steps_by_kind.items()}
    return dict(
        requests=len(work),
        tokens=num_tokens,
        seconds=seconds,
        tokens_per_s=wanted / seconds,
        steps=steps,
        of_floor=floor.seconds(steps, work) / seconds,
        preempted=after.num_preempted - before.num_preempted,
        slices=after.num_slices - before.num_slices,
    )


def line(name: str, point: dict[str, Any]) -> str:
    kinds = ", ".join(f"{count} {name}" for name, count in point["steps"].items())
    return (
        f"{name:<20} {point['tokens_per_s']:8.0f} tokens/s, {point['seconds']:6.2f} s, steps {kinds}, "
        f"{point['of_floor']:.0%} of floor, {point['preempted']} preempted, {point['slices']} slices"
    )


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=tuple(CONFIGS))
    parser.add_argument("--requests", nargs="+", type=int, default=[1024, 512])
    parser.add_argument("--seats", type=int, help="instead of the engine's own, as the next three")
    parser.add_argument("--chunk", type=int, help="tokens of prompts in a step")
    parser.add_argument("--widths", nargs="*", type=int, help="rows of narrower steps")
    parser.add_argument("--steps-per-slice", type=int)
    add_xla(parser)
    parser.add_argument("--sampled", nargs="*", default=[], metavar="NAME=NUMBER", help="a run that is not greedy")
    parser.add_argument("--exact", action="store_true", help="an exact engine")
    add_output(parser)
    options = parser.parse_args(arguments)
    options.toy = options.model.startswith("toy")
    options.sampled = {name: ast.literal_eval(value) for name, value in (text.split("=") for text in options.sampled)}
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    config, longest = CONFIGS[options.model], SIZES[options.model].longest
    store = open_store(f"engine_{options.model}{'_exact' if options.exact else ''}", options)
    rates = dict(bandwidth=read_bandwidth(), products=product_rate(options.xla))
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {rates}, error {check(config):.1e} nats", flush=True)
    weights, begin = random_weights(config), time.perf_counter()
    engine = create_engine(
        options.model,
        weights,
        max_num_seqs=options.seats,
        chunk_tokens=options.chunk,
        widths=options.widths,
        steps_per_slice=options.steps_per_slice,
        batch_invariant=options.exact,
        compiler_options=options.xla,
    )
    compile_s, stats = time.perf_counter() - begin, engine.stats()
    program = dict(compile_s=compile_s, seats=stats.max_num_seqs, chunk=stats.chunk_tokens, widths=stats.widths)
    print(program, flush=True)
    floor = Floor.of(config, weights, stats.max_num_seqs, **rates)
    work = workload(max(options.requests), longest)
    engine.generate([prompt for prompt, _ in work[:8]], SamplingParams(max_tokens=2))  # warm
    runs: dict[str, dict[str, Any]] = {"engine": {}} | ({"sampled": options.sampled} if options.sampled else {})
    for name, sampling in runs.items():
        for count in options.requests:
            point = timed_run(engine, work[:count], floor, **sampling)
            store.add(f"{name} {count}", point)
            print(line(f"{name} {count}", point), flush=True)
    store.add("steps", program | {"read_bytes_per_s": rates["bandwidth"], "flops_per_s": rates["products"]})


if __name__ == "__main__":
    main()
