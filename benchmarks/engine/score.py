"""How quickly `Engine.score` scores given tokens, beside the products that it takes.

    python -m benchmarks.engine.score               # 1,024 sequences of 512 tokens, Llama-3-8B's shape
    python -m benchmarks.engine.score --model toy   # on a CPU, to try the script out

Random bfloat16 weights, an engine with its own sizes. The first sequences are also scored alone, and their logprobs
compared. `floor_s` is the time of the products of all tokens, attention and head included, at the rate of a large
product. A GPU that multiplies for seconds lowers its clock, so `hot`, the rate right after the rounds, counts; `cold`
is the rate before the engine is made.
"""

import argparse
import time
from typing import Any

import jax
import numpy as np

from benchmarks.checks import require
from benchmarks.engine.costs import product_rate
from benchmarks.engine.model import CONFIGS, PLAIN, random_weights
from benchmarks.engine.workload import create_engine
from benchmarks.harness import add_output, add_xla, open_store
from benchmarks.models.llama_step import LlamaConfig
from jaxpaged import Engine

ROUNDS, CHECKED = 2, 4
HOT_SECONDS = 4
MOST_DIFFERENCE = 0.3  # of a logprob alone and among others, in nats


def num_products(config: LlamaConfig, weights: Any, count: int, length: int) -> float:
    """Floating point operations of `count` sequences, each token of which sees itself and those before it."""
    matrices = sum(leaf.size for leaf in jax.tree.leaves(weights["layers"]) if leaf.ndim == 2)
    head = config.vocab_size * config.features
    attended = 2 * config.num_layers * config.num_heads * config.head_dim * (length + 1) / 2
    return 2.0 * count * length * (matrices + head + attended)


def scored(engine: Engine, sequences: list[list[int]]) -> tuple[float, list[tuple[float, ...]]]:
    """Seconds, and the logprobs of all tokens but the first of each."""
    begin = time.perf_counter()
    scores = engine.score([[first] for first, *_ in sequences], [rest for _, *rest in sequences])
    return time.perf_counter() - begin, [tuple(score.logprobs) for score in scores]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=PLAIN)
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512, help="of each that are computed")
    parser.add_argument("--chunk", type=int, help="tokens of prompts in a step, instead of the engine's own")
    add_xla(parser)
    add_output(parser)
    options = parser.parse_args()
    options.toy = options.model == "toy"
    count, length = (16, 32) if options.toy else (options.sequences, options.tokens)
    config, weights = CONFIGS[options.model], random_weights(CONFIGS[options.model])
    store = open_store(f"score_{options.model}", options, sequences=count, tokens=length)
    cold, begin = product_rate(options.xla), time.perf_counter()
    chunk = {"chunk_tokens": options.chunk} if options.chunk else {}
    engine = create_engine(options.model, weights, compiler_options=options.xla, **chunk)
    stats = engine.stats()
    seconds = time.perf_counter() - begin
    print(f"compiled in {seconds:.0f} s, {stats.max_num_seqs} seats, chunks of {stats.chunk_tokens}")
    rng = np.random.default_rng(0)
    sequences = rng.integers(10, min(config.vocab_size, 1000), (count, length + 1)).tolist()
    alone = [scored(engine, [sequence])[1][0] for sequence in sequences[:CHECKED]]
    points = []
    for _ in range(ROUNDS):
        steps = engine.stats().num_steps
        seconds, found = scored(engine, sequences)
        worst = max(float(np.abs(np.subtract(a, b)).max()) for a, b in zip(alone, found, strict=False))
        require(worst < MOST_DIFFERENCE, f"a logprob differs by {worst:.2g} alone")
        points.append({"seconds": seconds, "steps": engine.stats().num_steps - steps, "largest_difference": worst})
    hot, products = product_rate(options.xla, HOT_SECONDS), num_products(config, weights, count, length)
    store.add("rates", {"cold_tflops": cold / 1e12, "hot_tflops": hot / 1e12})
    print(f"products at {cold / 1e12:.0f} TFLOP/s cold, {hot / 1e12:.0f} hot")
    for turn, point in enumerate(points, 1):
        seconds = point["seconds"]
        point |= {"tokens_per_s": count * length / seconds, "floor_s": products / hot}
        point |= {"of_floor": products / hot / seconds, "of_cold_floor": products / cold / seconds}
        print(f"round {turn}: " + ", ".join(f"{name} {value:.5g}" for name, value in point.items()), flush=True)
        store.add(f"round {turn}", point)


if __name__ == "__main__":
    main()
