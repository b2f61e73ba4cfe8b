"""A step of an engine with prompts, by Hopper's kernels and by the portable ones alone.

    python -m benchmarks.engine.forms

Layers of Llama-3-8B's shape with random bfloat16 weights, and a vocabulary so small that its logits cost nothing: 256
seats, nearly all of which decode, beside 512 tokens of prompts. Of both engines the widest kind of step is timed, by
the slope between few steps and many, in slices of the engine's.
"""

import argparse
import contextlib
import dataclasses
import os
import statistics
from collections.abc import Iterator
from unittest import mock

import jax

from benchmarks.engine.model import CONFIGS, packed_model, random_weights
from benchmarks.engine.steps import Steps
from benchmarks.engine.workload import SIZES, create_caches
from benchmarks.harness import add_output, open_store
from benchmarks.kernels.prefill import portable_gpu
from jaxpaged import Engine, EngineOptions, _device
from jaxpaged._attention.decide import VARIABLE

FORMS = "hopper", "portable"
FEW_STEPS, MANY_STEPS = 2, 8


def milliseconds(form: str, *, toy: bool, layers: int, length: int, rounds: int) -> Iterator[float]:
    """Of the widest step, `rounds` times; sequences that decode have `length` tokens."""
    name = "toy" if toy else "8b"
    config = dataclasses.replace(CONFIGS[name], num_layers=layers, vocab_size=1024)
    sizes = dataclasses.replace(SIZES[name], **({} if toy else dict(seats=256, chunk=512)))
    engine = Engine(
        packed_model(config),
        random_weights(config),
        create_caches(config, sizes.num_blocks),
        options=EngineOptions(
            max_num_seqs=sizes.seats,
            max_model_len=2 * sizes.longest,
            chunk_tokens=sizes.chunk,
            widths=(),  # the widest kind is what is timed
        ),
    )
    steps, kind = Steps(engine, sizes), engine._runner.kinds[-1]
    few, many = (1, 2) if toy else (FEW_STEPS, MANY_STEPS)
    for _ in range(rounds):
        steps.prepare(kind, length)
        yield steps.milliseconds(kind, few, many)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, help="tokens of the sequences that decode")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--toy", action="store_true", help="small, for trying this script out; one form on a CPU")
    add_output(parser)
    options = parser.parse_args(arguments)
    length = options.length or (32 if options.toy else 512)
    store = open_store("engine_forms", options)
    how = dict(toy=options.toy, layers=2 if options.toy else options.layers, length=length, rounds=options.rounds)
    found = {}
    for form in options.forms if _device.is_gpu() else FORMS[:1]:
        is_portable = form == "portable"
        gpu = (
            mock.patch.object(_device, "gpu", return_value=portable_gpu()) if is_portable else contextlib.nullcontext()
        )
        with mock.patch.dict(os.environ, {VARIABLE: "0"}), gpu:
            times = list(milliseconds(form, **how))
        found[form] = statistics.median(times)
        store.add(f"{form} {how['layers']} layers, {length} tokens", {"ms": found[form], "times": times})
        print(f"{jax.devices()[0].device_kind} {form}: {found[form]:.3f} ms a step, {times}", flush=True)
    if len(found) == 2:
        print(f"portable over hopper: {found['portable'] / found['hopper']:.3f}")


if __name__ == "__main__":
    main()
