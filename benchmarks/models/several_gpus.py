"""Two GPUs against one: `python -m benchmarks.models.several_gpus`.

  attention  tensor parallel: a call with its KV heads over the GPUs; on one GPU all heads, and one GPU's share of them
  step       a decode step of a model of Llama-3-8B's shape (examples/lib/llama.py), the whole loop in one jit
  prefill    prompts for that model, one after the other in one jit
  context    one sequence, its blocks over the GPUs: `context_parallel_attention` against `paged_attention`
  engine     tensor parallel: an engine for that model, whose caches lie on all GPUs, with a number of the requests of
             benchmarks/engine/throughput.py
  engines    data parallel: an engine on each GPU, each with as many of the same requests, model x number

Before a part is timed, its results on several GPUs are compared with the results of one GPU. For a model these are the
logits of two layers; the timed layers are copies of the two. The collectives of each compiled program are counted: none
may return an array of the size of a device's part of a cache, and nothing may copy one. What is of a model is compiled
with each of `--variants`. Times are microseconds of a call, of a step, or of all requests.

    python -m benchmarks.models.several_gpus --parts step --shapes 64x2048 --variants default graphs
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m benchmarks.models.several_gpus --toy    # on a CPU
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.checks import poisoned, worst_error
from benchmarks.engine.model import CONFIGS, packed_model, random_weights
from benchmarks.engine.workload import BLOCK_SIZE, SIZES, Request, create_caches, run_work, workload
from benchmarks.harness import Store, add_output, open_store
from benchmarks.models import decode_step, llama_step
from benchmarks.models.decode_step import CHECKED_LAYERS, MOST_ERROR, State, loop, start, time_loop
from benchmarks.models.sharded_attention import attention, collectives, context, part_shape, put
from jaxpaged import Engine, EngineOptions
from jaxpaged._engine.defaults import COMPILER_OPTIONS
from lib.engine_llama import create_engine
from lib.llama import Llama
from lib.llama_config import LlamaConfig
from lib.tensor_parallel import CACHE, make_mesh, replicate, shard_model

GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL"
NCCL_IN_GRAPHS = {
    "xla_gpu_experimental_use_collective_kernels": "",
    "xla_gpu_enable_command_buffer": f"{GRAPHS},COLLECTIVES",
}
VARIANTS: dict[str, dict[str, str]] = {
    "default": {},
    "graphs": NCCL_IN_GRAPHS,
    "graphs_sync": NCCL_IN_GRAPHS | {"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"},
}
SHAPES = dict(
    attention=("64x2048", "64x8192", "1x32768"),
    step=("64x2048", "1x8192"),
    prefill=("8x1024",),
    context=("1x32768", "1x131072", "1x1048576"),
    engine=("512",),
    engines=("1bx1024",),
)
TOY_SHAPES = dict(
    attention=("3x50",), step=("2x40",), prefill=("2x16",), context=("1x100",), engine=("20",), engines=("toyx20",)
)
# Of the tensor parallel engine: seats, most new tokens of a chunk and of a request, and blocks.
ENGINE_SIZES, TOY_ENGINE_SIZES = (512, 512, 1024, 16_384), (8, 16, 64, 128)
MOST_NATS = 0.3  # logits of two and of one GPU differ by up to 2% of the largest, which is about 6


def engines(shape: str, mesh: Mesh, toy: bool) -> dict[str, Any]:
    """Microseconds of the requests on one engine, and on as many as GPUs, each with all of them; and their tokens."""
    name, count = shape.split("x")
    config, sizes = CONFIGS[name], SIZES[name]
    work = workload(int(count), sizes.longest)

    def create(device: jax.Device) -> Engine:
        return Engine(
            packed_model(config),
            *jax.device_put((random_weights(config), create_caches(config, sizes.num_blocks)), device),
            options=EngineOptions(
                max_num_seqs=sizes.seats or None,
                max_model_len=2 * sizes.longest,
                chunk_tokens=sizes.chunk or None,
            ),
        )

    with ThreadPoolExecutor() as threads:
        made = list(threads.map(create, mesh.devices.flat))

        def serve(engines: list[Engine]) -> float:
            return max(threads.map(time_work, engines, [work] * len(engines)))

        serve(made)  # warm
        runs = [(serve(made[:1]), serve(made)) for _ in range(1 if toy else 3)]
    one, several = (statistics.median(times) for times in zip(*runs, strict=True))
    return dict(tokens=sum(new for _, new in work), one=one, several=several, speedup=len(made) * one / several)


class Models:
    """The model on one GPU and on all of the mesh, with the same weights."""

    def __init__(self, config: LlamaConfig, mesh: Mesh, one: Llama, cut: Llama):
        self.config, self.mesh = config, mesh
        self.graph, self.weights = nnx.split(one)
        self.cut_graph, self.cut_weights = nnx.split(cut)

    @staticmethod
    def create(config: LlamaConfig, mesh: Mesh) -> "Models":
        graph, _ = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))
        one = nnx.merge(graph, llama_step.example_model(config)[0])
        return Models(config, mesh, one, shard_model(one, config, mesh))

    def with_layers(self, num_layers: int) -> "Models":
        """With copies of the layers, in turn: quicker than to cut other weights on the host."""
        config = dataclasses.replace(self.config, num_layers=num_layers)
        one, cut = self.merged(cut=False), self.merged(cut=True)
        for model in (one, cut):
            layers = itertools.islice(itertools.cycle(model.layers), num_layers)
            model.layers = nnx.List([jax.tree.map(jnp.copy, layer) for layer in layers])
        return Models(config, self.mesh, one, cut)

    def merged(self, *, cut: bool) -> Llama:
        return nnx.merge(self.cut_graph, self.cut_weights) if cut else nnx.merge(self.graph, self.weights)

    def state(self, shape: str, *, cut: bool) -> State:
        num_seqs, length = map(int, shape.split("x"))
        state = start(self.config, num_seqs, length)
        if not cut:
            return state
        return replicate(self.mesh, State(state.tokens, put(self.mesh, state.caches, CACHE), state.allocator))

    def apply(self, cut: bool, weights: Any, tokens: jax.Array, caches: Any, allocator: Any, slots: jax.Array) -> Any:
        model = nnx.merge(self.cut_graph if cut else self.graph, weights)
        return model(tokens.reshape(*slots.shape[:1], -1), caches, allocator, slots.reshape(*slots.shape[:1], -1))

    def on_one(self, function: Any) -> Any:
        return functools.partial(function, functools.partial(self.apply, False))

    def over_mesh(self, function: Any, out_specs: Any) -> Any:
        return jax.shard_map(
            functools.partial(function, functools.partial(self.apply, True)),
            mesh=self.mesh,
            out_specs=out_specs,
            check_vma=False,
        )


def prompts(apply: Any, weights: Any, state: State, *, length: int) -> tuple[State, jax.Array]:
    """A step that computes new prompts over what there was. Also returns the logits."""
    seqs = state.tokens.shape[0]
    allocator = state.allocator.free(jnp.ones(seqs, bool))
    allocator, slots, _ = allocator.append(jnp.full(seqs, length, jnp.int32), q_len=length)
    tokens = (state.tokens[:, None] + jnp.arange(length, dtype=jnp.int32)[None]) % 1000
    caches, logits = apply(weights, tokens, state.caches, allocator, slots)
    return State(logits.argmax(axis=-1).astype(jnp.int32), caches, allocator), logits


def check(shape: str, models: Models, one_step: Any) -> tuple[float, tuple[int, ...]]:
    """The error of the logits, and the shape of a device's part of a cache."""

    def logits(apply: Any, weights: Any, state: State) -> jax.Array:
        return one_step(apply, weights, state)[1]

    state, cut_state = models.state(shape, cut=False), models.state(shape, cut=True)
    on_one, on_all = models.on_one(logits), models.over_mesh(logits, P())
    theirs = jax.jit(on_one)(models.weights, state)
    ours = poisoned(jax.jit(on_all), models.cut_weights, cut_state)
    return worst_error(f"the logits of {shape}", ours, theirs, most=MOST_ERROR), part_shape(cut_state.caches[0].k)


