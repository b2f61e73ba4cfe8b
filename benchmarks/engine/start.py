"""Seconds until an engine is ready: the first start on a machine, and the second, which finds the program in a cache.

A third start, with an empty folder again, is that of an engine with a vocabulary for grammars.

    python -m benchmarks.engine.start --model 1b     # about 90 seconds on a GPU with 16 cores
    python -m benchmarks.engine.start --model toy    # on a CPU, to try the script out

Each start is a process of its own. Both use one folder as `jax_compilation_cache_dir`, which is empty before the first.
`process` lasts from the start of Python to the end of the process, `engine` is the call of `Engine`. Its parts are:

- trace, lower: Python makes the program, and the code of its Mosaic kernels;
- compile: XLA compiles it, or reads it from the folder, and loads it onto the device.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import jax

from benchmarks.engine.changed_logits import random_vocabulary
from benchmarks.engine.model import CONFIGS, random_weights
from benchmarks.engine.workload import create_engine
from benchmarks.harness import add_output, open_store
from jaxpaged import SamplingParams

# The folder that each start uses, and its flags.
STARTS = {"first": ("plain", []), "second": ("plain", []), "vocabulary": ("vocabulary", ["--vocabulary"])}
PARTS = {
    "trace": "/jax/core/compile/jaxpr_trace_duration",
    "lower": "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "compile": "/jax/core/compile/backend_compile_duration",
}


def start(model: str, *, has_vocabulary: bool) -> dict[str, float]:
    """Seconds of the steps of a start in this process."""
    begin, seconds = time.perf_counter(), dict[str, float]()
    spent: dict[str, float] = collections.defaultdict(float)

    def note(name: str) -> None:
        nonlocal begin
        now = time.perf_counter()
        seconds[name], begin = now - begin, now

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        spent[event] += duration_secs

    weights = jax.block_until_ready(random_weights(CONFIGS[model]))
    note("weights")
    vocabulary = random_vocabulary(CONFIGS[model].vocab_size)[0] if has_vocabulary else None
    note("vocabulary")
    jax.monitoring.register_event_duration_secs_listener(listen)
    engine = create_engine(model, weights, vocabulary=vocabulary)
    note("engine")
    seconds |= {name: spent[event] for name, event in PARTS.items()}
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    note("first_tokens")
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1b")
    parser.add_argument("--one", action="store_true", help="start once, in this process, and print the seconds as JSON")
    parser.add_argument("--vocabulary", action="store_true", help="with --one: with a vocabulary for grammars")
    add_output(parser)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(start(options.model, has_vocabulary=options.vocabulary)))
        return
    options.toy, found = options.model == "toy", {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.engine.start", "--one", "--model", options.model]
        for name, (cache, flags) in STARTS.items():
            begin = time.perf_counter()
            done = subprocess.run(
                [*command, *flags],
                env=os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{folder}/{cache}"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            process = {"process": time.perf_counter() - begin}
            found[name] = process | json.loads(done.stdout.splitlines()[-1])
            print(
                f"{name:<10}", ", ".join(f"{part} {seconds:.1f} s" for part, seconds in found[name].items()), flush=True
            )
    store = open_store(f"start_{options.model}", options, cores=os.cpu_count())  # the starts had the GPU to themselves
    for name, seconds in found.items():
        store.add(name, {f"{part}_s": taken for part, taken in seconds.items()})


if __name__ == "__main__":
    main()
