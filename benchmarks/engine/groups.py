"""How many requests groups of layers serve at once, how many tokens a second, and what they cost the allocator.

    python -m benchmarks.engine.groups
    python -m benchmarks.engine.groups --toy  # on a CPU

- engine: Gemma 3 4B's shape with random weights, requests that grow to 8,192 tokens, in a pool of 16 GB: with a table
  for each group of layers, and with one for all. Each engine has a seat for each request for which the pool has room at
  that length, and serves as many requests as there are seats with groups. With `--layers` the pool is smaller in
  proportion. The first tokens' logprobs must be the same, but for rounding.
- allocator: microseconds of an `append` of a token to each of 256 sequences, with one group and with four.
"""

import argparse
import dataclasses
import functools
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checks import require
from benchmarks.engine.model import packed_model, random_weights
from benchmarks.engine.workload import BLOCK_SIZE
from benchmarks.harness import add_output, open_store
from benchmarks.models.llama_step import LlamaConfig, llama_3_8b, toy
from jaxpaged import (
    BlockAllocator,
    Engine,
    EngineOptions,
    KVCache,
    LayerGroups,
    SamplingParams,
    layer_groups,
    rotary_frequencies,
)

PARTS = "allocator", "engine"
CHUNK = 256  # a window keeps that much more
NUM_STEPS = 256
FOUR_GROUPS = None, 1024, 1024, 1024
MOST_APART = 0.1  # logprobs of first tokens, in bfloat16


def gemma_3_4b(num_layers: int) -> LlamaConfig:
    return dataclasses.replace(
        llama_3_8b(num_layers),
        vocab_size=262_144,
        features=2560,
        hidden_features=10_240,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        rotary_frequencies=rotary_frequencies(256, 1_000_000.0),
        windows=tuple(None if (i + 1) % 6 == 0 else 1024 for i in range(num_layers)),
        tie_embeddings=True,
    )


@dataclasses.dataclass(frozen=True)
class Sizes:
    length: int  # tokens of a request at its end
    new: int
    pool: int  # bytes, for all layers
    seqs: int  # in the allocator


SIZES, TOY = Sizes(8192, 512, 16 * 10**9, 256), Sizes(512, 16, 4_000_000, 8)


def create(config: LlamaConfig, groups: LayerGroups, weights: object, sizes: Sizes, pool: int, chunk: int) -> Engine:
    create_cache = functools.partial(KVCache.create, block_size=BLOCK_SIZE, **config.cache_sizes, dtype=jnp.bfloat16)
    shapes = jax.eval_shape(functools.partial(create_cache, num_blocks=1))
    block = groups.num_caches * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    num_blocks = pool // block
    return Engine(
        packed_model(config, groups),
        weights,
        tuple(create_cache(num_blocks=num_blocks) for _ in range(groups.num_caches)),
        options=EngineOptions(
            max_num_seqs=(num_blocks - 1) // groups.num_blocks(sizes.length, block_size=BLOCK_SIZE, chunk_tokens=chunk),
            max_model_len=sizes.length,
            chunk_tokens=chunk,
            widths=(),
            windows=groups.windows,
        ),
    )


def serve(engine: Engine, prompts: list[list[int]], new: int) -> dict[str, float]:
    begin, before = time.perf_counter(), engine.stats()
    engine.generate(prompts, SamplingParams(max_tokens=new, temperature=0))
    seconds, after = time.perf_counter() - begin, engine.stats()
    return {
        "seats": after.max_num_seqs,
        "preempted": after.num_preempted - before.num_preempted,
        "seconds": seconds,
        "new_tokens_per_s": len(prompts) * new / seconds,
        "tokens_per_s": sum(len(prompt) + new for prompt in prompts) / seconds,
    }


def first_logprobs(engine: Engine, prompts: list[list[int]]) -> np.ndarray:
    outputs = engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0, logprobs=True))
    return np.array([output.outputs[0].logprobs for output in outputs])


