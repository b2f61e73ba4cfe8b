"""A whole decode step of a model of Llama-3-8B's shape in one jit, over the floor of its bytes.

    python -m benchmarks.models.decode_step
    python -m benchmarks.models.decode_step --models fused --shapes 64x2048 --profile --timeline
    python -m benchmarks.models.decode_step --shapes 64x2048 --xla xla_gpu_enable_triton_gemm=False

Random bfloat16 weights; 32 unrolled layers, one cache a layer; allocation, cache writes, attention and the greedy token
inside one `lax.while_loop` whose state is donated. The floor is the bytes that a step must read (every weight but the
embedding, K and V) over the read bandwidth measured in the same run. Before anything is timed, the logits of the first
two layers are compared with the "xla" implementation's, and the compiled loop is searched for copies of a cache.
`--xla` compiles with options of XLA's own, and the results' names say so.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import re
import statistics
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.checks import poisoned, worst_error
from benchmarks.harness import (
    Event,
    add_output,
    add_xla,
    by_kernel,
    kernel_times,
    open_store,
    random,
    read_bandwidth,
    traced,
)
from benchmarks.models import llama_step
from benchmarks.models.llama_step import MODELS, Apply, LlamaConfig
from jaxpaged import BlockAllocator, KVCache, paged_attention

BLOCK_SIZE = 16
FEW_STEPS, MANY_STEPS, REPEATS = 4, 24, 3
CHECKED_LAYERS = 2
MOST_ERROR = 5e-2  # of a logit, over the largest of its row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    tokens: jax.Array  # int32 [seqs]
    caches: tuple[KVCache, ...]
    allocator: BlockAllocator


def step(apply: Apply, weights: Any, state: State) -> tuple[State, jax.Array]:
    """Also returns the logits."""
    allocator, slots, _ = state.allocator.append(jnp.ones(state.tokens.shape, jnp.int32))
    caches, logits = apply(weights, state.tokens, state.caches, allocator, slots[:, 0])
    return State(logits.argmax(axis=-1).astype(jnp.int32), caches, allocator), logits


def loop(apply: Apply, weights: Any, state: State, num_steps: jax.Array, *, step: Any = step) -> State:
    def body(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        i, state = carry
        return i + 1, step(apply, weights, state)[0]

    return lax.while_loop(lambda carry: carry[0] < num_steps, body, (jnp.int32(0), state))[1]


def start(config: LlamaConfig, num_seqs: int, length: int) -> State:
    """Sequences that have grown together, a block at a time, as in a decode loop: their blocks alternate."""
    max_blocks = math.ceil((length + 2 * FEW_STEPS + REPEATS * (FEW_STEPS + MANY_STEPS) + 64) / BLOCK_SIZE)
    num_blocks = num_seqs * max_blocks + 1

    @jax.jit
    def grow() -> BlockAllocator:
        allocator = BlockAllocator.create(
            num_blocks=num_blocks, block_size=BLOCK_SIZE, num_seqs=num_seqs, max_blocks_per_seq=max_blocks
        )
        block = jnp.full(num_seqs, BLOCK_SIZE, jnp.int32)
        allocator = lax.fori_loop(
            0, length // BLOCK_SIZE, lambda _, held: held.append(block, q_len=BLOCK_SIZE)[0], allocator
        )
        return allocator.append(block * 0 + length % BLOCK_SIZE, q_len=BLOCK_SIZE)[0]

    shape = num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim
    empty = KVCache.create(
        num_blocks=2,
        block_size=BLOCK_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=jnp.bfloat16,
    )
    caches = tuple(
        dataclasses.replace(
            empty, k=random(2 * i, shape=shape, dtype="bfloat16"), v=random(2 * i + 1, shape=shape, dtype="bfloat16")
        )
        for i in range(config.num_layers)
    )
    return State(jnp.arange(num_seqs, dtype=jnp.int32), caches, grow())


def check(name: str, config: LlamaConfig, state: State) -> float:
    """The worst error of a logit by the default implementation against "xla", over the largest logit of its row."""
    config = dataclasses.replace(config, num_layers=CHECKED_LAYERS)
    weights, apply = MODELS[name](config)
    state = dataclasses.replace(state, caches=state.caches[:CHECKED_LAYERS])
    _, logits = poisoned(jax.jit(functools.partial(step, apply)), weights, state)
    xla = functools.partial(paged_attention, implementation="xla")

    def replaced(*args: Any, implementation: Any = None, **options: Any) -> Any:
        return xla(*args, **options)

    with (
        mock.patch.object(llama_step, "paged_attention", replaced),
        mock.patch("jaxpaged._attention.attend.paged_attention", replaced),
    ):
        _, expected = jax.jit(functools.partial(step, apply))(weights, state)
    return worst_error(f"the logits of {name}", logits, expected, most=MOST_ERROR)


def cache_copies(text: str, cache: KVCache) -> int:
    """Instructions of a compiled module that copy a cache-sized array."""
    shape = f"bf16[{','.join(map(str, cache.k.shape))}]"
    return len(re.findall(rf"= \(?{re.escape(shape)}\S* copy(?:-start)?\(", text))


def count_weight_bytes(weights: Any, config: LlamaConfig) -> int:
    embedding = config.vocab_size * config.features * 2  # of which a step reads a row a sequence
    return sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) - embedding


def time_loop(compiled: Any, weights: Any, state: State) -> tuple[State, list[float]]:
    """Seconds a step, by the slope between few and many steps; the state that comes out."""

    def run(state: State, num_steps: int) -> tuple[State, float]:
        begin = time.perf_counter()
        state = compiled(weights, state, jnp.int32(num_steps))
        jax.block_until_ready(state)
        return state, time.perf_counter() - begin

    state, _ = run(state, FEW_STEPS)
    slopes = []
    for _ in range(REPEATS):
        state, few = run(state, FEW_STEPS)
        state, many = run(state, MANY_STEPS)
        slopes.append((many - few) / (MANY_STEPS - FEW_STEPS))
    return state, slopes


def profile(compiled: Any, weights: Any, state: State) -> tuple[State, dict[str, list[float]]]:
    """The state after two more steps, and what their kernels took."""
    steps, result = 2, [state]

    def run() -> State:
        result[0] = compiled(weights, result[0], jnp.int32(steps))
        return result[0]

    found = by_kernel(kernel_times(run), steps)
    return result[0], found


def timeline(compiled: Any, weights: Any, state: State) -> tuple[State, dict[str, float]]:
    """The gaps between one kernel's end and the next one's start, in a trace of the loop."""
    events: list[Event] = []
    with traced(events):
        state = compiled(weights, state, jnp.int32(FEW_STEPS))
        jax.block_until_ready(state)
    gaps = [max(0.0, later[0] - earlier[1]) for earlier, later in itertools.pairwise(events)]
    if not gaps:
        return state, {"kernels": len(events)}
    whole = events[-1][1] - events[0][0]
    return state, {
        "kernels": len(events),
        "median_gap_us": statistics.median(gaps),
        "p90_gap_us": statistics.quantiles(gaps, n=10)[-1] if len(gaps) > 1 else gaps[0],
        "gaps_of_the_whole": sum(gaps) / whole,
    }


def measure(name: str, config: LlamaConfig, weights: Any, apply: Apply, shape: str, options: Any) -> dict[str, Any]:
    num_seqs, length = map(int, shape.split("x"))
    state = start(config, num_seqs, length)
    result: dict[str, Any] = {"error": check(name, config, state)}
    begin = time.perf_counter()
    lowered = jax.jit(functools.partial(loop, apply), donate_argnums=1).lower(weights, state, jnp.int32(1))
    xla = options.xla or {}
    compiled = lowered.compile(compiler_options=xla)
    result["compile_s"] = time.perf_counter() - begin
    result["cache_copies"] = cache_copies(compiled.as_text() or "", state.caches[0])
    memory = compiled.memory_analysis()
    result["temporary_bytes"] = memory and memory.temp_size_in_bytes
    first = int(state.allocator.lengths[0]) + FEW_STEPS
    state, slopes = time_loop(compiled, weights, state)
    mean_length = (first + int(state.allocator.lengths[0])) / 2
    kv_bytes = 2 * config.num_layers * num_seqs * mean_length * config.num_kv_heads * config.head_dim * 2
    result["bytes"] = count_weight_bytes(weights, config) + kv_bytes
    result["ms"] = statistics.median(slopes) * 1e3
    result["runs_ms"] = [slope * 1e3 for slope in slopes]
    result["floor_ms"] = result["bytes"] / options.bandwidth * 1e3
    result["over_floor"] = result["ms"] / result["floor_ms"]
    print(
        f"{name:<20} {shape:>8} {result['ms']:7.3f} ms, floor {result['floor_ms']:6.3f}, "
        f"ratio {result['over_floor']:.3f}, compile {result['compile_s']:.0f} s, "
        f"copies of a cache {result['cache_copies']}, error {result['error']:.1e}",
        flush=True,
    )
    if options.profile:
        state, result["by_kernel"] = profile(compiled, weights, state)
        for kernel, (microseconds, launches) in itertools.islice(result["by_kernel"].items(), 14):
            print(f"   {microseconds:9.1f} us a step, {launches:6.1f} launches  {kernel}", flush=True)
    if options.timeline:
        state, result["timeline"] = timeline(compiled, weights, state)
        print(f"   as compiled by default: {result['timeline']}", flush=True)
        no_graphs = lowered.compile(compiler_options=xla | {"xla_gpu_enable_command_buffer": ""})
        state = no_graphs(weights, state, jnp.int32(1))
        state, result["timeline_without_graphs"] = timeline(no_graphs, weights, state)
        print(f"   without CUDA graphs:    {result['timeline_without_graphs']}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["example", "fused"], choices=tuple(MODELS))
    parser.add_argument("--shapes", nargs="+", default=["64x2048", "1x8192"], help="sequences x length")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script out")
    add_xla(parser)
    parser.add_argument("--profile", action="store_true", help="the time of a step by kernel")
    parser.add_argument("--timeline", action="store_true", help="gaps between kernels, with CUDA graphs and without")
    add_output(parser)
    options = parser.parse_args()
    compiled_with = [f"{option}={value}" for option, value in (options.xla or {}).items()]

    config = (llama_step.toy if options.toy else llama_step.llama_3_8b)(options.layers)
    store = open_store("decode_step", options)
    options.bandwidth = read_bandwidth()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, read {options.bandwidth / 1e9:.0f} GB/s", flush=True)
    for name in options.models:
        weights, apply = MODELS[name](config)
        for shape in options.shapes:
            result = measure(name, config, weights, apply, shape, options)
            key = " ".join((name, shape, *compiled_with))
            store.add(key, result | {"read_bytes_per_s": options.bandwidth})
        del weights
    print(f"{'model':<20} {'shape':>8} {'ms':>8} {'floor':>8} {'ratio':>6}")
    for key, result in store.points.items():
        name, shape, *xla = key.split()
        figures = f"{result['ms']:8.3f} {result['floor_ms']:8.3f} {result['over_floor']:6.3f}"
        print(f"{name:<20} {shape:>8} {figures} {' '.join(xla)}")


if __name__ == "__main__":
    main()
