"""The slice of an engine, and modules with large weights, compiled for an H100 without a GPU: by `make test-ptxas`.

This file runs in a separate process, because JAX must be configured before it starts.
"""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxpaged.nnx
import lib.experts
from jaxpaged import (
    AttentionStep,
    BlockAllocator,
    Engine,
    EngineOptions,
    KVCache,
    LatentSettings,
    _device,
    rotary_frequencies,
)
from jaxpaged._engine.defaults import COMPILER_OPTIONS
from jaxpaged._scheduler.records import Sampling
from jaxpaged._slice.model import Setup, apply_head, apply_model
from jaxpaged._slice.run_slice import run_slice
from jaxpaged._slice.sampling import sample
from lib.llama_config import Clipped
from lib.mlp import Experts
from tests import toy_model
from tests.compiled import instructions
from tests.kernels import resources
from tests.kernels.lowering import mosaic_for

pytestmark = pytest.mark.skipif(not resources.installed(), reason="needs ptxas, see make test-ptxas")


WINDOWS = None, 32  # one per group of layers


def apply_to_parts(weights, tokens, positions, cache, step):
    """The toy model with a matrix each for q, k and v."""
    x = weights["embedding"][tokens]
    q, k, v = ((x @ part).reshape(len(tokens), toy_model.HEADS, toy_model.HEAD_DIM) for part in weights["qkv"])
    cache, out = step.attend(q, k, v, cache)
    return cache, x + out.reshape(x.shape)


def apply_by_kernels(weights, tokens, positions, cache, step):
    """Heads in the layout of the kernels."""
    x = weights["embedding"][tokens]
    cache, out = step.attend(x, x, x, cache)
    return cache, x + out


def apply_by_groups(weights, tokens, positions, caches, step):
    """A layer without a window and one with a window, which share a cache."""
    x, (cache,) = weights["embedding"][tokens], caches
    for group in range(2):
        cache, out = step.group(group).attend(x, x, x, cache, sliding_window=WINDOWS[group])
        x += out
    return (cache,), x


def head_of_heads(weights, hidden):
    return jnp.einsum("shd,vhd->sv", hidden, weights["embedding"])


def compiled(function, *arguments, **how):
    mesh = resources.make_mesh(resources.H100)
    types = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype, sharding=NamedSharding(mesh, PartitionSpec())), arguments
    )
    jitted = jax.jit(function, compiler_options=COMPILER_OPTIONS | {"xla_gpu_autotune_level": 0}, **how)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), mosaic_for(resources.compute_capability(resources.H100)):
        return jitted.lower(*types).compile().as_text()


def compiled_slice(apply, head, engine, weights):
    runner = engine._runner
    model = functools.partial(apply_model, apply)
    inbox = runner.program.inbox_of([], [], wants_logprobs=False, num_steps=0, forgets=engine._books.forgets)
    slice_of = functools.partial(run_slice, Setup(model, head, runner.kinds, runner.options))
    return compiled(slice_of, weights, runner.state_of_slice, inbox, donate_argnums=1)


def without_kernels():
    weights = toy_model.random_weights()
    parts = {"qkv": jnp.split(weights["qkv"], 3, axis=1)}
    return compiled_slice(apply_to_parts, toy_model.head, toy_model.shared_engine(), weights | parts)


def with_kernels(apply=apply_by_kernels, **more):
    cache = KVCache.create(num_blocks=64, block_size=16, num_kv_heads=2, head_dim=64)
    weights = {"embedding": jnp.zeros((48, 2, 64), jnp.bfloat16)}
    sizes = dict(max_num_seqs=8, chunk_tokens=56, widths=(4,), steps_per_slice=3)
    options = EngineOptions(**sizes, prefix_cache=True, **more)
    engine = Engine(apply, weights, (cache,) if more else cache, head=head_of_heads, options=options)
    _device.is_gpu, _device.gpu = lambda: True, lambda: _device.named("H100")
    return compiled_slice(apply, head_of_heads, engine, weights)


def with_groups():
    # 32 blocks a sequence: XLA joins only slices of whole 128 bytes with a kernel.
    return with_kernels(apply_by_groups, windows=WINDOWS, max_model_len=512)


# Elements of one of the large weights, more than of any other array, workspaces of cuBLAS included.
EXPERTS, FEATURES, HIDDEN, ROWS = 16, 1024, 512, 8
LARGE = EXPERTS * FEATURES * HIDDEN


def compiled_module(make, *arguments):
    graph, weights = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    return compiled(lambda weights, *arguments: nnx.merge(graph, weights)(*arguments), weights, *arguments)


def experts():
    """The modules of gpt-oss and DeepSeek, all experts for each token and grouped."""
    lib.experts.is_hopper = lambda: True
    make = functools.partial(Experts, EXPERTS, FEATURES, HIDDEN, dtype=jnp.bfloat16)
    makes = functools.partial(make, clipped=Clipped(alpha=1.7, limit=7.0)), make
    x, shares = jnp.zeros((ROWS, FEATURES), jnp.bfloat16), jnp.zeros((ROWS, 2), jnp.bfloat16)
    arguments = x, shares.astype(jnp.int32), shares
    programs = [functools.partial(make, grouped_above=above) for make in makes for above in (None, 0)]
    return "\n".join(compiled_module(program, *arguments) for program in programs)


