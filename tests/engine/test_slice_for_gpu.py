"""The slice of an engine, compiled for an H100 on a machine without a GPU: by `make test-ptxas`.

By a process of its own, which runs this file: JAX must be told before it starts.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxpaged._engine.defaults import COMPILER_OPTIONS
from jaxpaged._engine.slices import Setup, run_slice
from tests import toy_model
from tests.compiled import instructions
from tests.kernels import resources
from tests.kernels.lowering import mosaic_for

pytestmark = pytest.mark.skipif(not resources.installed(), reason="needs ptxas, see make test-ptxas")


def apply_to_parts(weights, tokens, positions, cache, attend):
    """The toy model with a matrix each for q, k and v."""
    x = weights["embedding"][tokens]
    q, k, v = ((x @ part).reshape(len(tokens), toy_model.HEADS, toy_model.HEAD_DIM) for part in weights["qkv"])
    cache, out = attend(q, k, v, cache)
    return cache, attend.newest(x + out.reshape(x.shape)) @ weights["head"]


def main():
    """Prints the compiled module."""
    mesh = resources.make_mesh(resources.H100)
    engine = toy_model.shared_engine(16)
    runner = engine._runner
    news = runner.program.inbox_of([], [], wants_logprobs=False, num_steps=0, forgets=engine._books.forgets)
    weights = runner.weights | {"qkv": jax.numpy.split(runner.weights["qkv"], 3, axis=1)}
    types = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jax.numpy.shape(x), x.dtype, sharding=NamedSharding(mesh, PartitionSpec())),
        (weights, runner.state_of_slice, news),
    )
    jitted = jax.jit(
        functools.partial(run_slice, Setup(apply_to_parts, runner.kinds)),
        donate_argnums=1,
        compiler_options=COMPILER_OPTIONS | {"xla_gpu_autotune_level": 0},
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), mosaic_for(resources.compute_capability(resources.H100)):
        print(jitted.lower(*types).compile().as_text())


def test_the_slice_copies_neither_a_cache_nor_weights_and_never_calls_the_host():
    command = [sys.executable, "-m", "tests.engine.test_slice_for_gpu"]
    environment = os.environ | resources.WITHOUT_A_GPU
    where = Path(__file__).parents[2]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=where, env=environment)
    found = instructions(done.stdout)
    shape = f"f32[{toy_model.BLOCKS + 1},{toy_model.BLOCK_SIZE},{toy_model.HEADS},{toy_model.HEAD_DIM}]"
    of_cache = {name for name, _, line in found if shape in line.split(name + "(")[0]}
    assert "while" in of_cache  # the search sees the cache
    assert not {name for name in of_cache if name.startswith("copy")}
    part, whole = (f"f32[{toy_model.FEATURES},{n * toy_model.HEADS * toy_model.HEAD_DIM}]" for n in (1, 3))
    assert part in done.stdout  # of q, k or v
    assert whole not in done.stdout
    assert not {name for name, *_ in found} & {"infeed", "outfeed", "send", "recv"}
    assert "callback" not in done.stdout


if __name__ == "__main__":
    main()
