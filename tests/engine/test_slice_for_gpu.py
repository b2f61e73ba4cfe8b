"""The slice of an engine, compiled for an H100 on a machine without a GPU: by `make test-ptxas`.

By a process of its own, which runs this file: JAX must be told before it starts.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxpaged import Engine, KVCache, _device
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


def apply_by_kernels(weights, tokens, positions, cache, attend):
    """Heads as the kernels take them."""
    x = weights["embedding"][tokens]
    cache, out = attend(x, x, x, cache)
    return cache, jnp.einsum("shd,vhd->sv", attend.newest(x + out), weights["embedding"])


def compiled(apply, engine, weights):
    mesh = resources.make_mesh(resources.H100)
    runner = engine._runner
    news = runner.program.inbox_of([], [], wants_logprobs=False, num_steps=0, forgets=engine._books.forgets)
    types = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype, sharding=NamedSharding(mesh, PartitionSpec())),
        (weights, runner.state_of_slice, news),
    )
    jitted = jax.jit(
        functools.partial(run_slice, Setup(apply, runner.kinds)),
        donate_argnums=1,
        compiler_options=COMPILER_OPTIONS | {"xla_gpu_autotune_level": 0},
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), mosaic_for(resources.compute_capability(resources.H100)):
        return jitted.lower(*types).compile().as_text()


def without_kernels():
    weights = toy_model.random_weights()
    parts = {"qkv": jnp.split(weights["qkv"], 3, axis=1)}
    return compiled(apply_to_parts, toy_model.shared_engine(16), weights | parts)


def with_kernels():
    cache = KVCache.create(num_blocks=64, block_size=16, num_kv_heads=2, head_dim=64)
    weights = {"embedding": jnp.zeros((48, 2, 64), jnp.bfloat16)}
    sizes = dict(num_seats=8, chunk_tokens=56, widths=(4,), steps_per_slice=3)
    engine = Engine(apply_by_kernels, weights, cache, prefix_cache=True, **sizes)
    _device.is_gpu, _device.gpu = lambda: True, lambda: _device.named("H100")
    return compiled(apply_by_kernels, engine, weights)


def module(of):
    command = [sys.executable, "-m", "tests.engine.test_slice_for_gpu", of]
    environment, where = os.environ | resources.WITHOUT_A_GPU, Path(__file__).parents[2]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=where, env=environment).stdout


def test_the_slice_copies_neither_a_cache_nor_weights_and_never_calls_the_host():
    text = module("without_kernels")
    found = instructions(text)
    shape = f"f32[{toy_model.BLOCKS + 1},{toy_model.BLOCK_SIZE},{toy_model.HEADS},{toy_model.HEAD_DIM}]"
    of_cache = {name for name, _, line in found if shape in line.split(name + "(")[0]}
    assert "while" in of_cache  # the search sees the cache
    assert not {name for name in of_cache if name.startswith("copy")}
    part, whole = (f"f32[{toy_model.FEATURES},{n * toy_model.HEADS * toy_model.HEAD_DIM}]" for n in (1, 3))
    assert part in text  # of q, k or v
    assert whole not in text
    assert not {name for name, *_ in found} & {"infeed", "outfeed", "send", "recv"}
    assert "callback" not in text


def test_the_only_loop_is_that_of_the_steps():
    """Then XLA puts a step and the choice of its kind into a CUDA graph, and a call waits for no step."""
    text = module("with_kernels")
    assert "mosaic" in text
    (loop,) = [line for name, _, line in instructions(text) if name == "while"]
    assert '"known_trip_count":{"n":"3"}' in loop


if __name__ == "__main__":
    print({"without_kernels": without_kernels, "with_kernels": with_kernels}[sys.argv[1]]())
