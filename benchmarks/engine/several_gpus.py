"""Several GPUs against one: `python -m benchmarks.engine.several_gpus`.

  attention  tensor parallel: a call with KV heads sharded over the GPUs, against one GPU with all heads or one share
  context    one sequence, its blocks over the GPUs: `context_parallel_attention` against `paged_attention`
  prompts    the same for the last 512 tokens of a prompt
  step       tensor parallel: a decode step of a model, sharded_step.py
  prefill    tensor parallel: all tokens of prompts, sharded_step.py
  engine     tensor parallel: sharded_engine.py; shapes are numbers of requests

Before a part is timed, its results on several GPUs are compared with the results of one GPU. The collectives of
attention calls are counted. None may return an array as large as a device's part of a cache, and nothing may copy one.
Times are microseconds per call or for all requests. Set XLA_FLAGS for other options of XLA. The part `engine` alone
writes its points into sharded_engine.json.

    python -m benchmarks.engine.several_gpus --parts attention --shapes 64x2048
    python -m benchmarks.engine.several_gpus --parts engine --shapes 512
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m benchmarks.engine.several_gpus --toy    # on a CPU
"""

import argparse

import jax

from benchmarks.engine.model import CONFIGS
from benchmarks.engine.sharded_engine import sharded_engine
from benchmarks.engine.sharded_step import step
from benchmarks.harness import add_output, open_store
from benchmarks.kernels.sharded_attention import attention, context, prompts
from lib.tensor_parallel import make_mesh

SHAPES = dict(
    attention=("64x2048", "64x8192", "1x32768"),
    context=("1x32768", "1x131072", "1x1048576"),
    prompts=("1x32768", "1x131072"),
    step=("64x2048", "1x8192"),
    prefill=("8x1024",),
    engine=("512", "2048"),
)
TOY_SHAPES = dict(
    attention=("3x50",),
    context=("1x100",),
    prompts=("1x100",),
    step=("2x40",),
    prefill=("2x40",),
    engine=("20",),
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=tuple(SHAPES), choices=tuple(SHAPES))
    parser.add_argument("--shapes", nargs="+", help="sequences x length, or requests, with one of --parts")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--model", default="8b", choices=tuple(CONFIGS), help="of the parts step, prefill and engine")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to try the script out")
    add_output(parser)
    options = parser.parse_args(arguments)
    mesh = make_mesh(options.devices)
    name = "sharded_engine" if options.parts == ["engine"] else "several_gpus"
    model = "toy" if options.toy else options.model
    store = open_store(name, options, model=model, devices=options.devices)
    print(f"{options.devices} x {jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    measures = {"attention": attention, "context": context, "prompts": prompts}
    measures["step"] = lambda shape, mesh, toy: step(shape, mesh, model)
    measures["prefill"] = lambda shape, mesh, toy: step(shape, mesh, model, prompts=True)
    for part in options.parts:
        shapes = options.shapes or (TOY_SHAPES if options.toy else SHAPES)[part]
        if part == "engine":
            sharded_engine(store, list(map(int, shapes)), mesh, model)
            continue
        for shape in shapes:
            if f"{part} {shape}" not in store.points:
                result = measures[part](shape, mesh, options.toy)
                store.add(f"{part} {shape}", result)
                print(f"{part} {shape}: {result}", flush=True)


if __name__ == "__main__":
    main()