def model_step(shape: str, checked: Models, models: Models, one_step: Any, variants: list[str]) -> dict[str, Any]:
    def timed(function: Any, weights: Any, *, cut: bool, xla: Any) -> tuple[float, Any]:
        """Microseconds a step, and the program."""
        state = models.state(shape, cut=cut)
        lowered = jax.jit(function, donate_argnums=1).lower(weights, state, jnp.int32(1))
        compiled = lowered.compile(compiler_options=xla)
        return statistics.median(time_loop(compiled, weights, state)[1]) * 1e6, compiled

    found, part_of_cache = check(shape, checked, one_step)
    result: dict[str, Any] = {"error": found}
    specs = State(P(), CACHE, P())  # type: ignore[arg-type]
    steps = functools.partial(loop, step=one_step)
    result["one"], _ = timed(models.on_one(steps), models.weights, cut=False, xla={})
    print(f"{shape}: one GPU {result['one']:.0f} us, error {result['error']:.1e}", flush=True)
    for name in variants:
        try:
            result[name], compiled = timed(
                models.over_mesh(steps, specs), models.cut_weights, cut=True, xla=VARIANTS[name]
            )
        except jax.errors.JaxRuntimeError as refused:  # options are renamed from version to version
            print(f"   {name}: {str(refused).splitlines()[0]}", flush=True)
            continue
        result[f"{name}_collectives"] = collectives(compiled, part_of_cache)
        print(f"   {name}: {result[name]:.0f} us, {result[f'{name}_collectives']}", flush=True)
    times = [result[name] for name in variants if name in result]
    return result | {"several": min(times), "speedup": result["one"] / min(times)}


