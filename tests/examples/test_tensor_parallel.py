"""The examples' Llama over several CPU devices: the same tokens as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpaged
from lib.families import read_config
from lib.fields import Fields
from lib.generation import generated, run_generation
from lib.llama import Llama
from lib.llama_config import LlamaConfig
from lib.sampling import Sampling
from lib.start import start
from lib.tensor_parallel import make_mesh, repeated_kv_heads, shard_model
from tests.examples.tiny_families import make_config

pytestmark = pytest.mark.slow

RELATIVES = dict(
    windows=(4,), final_soft_cap=9.0, embedding_scale=2.0, use_sinks=True, use_qk_norm=True, use_post_norms=True
)
BIASES = dict(attention_bias=True, output_bias=True, mlp_bias=True)
PROMPTS = [[5, 7, 11], [2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [42]]


def small_config(**changes) -> LlamaConfig:
    sizes = dict(vocab_size=64, context=64, features=32, hidden_features=64, num_layers=1, num_heads=8, head_dim=8)
    return LlamaConfig(**sizes, norm_epsilon=1e-5, rotary_frequencies=jaxpaged.rotary_frequencies(8), **changes)


def make_model(config) -> Llama:
    graph, weights = nnx.split(Llama(config, rngs=nnx.Rngs(0)))
    noise = iter(jax.random.split(jax.random.key(1), 100))
    weights = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(noise), x.shape), weights)
    return nnx.merge(graph, weights)


@pytest.mark.parametrize(
    ("num_devices", "config"),
    [
        (4, small_config(num_kv_heads=2, tie_embeddings=False, **BIASES, **RELATIVES)),
        (2, read_config(Fields(make_config("deepseek_v3")))),
    ],
)
def test_tokens_equal_one_device(num_devices, config):
    model = make_model(config)
    # Too few blocks: sequences wait for one another, equally on all devices.
    sizes = dict(max_new_tokens=12, block_size=4, num_blocks=10, dtype="float32", seed=3)
    sampling = Sampling(temperature=0.8)

    def run(model, config, mesh):
        state = start(config, PROMPTS, **sizes, mesh=mesh)
        with jax.numpy_rank_promotion("allow"):  # biases
            return run_generation(model, state, PROMPTS, (), sampling, steps_at_once=20, mesh=mesh)[0]

    mesh = make_mesh(num_devices)
    ours = run(shard_model(model, config, mesh), repeated_kv_heads(config, num_devices), mesh)
    theirs = run(model, config, None)
    assert generated(ours) == generated(theirs)
    assert jnp.array_equal(ours.starved, theirs.starved)
    assert ours.caches[0].k.addressable_shards[0].data.shape[2] == max(config.num_kv_heads // num_devices, 1)
    for leaf in jax.tree.leaves(ours.allocator):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert all((other == first).all() for other in others)


def test_the_command(tiny, run_generate):
    def run(*options):
        return run_generate(*options, model=tiny.path, prompts=["ab"], tokens=3)

    _, one, _ = run()
    assert run("--tensor-parallel", 2)[:2] == (0, one)
    assert "num_heads=6 do not go evenly over 4 devices." in run("--tensor-parallel", 4)[2]
    assert "JAX sees 4 devices; 99 were asked for." in run("--tensor-parallel", 99)[2]
