"""The examples' Llama over several CPU devices: the same tokens as on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpaged
from lib import sums
from lib.families import read_config
from lib.fields import Fields
from lib.generation import generated, run_generation
from lib.llama import Llama
from lib.llama_config import LlamaConfig
from lib.replicas import load_replica
from lib.sampling import Sampling
from lib.start import start
from lib.tensor_parallel import (
    AXIS,
    CACHE,
    DevicesError,
    create_on,
    make_mesh,
    repeated_kv_heads,
    replicate,
    shard_model,
)
from tests.compiled import collectives
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
        (8, small_config(num_kv_heads=2, tie_embeddings=False, **BIASES, **RELATIVES)),
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


def test_devices_exchange_only_sums():
    """The only layer needs two, after attention and after the MLP."""
    config, mesh = small_config(num_kv_heads=2), make_mesh(4)
    graph, weights = nnx.split(shard_model(make_model(config), config, mesh))
    sizes = dict(num_blocks=4, block_size=4)
    of_caches = repeated_kv_heads(config, 4).cache_sizes
    cache = create_on(mesh, lambda: jaxpaged.KVCache.create(**sizes, **of_caches, dtype="float32"))
    allocator = jaxpaged.BlockAllocator.create(**sizes, num_seqs=2, max_blocks_per_seq=1)

    def forward(weights, cache, allocator):
        allocator, slots, _ = allocator.append(jnp.ones(2, jnp.int32))
        step = jaxpaged.AttentionStep.create(allocator, slots)
        model = nnx.merge(graph, weights)
        caches, x = model(jnp.array([3, 60]), [cache], step)
        return caches, model.logits(x)

    forward = jax.shard_map(forward, mesh=mesh, out_specs=((CACHE,), P()), check_vma=False)
    text = jax.jit(forward).lower(weights, cache, replicate(mesh, allocator)).compile().as_text()
    assert collectives(text) == ["all-reduce"] * 2


@pytest.mark.parametrize(("rows", "num_sums"), [((8,), 1), ((3, 3), 2), ((25,), 4), ((32,), 4), ((33,), 1)])
def test_large_sums_of_a_step_are_cut_into_parts(monkeypatch, rows, num_sums):
    mesh, features = make_mesh(4), 8
    monkeypatch.setattr(sums, "MOST_BYTES", 4 * 8 * features * 4)  # of 8 rows, over 4 devices
    monkeypatch.setattr(sums, "WIDEST_BYTES", 32 * features * 4)

    def add(x):
        return sums.sum_over(AXIS, x[0])

    x = jax.random.normal(jax.random.key(0), (4, *rows, features))
    shards = jax.device_put(x, NamedSharding(mesh, P(AXIS)))
    add = jax.shard_map(add, mesh=mesh, in_specs=P(AXIS), out_specs=P(), check_vma=False)
    compiled = jax.jit(add).lower(shards).compile()
    assert collectives(compiled.as_text()) == ["all-reduce"] * num_sums
    np.testing.assert_allclose(compiled(shards), x.sum(axis=0), atol=1e-5)


@pytest.mark.parametrize(
    ("devices", "changes", "message"),
    [
        (8, dict(num_kv_heads=3), "num_kv_heads=3 do not go evenly over 8 devices; use 1 or 3 or 6."),
        (4, dict(num_kv_heads=3), "num_kv_heads=3 do not go evenly over 4 devices; use 1 or 3."),
        (8, dict(num_kv_heads=4, num_heads=4), "num_heads=4 do not go evenly over 8 devices; use 1 or 2 or 4."),
        (8, dict(num_kv_heads=8, hidden_features=36), "hidden_features=36 do not .* use 1 or 2 or 4."),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_the_model_is_loaded(devices, changes, message):
    sizes = dict(num_heads=24, hidden_features=96, vocab_size=96)
    config = dataclasses.replace(small_config(num_kv_heads=2), **sizes | changes)
    with pytest.raises(DevicesError, match=message):
        load_replica(lambda: pytest.fail("loaded"), config, tensor_parallel=devices)


def test_the_command(tiny, run_generate):
    def run(*options):
        return run_generate(*options, model=tiny.path, prompts=["ab"], tokens=3)

    _, one, _ = run()
    assert run("--tensor-parallel", 2)[:2] == (0, one)
    assert "num_heads=6 do not go evenly over 4 devices; use 1 or 2." in run("--tensor-parallel", 4)[2]
    assert "JAX sees 8 devices; 99 were asked for." in run("--tensor-parallel", 99)[2]
