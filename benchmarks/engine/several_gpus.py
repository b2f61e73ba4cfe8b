"""Two GPUs against one: `python -m benchmarks.engine.several_gpus`.

  attention  tensor parallel: a call with KV heads sharded over the GPUs, against one GPU with all heads or one share
  context    one sequence, its blocks over the GPUs: `context_parallel_attention` against `paged_attention`
  engine     tensor parallel: an engine for a model of Llama-3-8B's shape (examples/lib/llama.py), with caches sharded
             over the GPUs, on some of the requests of benchmarks/engine/throughput.py
  engines    data parallel: an engine on each GPU, all with the same requests; shapes are model x number of requests

Before a part is timed, its results on several GPUs are compared with the results of one GPU. The collectives of
attention calls are counted. None may return an array as large as a device's part of a cache, and nothing may copy one.
Times are microseconds per call or for all requests. Set XLA_FLAGS for other options of XLA.

    python -m benchmarks.engine.several_gpus --parts attention --shapes 64x2048
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m benchmarks.engine.several_gpus --toy    # on a CPU
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from benchmarks.engine.model import LLAMA_3_8B, TOY, fill
from benchmarks.engine.throughput import worst_nats
from benchmarks.engine.workload import BLOCK_SIZE, SIZES, Request, run_work, workload
from benchmarks.engine.workload import create_engine as workload_engine
from benchmarks.harness import add_output, open_store
from benchmarks.kernels.sharded_attention import attention, context
from jaxpaged import Engine, EngineOptions
from lib.engine_llama import create_engine
from lib.llama import Llama
from lib.tensor_parallel import make_mesh, shard_model

SHAPES = dict(
    attention=("64x2048", "64x8192", "1x32768"),
    context=("1x32768", "1x131072", "1x1048576"),
    engine=("512",),
    engines=("1bx1024",),
)
TOY_SHAPES = dict(attention=("3x50",), context=("1x100",), engine=("20",), engines=("toyx20",))
# Tensor parallel engine: seats, most new tokens of a chunk and of a request, and blocks.
ENGINE_SIZES, TOY_ENGINE_SIZES = (512, 512, 1024, 16_384), (8, 16, 64, 128)
LAYERS, TOY_LAYERS = 32, 3


def engine(count: str, mesh: Mesh, toy: bool) -> dict[str, Any]:
    """Microseconds for all requests, and their tokens."""
    max_num_seqs, chunk_tokens, longest, num_blocks = TOY_ENGINE_SIZES if toy else ENGINE_SIZES
    config = dataclasses.replace(TOY if toy else LLAMA_3_8B, num_layers=TOY_LAYERS if toy else LAYERS)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))
    model = nnx.merge(graph, fill(shapes))
    work = workload(int(count), longest)

    def run(model: Llama, mesh: Mesh | None) -> tuple[float, list[list[float]]]:
        """Microseconds for all requests, and the logprobs of a few prompts."""
        made = create_engine(
            model,
            config,
            options=EngineOptions(max_num_seqs=max_num_seqs, max_model_len=2 * longest, chunk_tokens=chunk_tokens),
            block_size=BLOCK_SIZE,
            dtype="bfloat16",
            num_blocks=num_blocks,
            mesh=mesh,
        )
        scores = made.score([prompt[:1] for prompt, _ in work[:16]], [prompt[1:] for prompt, _ in work[:16]])
        return min(time_work(made, work) for _ in range(1 if toy else 2)), [score.logprobs for score in scores]

    one, expected = run(model, None)
    several, found = run(shard_model(model, config, mesh), mesh)
    error, tokens = worst_nats(found, expected), sum(new for _, new in work)
    return dict(layers=config.num_layers, tokens=tokens, error=error, one=one, several=several, speedup=one / several)


def engines(shape: str, mesh: Mesh, toy: bool) -> dict[str, Any]:
    """Microseconds for all requests on one engine, and on one engine per GPU that each serve all; and their tokens."""
    name, count = shape.split("x")
    work = workload(int(count), SIZES[name].longest)

    with ThreadPoolExecutor() as threads:
        made = list(threads.map(lambda device: workload_engine(name, device=device), mesh.devices.flat))

        def serve(engines: list[Engine]) -> float:
            return max(threads.map(time_work, engines, [work] * len(engines)))

        serve(made)  # warm
        runs = [(serve(made[:1]), serve(made)) for _ in range(1 if toy else 3)]
    one, several = (statistics.median(times) for times in zip(*runs, strict=True))
    return dict(tokens=sum(new for _, new in work), one=one, several=several, speedup=len(made) * one / several)


def time_work(engine: Engine, work: Sequence[Request]) -> float:
    """Microseconds for all of `work`."""
    begin = time.perf_counter()
    if run_work(engine, work) != sum(new for _, new in work):
        raise AssertionError("not all tokens came")
    return (time.perf_counter() - begin) * 1e6


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=tuple(SHAPES), choices=tuple(SHAPES))
    parser.add_argument("--shapes", nargs="+", help="sequences x length, with one of --parts")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to try the script out")
    add_output(parser)
    options = parser.parse_args(arguments)
    mesh = make_mesh(options.devices)
    store = open_store("several_gpus", options, devices=options.devices)
    print(f"{options.devices} x {jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    for part in options.parts:
        measure = {"attention": attention, "context": context, "engine": engine, "engines": engines}[part]
        for shape in options.shapes or (TOY_SHAPES if options.toy else SHAPES)[part]:
            if f"{part} {shape}" not in store.points:
                result = measure(shape, mesh, options.toy)
                store.add(f"{part} {shape}", result)
                print(f"{part} {shape}: {result}", flush=True)


if __name__ == "__main__":
    main()
