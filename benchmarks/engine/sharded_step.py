"""The parts `step` and `prefill` of several_gpus.py: a model with its heads over several GPUs, and on one GPU.

The model is the one of examples/lib/llama.py with random bfloat16 weights. A decode step appends a token to each
sequence, computes the model and takes the likeliest next tokens. A prefill step computes all tokens of its prompts; the
next one drops their first token and appends the likeliest next one. All steps of a run are one loop in one jit.
Prefill, and decode from 64 sequences on, use the engine's options for XLA, which make narrower steps slower; narrower
steps use DECODE_OPTIONS. Before a time is measured, the logits of a first step must equal one GPU's up to rounding. If
the weights do not fit one GPU, random shards are made on each, and nothing is compared. Points, microseconds a step:

- one, several: on one GPU and on all;
- bytes: of weights and cache that each GPU reads in a decode step;
- floor: the time to read them, at the bandwidth of a kernel that only reads.
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from benchmarks.checks import require, worst_error
from benchmarks.engine.model import CONFIGS
from benchmarks.engine.sharded_model import is_large, random_model, random_shards
from benchmarks.engine.workload import BLOCK_SIZE
from benchmarks.harness import compile_all, random, read_bandwidth
from jaxpaged import AttentionStep, BlockAllocator, KVCache
from jaxpaged._engine.defaults import chosen_compiler_options
from lib.generation import DECODE_OPTIONS
from lib.llama import Llama
from lib.llama_config import LlamaConfig
from lib.tensor_parallel import create_on, on_mesh, repeated_kv_heads, replicate, shard_model

FEW, MANY, REPEATS = 8, 24, 3  # steps of a run
FEW_PREFILLS, MANY_PREFILLS = 1, 4
MOST_ERROR = 0.1  # relative to the largest logit; 0.06 over four GPUs in bfloat16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    caches: tuple[KVCache, ...]
    allocator: BlockAllocator
    tokens: jax.Array  # int32 [seqs], or [seqs, q_len] of prompts
    logits: jax.Array  # f32 [seqs, vocab_size]


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="state")
def run(graph: nnx.GraphDef, weights: nnx.State, state: State, num_steps: jax.Array) -> State:
    model = nnx.merge(graph, weights)

    def step(_: Any, state: State) -> State:
        allocator, slots, _ = state.allocator.append(jnp.ones_like(state.tokens))
        caches, x = model(state.tokens, state.caches, AttentionStep.create(allocator, slots))
        logits = model.logits(x)
        return State(caches, allocator, logits.argmax(axis=-1).astype(jnp.int32), logits)

    def prefill(_: Any, state: State) -> State:
        seqs, q_len = state.tokens.shape
        allocator, slots, _ = state.allocator.append(jnp.full(seqs, q_len), q_len=q_len)
        caches, x = model(state.tokens, state.caches, AttentionStep.create(allocator, slots))
        logits = model.logits(x[:, -1])
        tokens = jnp.concatenate([state.tokens[:, 1:], logits.argmax(axis=-1, keepdims=True)], axis=1)
        return State(caches, state.allocator, tokens.astype(jnp.int32), logits)

    return jax.lax.fori_loop(0, num_steps, step if state.tokens.ndim == 1 else prefill, state)


@dataclasses.dataclass(frozen=True)
class Side:
    """A model on one GPU, without a mesh, or over several."""

    model: Llama
    mesh: Mesh | None

    def lower(self, state: State) -> Any:
        program = run if self.mesh is None else on_mesh(self.mesh, run)
        return program.lower(*nnx.split(self.model), state, self._place(1))

    def call(self, compiled: Any, state: State, num_steps: int) -> State:
        return compiled(nnx.state(self.model), state, self._place(num_steps))

    def _place(self, number: int) -> jax.Array:
        return jnp.int32(number) if self.mesh is None else replicate(self.mesh, jnp.int32(number))


def sides_of(name: str, mesh: Mesh) -> dict[str, Side]:
    config = CONFIGS[name]
    if is_large(config):
        return {"several": Side(random_shards(config, mesh), mesh)}
    model = random_model(config)
    return {"one": Side(model, None), "several": Side(shard_model(model, config, mesh), mesh)}


def start(config: LlamaConfig, seqs: int, length: int, mesh: Mesh | None, *, prompts: bool) -> State:
    """Sequences of `length` tokens, with the same random keys and values on one device and on several.

    With `prompts`: empty sequences, and random prompts of `length` tokens.
    """
    of_caches = config if mesh is None else repeated_kv_heads(config, mesh.size)
    per_seq = -(-(length + 1 + REPEATS * (FEW + MANY)) // BLOCK_SIZE)
    sizes: Any = dict(num_blocks=1 + seqs * per_seq, block_size=BLOCK_SIZE)

    def create() -> KVCache:
        cache = KVCache.create(**sizes, **of_caches.cache_sizes, dtype=jnp.bfloat16)
        shape = (*cache.k.shape[:2], config.num_kv_heads, config.head_dim)
        repeats = of_caches.num_kv_heads // config.num_kv_heads
        k, v = (random(seed, shape=shape, dtype="bfloat16").repeat(repeats, axis=2) for seed in range(2))
        return dataclasses.replace(cache, k=k, v=v)

    cache = jax.jit(create)() if mesh is None else create_on(mesh, create)
    caches = [cache, *(jax.tree.map(jnp.copy, cache) for _ in range(config.num_layers - 1))]
    allocator = BlockAllocator.create(**sizes, num_seqs=seqs, max_blocks_per_seq=per_seq)
    if prompts:
        tokens = jax.random.randint(jax.random.key(2), (seqs, length), 0, config.vocab_size)
    else:
        allocator, _, ok = allocator.append(jnp.full(seqs, length), q_len=length)
        require(ok.all(), "the pool is too small")
        tokens = jnp.zeros(seqs, jnp.int32)
    rest = allocator, tokens, jnp.zeros((seqs, config.vocab_size))
    return State(tuple(caches), *(rest if mesh is None else replicate(mesh, rest)))


def time_steps(call: Callable[[State, int], State], state: State) -> tuple[float, np.ndarray]:
    """Microseconds of a step, and the logits of the first. `call` runs a number of steps."""
    few, many = (FEW, MANY) if state.tokens.ndim == 1 else (FEW_PREFILLS, MANY_PREFILLS)
    state = call(state, 1)
    logits, seconds = np.array(state.logits), dict[int, list[float]]({few: [], many: []})
    for _ in range(REPEATS):
        for count, found in seconds.items():
            begin = time.perf_counter()
            state = jax.block_until_ready(call(state, count))
            found.append(time.perf_counter() - begin)
    short, long = map(statistics.median, seconds.values())
    return (long - short) / (many - few) * 1e6, logits


def bytes_of(config: LlamaConfig, model: Llama, state: State, tokens: int) -> int:
    """A device's weights, except the embedding, and its keys and values of all tokens."""
    shards = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model))]
    embedding = 0 if config.tie_embeddings else config.vocab_size * config.features
    cache = state.caches[0].k
    of_token = math.prod(cache.sharding.shard_shape(cache.shape)[2:])
    return 2 * (sum(map(math.prod, shards)) - embedding + 2 * config.num_layers * tokens * of_token)


