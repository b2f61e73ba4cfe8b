"""Data parallel: one process with an engine on each device. Each request goes to the engine with the most room.

    python examples/data_parallel.py --data-parallel 2 --prompt "Once upon a time" --prompt "The old lighthouse keeper"
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python examples/data_parallel.py ...    # the same on a CPU

The weights are read once and copied to each device. Each engine has its own thread and prefix cache. A prompt whose
first blocks are in the prefix cache of one engine goes there, unless that engine is full (`lib/router.py`). All threads
need Python's lock: for a large model, give each engine a process, as `serve.py --data-parallel` does.
"""

import argparse
import asyncio
import functools

from jaxpaged import EngineOptions, RequestOutput, SamplingParams
from lib import command_line
from lib.checkpoint import load_model
from lib.engine_loop import Request
from lib.engine_thread import EngineThread
from lib.engines import Engines
from lib.replicas import create_engines, load_replicas
from lib.router import Router


async def generate(engines: Engines, requests: list[Request]) -> list[RequestOutput]:
    """Continues all prompts, and returns their outputs in order. Raises `EngineFailedError`."""
    places = asyncio.Semaphore(engines.most_completions)  # later requests then go to the engine with room

    async def complete(request: Request) -> RequestOutput:
        async with places:
            generation = engines.open(request[1].n)
            try:
                engines.start(generation, [request])
                async for _, output in generation.outputs():
                    last = output
                return last
            finally:
                engines.close(generation)

    async with engines.running():
        return await asyncio.gather(*map(complete, requests))


def main(arguments: list[str] | None = None) -> None:
    parents = [command_line.model_arguments(), command_line.sampling_arguments(temperature=0.8)]
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], parents=parents)
    command_line.add_data_parallel(parser)
    parser.add_argument("--max-num-seqs", type=int, default=16, help="seats of an engine; default: %(default)s")
    args = parser.parse_args(arguments)
    asked = command_line.read_request(args)
    sampling, tokenizer = command_line.read_sampling(args, asked.checkpoint), asked.checkpoint.tokenizer
    params = [
        SamplingParams(
            max_tokens=min(args.max_new_tokens, asked.checkpoint.config.context + 1 - len(prompt)),
            temperature=sampling.temperature,
            top_k=sampling.top_k or 0,
            top_p=sampling.top_p,
            seed=(args.seed + i) % 2**32,  # the tokens then do not depend on the choice of the engine
            stop_token_ids=() if args.ignore_eos else tuple(tokenizer.eos_ids),
        )
        for i, prompt in enumerate(asked.prompts)
    ]
    options = EngineOptions(
        max_num_seqs=args.max_num_seqs,
        max_model_len=max(len(p) + of_one.max_tokens for p, of_one in zip(asked.prompts, params, strict=True)),
        num_stop_ids=len(tokenizer.eos_ids),
        prefix_cache=True,
    )
    load = functools.partial(load_model, asked.checkpoint, args.dtype)
    replicas = load_replicas(load, asked.checkpoint.config, data_parallel=args.data_parallel)
    with command_line.matmul_precision(args.dtype):
        made = create_engines(replicas, options, block_size=args.block_size, dtype=args.dtype)
    most, router = 2 * len(made) * args.max_num_seqs, Router(args.block_size, has_affinity=True)
    engines = Engines(list(map(EngineThread, made)), most_completions=most, router=router)
    outputs = asyncio.run(generate(engines, list(zip(asked.prompts, params, strict=True))))
    for text, output in zip(asked.texts, outputs, strict=True):
        print(f"{text}\n--> {tokenizer.decode(output.outputs[0].token_ids).strip()}\n")


if __name__ == "__main__":
    command_line.run(main)