def engine(count: str, models: Models, variants: list[str], toy: bool) -> dict[str, Any]:
    """Microseconds of the requests, and their tokens."""
    max_num_seqs, chunk_tokens, longest, num_blocks = TOY_ENGINE_SIZES if toy else ENGINE_SIZES
    work = workload(int(count), longest)

    def run(cut: bool, xla: dict[str, str]) -> tuple[float, list[float]]:
        """Microseconds, and the logprobs of the tokens of a few prompts."""
        made = create_engine(
            models.merged(cut=cut),
            models.config,
            EngineOptions(
                max_num_seqs=max_num_seqs,
                max_model_len=2 * longest,
                chunk_tokens=chunk_tokens,
                compiler_options=({} if toy else COMPILER_OPTIONS) | xla,
            ),
            block_size=BLOCK_SIZE,
            dtype="bfloat16",
            num_blocks=num_blocks,
            mesh=models.mesh if cut else None,
        )
        scores = made.score([prompt[:1] for prompt, _ in work[:16]], [prompt[1:] for prompt, _ in work[:16]])
        times = [time_work(made, work) for _ in range(1 if toy else 2)]
        return min(times), [logprob for score in scores for logprob in score.logprobs]

    one, expected = run(False, {})
    print(f"{count} requests: one GPU {one / 1e6:.2f} s", flush=True)
    tokens = sum(new for _, new in work)
    result: dict[str, Any] = dict(layers=models.config.num_layers, tokens=tokens, one=one)
    for name in variants:
        result[name], logprobs = run(True, VARIANTS[name])
        result["error"] = max(abs(ours - theirs) for ours, theirs in zip(logprobs, expected, strict=True))
        print(f"   {name}: {result[name] / 1e6:.2f} s, {result['error']:.3f} nats", flush=True)
        if not result["error"] <= MOST_NATS:
            raise AssertionError(f"logprobs differ by {result['error']:.3f} nats")
    several = min(result[name] for name in variants)
    return result | {"several": several, "speedup": one / several}


def time_work(engine: Engine, work: list[Request]) -> float:
    """Microseconds."""
    begin = time.perf_counter()
    if run_work(engine, work) != sum(new for _, new in work):
        raise AssertionError("not all tokens came")
    return (time.perf_counter() - begin) * 1e6


def measure(part: str, shapes: Any, mesh: Mesh, options: argparse.Namespace, store: Store) -> None:
    checked = models = None
    for shape in shapes:
        if f"{part} {shape}" in store.points:
            continue
        if part in ("step", "prefill", "engine") and models is None:
            config = (llama_step.toy if options.toy else llama_step.llama_3_8b)(CHECKED_LAYERS)
            checked = Models.create(config, mesh)
            models = checked.with_layers(3 if options.toy else options.layers)
        if part == "engine" and models is not None:
            result = engine(shape, models, options.variants, options.toy)
        elif checked is not None and models is not None:
            length = int(shape.split("x")[1])
            one_step = decode_step.step if part == "step" else functools.partial(prompts, length=length)
            result = model_step(shape, checked, models, one_step, options.variants)
        else:
            result = {"attention": attention, "context": context, "engines": engines}[part](shape, mesh, options.toy)
        store.add(f"{part} {shape}", result)
        print(f"{part} {shape}: {result}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=tuple(SHAPES), choices=tuple(SHAPES))
    parser.add_argument("--shapes", nargs="+", help="sequences x length, with one of --parts")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--variants", nargs="+", default=tuple(VARIANTS), choices=tuple(VARIANTS))
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to try the script out")
    add_output(parser)
    options = parser.parse_args(arguments)
    mesh = make_mesh(options.devices)
    store = open_store("several_gpus", options, devices=options.devices)
    print(f"{options.devices} x {jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    for part in options.parts:
        measure(part, options.shapes or (TOY_SHAPES if options.toy else SHAPES)[part], mesh, options, store)
    print(f"{'':<20} {'one':>9} {'several':>9} {'speedup':>8} {'of share':>9}")
    for name, result in store.points.items():
        share = f"{result['efficiency']:9.3f}" if "efficiency" in result else ""
        print(f"{name:<20} {result['one']:9.1f} {result['several']:9.1f} {result['speedup']:8.2f} {share}")


if __name__ == "__main__":
    main()