def latents():
    sizes = dict(
        num_heads=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=None
    )
    how = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, implementation="xla")
    settings = LatentSettings(**sizes, rotary_frequencies=rotary_frequencies(64), **how)
    blocks = dict(num_blocks=ROWS + 1, block_size=16)
    cache = KVCache.create(**blocks, is_latent=True, num_kv_heads=1, head_dim=576, value_dim=512)
    allocator = BlockAllocator.create(**blocks, num_seqs=ROWS, max_blocks_per_seq=1)
    make = functools.partial(jaxpaged.nnx.LatentAttention, FEATURES, settings)
    step = AttentionStep.create(allocator, jnp.zeros(ROWS, jnp.int32))
    return compiled_module(make, jnp.zeros((ROWS, FEATURES), jnp.bfloat16), cache, step)


def one_row():
    linear = functools.partial(nnx.Linear, 2048, 2048, use_bias=False, dtype=jnp.bfloat16)
    return compiled_module(linear, jnp.zeros((1, 2048), jnp.bfloat16))


def one_row_of_logits():
    def head(weights, hidden):
        return jnp.matmul(hidden, weights, preferred_element_type=jnp.float32)

    options = dataclasses.replace(toy_model.shared_engine()._runner.options, is_gpu=True, vocab_size=512)
    setup = Setup(apply_model, head, (), options)
    weights, hidden = (jnp.zeros((rows, columns), jnp.bfloat16) for rows, columns in ((256, 512), (1, 256)))
    return compiled(functools.partial(apply_head, setup), weights, hidden, None)


def sampling():
    _device.is_gpu = lambda: True
    params, positions = Sampling.create(ROWS), jnp.zeros(ROWS, jnp.int32)
    return compiled(sample, jnp.zeros((ROWS, 1000), jnp.bfloat16), params, positions, jnp.bool_(False))


def module(of):
    command = [sys.executable, "-m", "tests.engine.test_slice_for_gpu", of]
    where = Path(__file__).parents[2]
    environment = os.environ | resources.WITHOUT_A_GPU | {"PYTHONPATH": f"{where / 'examples'}"}
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=where, env=environment).stdout


def test_the_slice_copies_neither_a_cache_nor_weights_and_never_calls_the_host():
    text = module("without_kernels")
    shape = f"f32[{toy_model.BLOCKS + 1},{toy_model.BLOCK_SIZE},{toy_model.HEADS},{toy_model.HEAD_DIM}]"
    of_cache = toy_model.operations_on(text, shape)
    assert "while" in of_cache  # the search finds the cache
    assert not [name for name in of_cache if name.startswith("copy")]
    part, whole = (f"f32[{toy_model.FEATURES},{n * toy_model.HEADS * toy_model.HEAD_DIM}]" for n in (1, 3))
    assert part in text  # the matrix for q, k or v
    assert whole not in text
    assert not {name for name, *_ in instructions(text)} & {"infeed", "outfeed", "send", "recv"}
    assert "callback" not in text


@pytest.mark.parametrize("of", ["experts", "latents"])
def test_a_step_copies_no_weights(of):
    text = module(of)
    large = {name for name, size, _ in instructions(text) if size >= LARGE}
    assert of == "latents" or text.count('"mosaic_gpu_v2"') == 4
    assert "parameter" in large
    assert large <= {"parameter", "bitcast"}


def test_the_product_of_all_experts_adds_its_bias():
    """Otherwise XLA writes the bias once for each token, and the product reads it."""
    biases = [line for _, size, line in instructions(module("experts")) if size >= ROWS * EXPERTS * 2 * HIDDEN]
    assert [line for line in biases if '"epilogue":"BIAS"' in line]
    assert not [line for line in biases if "broadcast" in line]


def test_sampling_computes_only_what_requests_need():
    """Draw, top_k, top_p, the rare second draw and logprobs. XLA computes both branches where that is cheap."""
    names = [name for name, *_ in instructions(module("sampling"))]
    assert names.count("conditional") == 5


def test_a_small_product_of_one_row_is_no_reduction():
    assert "cublas" in module("one_row")


def test_one_row_of_logits_needs_no_float32_weights():
    text = module("one_row_of_logits")
    assert "bf16[256,512]" in text
    assert "f32[256,512]" not in text


@pytest.mark.parametrize("of", ["with_kernels", "with_groups"])
def test_the_only_loop_is_over_the_steps(of):
    """XLA then captures a step and the choice of its kind in a CUDA graph, and a call does not wait for steps."""
    text = module(of)
    assert "mosaic" in text
    assert "dynamic-slice-fusion" not in text  # no CUDA graph can hold one
    (loop,) = [line for name, _, line in instructions(text) if name == "while"]
    assert '"known_trip_count":{"n":"3"}' in loop


if __name__ == "__main__":
    print(globals()[sys.argv[1]]())