def step(shape: str, mesh: Mesh, name: str, *, prompts: bool = False) -> dict[str, Any]:
    """Decode steps of sequences x length, or with `prompts` prefill steps of that shape."""
    config, (seqs, length) = CONFIGS[name], map(int, shape.split("x"))
    xla = chosen_compiler_options(None) if seqs >= 64 or prompts else DECODE_OPTIONS
    sides = sides_of(name, mesh)
    states = {key: start(config, seqs, length, side.mesh, prompts=prompts) for key, side in sides.items()}
    nbytes = None if prompts else bytes_of(config, sides["several"].model, states["several"], seqs * length)
    lowered = {key: side.lower(states[key]) for key, side in sides.items()}
    programs = compile_all(
        {key: functools.partial(each.compile, compiler_options=xla) for key, each in lowered.items()}
    )
    times, logits = dict[str, float](), dict[str, np.ndarray]()
    for key, side in sides.items():
        times[key], logits[key] = time_steps(functools.partial(side.call, programs[key]), states.pop(key))
    found: dict[str, Any] = dict(times)
    if nbytes is not None:
        found |= dict(bytes=nbytes, floor=nbytes / read_bandwidth() * 1e6)
    if "one" in sides:
        error = worst_error(shape, logits["several"], logits["one"], most=MOST_ERROR)
        found |= dict(error=error, speedup=times["one"] / times["several"])
    return found