def step_microseconds(windows: tuple[int | None, ...], num_seqs: int) -> float:
    """Of an `append` of a token to each sequence, in a loop whose length is known."""
    length, columns = 2048, (2048 + 3 * NUM_STEPS) // BLOCK_SIZE
    sizes = dict(num_blocks=1 + num_seqs * columns * len(windows), block_size=BLOCK_SIZE)
    allocator = BlockAllocator.create(**sizes, num_seqs=num_seqs, max_blocks_per_seq=columns, windows=windows)
    full = jnp.full(num_seqs, CHUNK, jnp.int32)
    allocator = jax.lax.fori_loop(0, length // CHUNK, lambda i, a: a.append(full, q_len=CHUNK)[0], allocator)
    one = jnp.ones(num_seqs, jnp.int32)

    @functools.partial(jax.jit, static_argnums=1)
    def run(allocator: BlockAllocator, num_steps: int) -> tuple[BlockAllocator, jax.Array]:
        def step(_: jax.Array, carry: tuple[BlockAllocator, jax.Array]) -> tuple[BlockAllocator, jax.Array]:
            allocator, slots, _ = carry[0].append(one, q_len=1)
            return allocator, carry[1] + slots.sum(dtype=jnp.int32)

        return jax.lax.fori_loop(0, num_steps, step, (allocator, jnp.zeros((), jnp.int32)), unroll=8)

    seconds = []
    for num_steps in (NUM_STEPS, 2 * NUM_STEPS):
        after, _ = jax.block_until_ready(run(allocator, num_steps))
        require(bool((after.lengths == length + num_steps).all()), "a token was refused")
        require(not after.broken_invariants(), f"{after.broken_invariants()}")
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            jax.block_until_ready(run(allocator, num_steps))
            times.append(time.perf_counter() - begin)
        seconds.append(min(times))
    return 1e6 * (seconds[1] - seconds[0]) / NUM_STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=34)
    parser.add_argument("--new", type=int, help="tokens that each request generates, of its length")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--toy", action="store_true", help="a small model and few requests, for a CPU")
    add_output(parser)
    options = parser.parse_args()
    sizes, config = (TOY, toy(6)) if options.toy else (SIZES, gemma_3_4b(options.layers))
    if options.new is not None:
        sizes = dataclasses.replace(sizes, new=options.new)
    chunk = 64 if options.toy else CHUNK
    pool = sizes.pool if options.toy else sizes.pool * options.layers // 34
    if options.toy:
        config = dataclasses.replace(config, windows=(64, 64, 64, 64, 64, None))
    settings = dict(toy=options.toy, layers=config.num_layers, pool=pool, chunk=chunk, new=sizes.new)
    store = open_store("groups_engine", options, **settings)
    begin = time.perf_counter()

    def say(name: str, point: dict[str, float]) -> None:
        text = ", ".join(f"{key} {value:.4g}" for key, value in point.items())
        print(f"[{time.perf_counter() - begin:5.1f} s] {name}: {text}", flush=True)
        store.add(name, point)

    if "allocator" in options.parts:
        each = {len(windows): step_microseconds(windows, sizes.seqs) for windows in ((None,), FOUR_GROUPS)}
        say("allocator", {f"groups_{count}_us": us for count, us in each.items()})
    if "engine" in options.parts:
        weights = random_weights(config)
        ways = {"groups": layer_groups(config.windows or ()), "one table": layer_groups((None,) * config.num_layers)}
        with ThreadPoolExecutor() as threads:
            made = threads.map(lambda groups: create(config, groups, weights, sizes, pool, chunk), ways.values())
            engines = dict(zip(ways, made, strict=True))
        rng = np.random.default_rng(0)
        count = engines["groups"].stats().max_num_seqs
        prompts = [rng.integers(10, 1000, sizes.length - sizes.new).tolist() for _ in range(count)]
        logprobs = [first_logprobs(engine, prompts[:2]) for engine in engines.values()]
        apart = float(abs(logprobs[0] - logprobs[1]).max())
        require(apart < MOST_APART, f"the logprobs of first tokens are {apart} apart")
        points = {name: serve(engine, prompts, sizes.new) for name, engine in engines.items()}
        for name, point in points.items():
            say(name, point)
        in_groups, one_table = points.values()
        names = {"seats": "sequences", "tokens_per_s": "tokens"}
        gains = {name: in_groups[key] / one_table[key] for key, name in names.items()}
        say("gain", gains | {"logprobs_apart": apart})


if __name__ == "__main__":
    main()
