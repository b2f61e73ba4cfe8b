"""`AttentionStep`: a pytree for every transformation, its layouts, its plan, and what it refuses."""

import dataclasses
import functools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpaged import AttentionStep, BlockAllocator, CacheLayer, KVCache, paged_attention_reference, tree_mask, write_kv
from jaxpaged._attention.plan import make_plan
from jaxpaged._attention.shared_prefix import PrefixGroups

BLOCKS = dict(num_blocks=16, block_size=4)
SEQS, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 8
FREQUENCIES = (1.0, 0.3, 0.1)
NEW = (3, 1, 2)  # tokens of each sequence


def random(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def make_cache(**changes):
    sizes = dict(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="float32")
    cache = KVCache.create(**BLOCKS, **sizes | changes)
    return dataclasses.replace(cache, k=random(1, *cache.k.shape), v=random(2, *cache.v.shape))


@functools.cache
def history(windows=(None,)):
    """Sequences of 4, 4 and 6 tokens; the first two share a block."""
    allocator = BlockAllocator.create(**BLOCKS, num_seqs=SEQS, max_blocks_per_seq=4, windows=windows)
    allocator, _, _ = allocator.append(jnp.asarray([4, 0, 6]), q_len=6)
    return allocator.fork(jnp.asarray([-1, 0, -1]))[0]


def packed_slots(slots, counts=NEW):
    """The slots of the new tokens, packed, and where those of each sequence begin."""
    rows = [slots[..., i, slots.shape[-1] - count :] for i, count in enumerate(counts)]
    return jnp.concatenate(rows, axis=-1), jnp.asarray(np.cumsum([0, *counts]), jnp.int32)


def tree_step():
    allocator, slots, _ = history().append(jnp.full(SEQS, 3), q_len=3)
    positions = history().lengths[:, None] + jnp.asarray([[0, 1, 1]])
    mask = jnp.tile(tree_mask(jnp.asarray([-1, 0, 0])), (SEQS, 1, 1))
    step = AttentionStep.create(
        allocator, slots, positions=positions, tree_mask=mask, adapters=jnp.arange(SEQS * 3, dtype=jnp.int32)
    )
    return dataclasses.replace(step, plan=make_plan(allocator.lengths, num_kv_heads=KV_HEADS, q_len=3))


def packed_step():
    allocator, slots, _ = history().append(jnp.asarray(NEW), q_len=3)
    slots, starts = packed_slots(slots)
    groups = PrefixGroups(starts=jnp.asarray([0, 4]), first=jnp.asarray([0]), num_blocks=jnp.asarray([1, 1, 0]))
    return AttentionStep.create(allocator, slots, query_starts=starts, prefix_groups=groups, num_partitions=2)


STEPS = {"tree": tree_step, "packed": packed_step}


def inputs(step):
    tokens = step.positions.shape
    q = random(3, *tokens, HEADS, HEAD_DIM)
    return step, q, *(random(seed, *tokens, KV_HEADS, HEAD_DIM) for seed in (4, 5)), make_cache()


def attend(step, q, k, v, cache):
    return step.attend(q, k, v, cache, rotary_frequencies=FREQUENCIES)


def doubled(tree):
    return jax.tree.map(lambda x: jnp.stack([x, x]), tree)


def both(results):
    return [jax.tree.map(lambda x, i=i: x[i], results) for i in range(2)]


def by_scan(step, q, k, v, cache):
    def layer(carry, i):
        step, stack = carry
        layer, out = attend(step, q, k, v, CacheLayer(stack, i))
        return (step, layer.stack), out

    (_, stack), out = jax.lax.scan(layer, (step, doubled(cache)), jnp.arange(2))
    return both((stack, out))


def by_nnx_scan(step, q, k, v, cache):
    @nnx.scan(in_axes=(nnx.Carry, None, 0), out_axes=(nnx.Carry, 0))
    def layer(stack, step, i):
        layer, out = attend(step, q, k, v, CacheLayer(stack, i))
        return layer.stack, out

    return both(layer(doubled(cache), step, jnp.arange(2)))


class LinenLayer(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, stack, step, q, k, v, i):
        scale = self.param("scale", flax.linen.initializers.ones, ())
        layer, out = attend(step, scale * q, k, v, CacheLayer(stack, i))
        return layer.stack, out


def by_linen_scan(step, q, k, v, cache):
    same = flax.linen.broadcast
    layers = flax.linen.scan(
        LinenLayer, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=(same, same, same, same, 0)
    )()
    results, _ = layers.init_with_output(jax.random.key(0), doubled(cache), step, q, k, v, jnp.arange(2))
    return both(results)


def by_shard_map(step, q, k, v, cache):
    mesh = jax.make_mesh((2,), ("heads",), (AxisType.Auto,), devices=jax.devices()[:2])
    tokens, pool = P(*[None] * step.positions.ndim, "heads"), P(None, None, "heads")
    specs = dict(in_specs=(P(), tokens, tokens, tokens, pool), out_specs=(pool, tokens))
    return [jax.jit(jax.shard_map(attend, mesh=mesh, **specs))(step, q, k, v, cache)]


def by_export(*args):
    # The step is an argument and a result.
    function = jax.jit(lambda step, *rest: (step, attend(step, *rest)))
    restored = export.deserialize(export.export(function)(*args).serialize())
    step, results = restored.call(*args)
    assert jax.tree.structure(step) == jax.tree.structure(args[0])
    return [results]


def by_grad(*args):
    def loss(q, step, *rest):
        results = attend(step, q, *rest)
        return results[1].sum(), results

    step, q, *rest = args
    return [jax.jit(jax.grad(loss, has_aux=True))(q, step, *rest)[1]]


TRANSFORMATIONS = {
    "jit": lambda *args: [jax.jit(attend)(*args)],
    "scan": by_scan,
    "vmap": lambda *args: both(jax.vmap(attend)(*doubled(args))),
    "shard_map": by_shard_map,
    "export": by_export,
    "nnx.scan": by_nnx_scan,
    "nnx.remat": lambda *args: [nnx.remat(attend)(*args)],
    "linen.scan": by_linen_scan,
    "remat": lambda *args: [jax.jit(jax.checkpoint(attend))(*args)],
    "grad": by_grad,
}


def assert_close(ours, theirs, atol=2e-6):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(left, right, atol=atol)


@functools.cache
def plain(kind):
    args = inputs(STEPS[kind]())
    return args, attend(*args)


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_transformation_changes_nothing(name, kind):
    args, expected = plain(kind)
    for results in TRANSFORMATIONS[name](*args):
        assert_close(results, expected)
    # What the rows compare depends on every argument.
    assert not np.allclose(expected[0].k, args[-1].k)


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
def test_gradients_reach_queries_keys_values_and_the_cache(wrapped):
    step, q, k, v, cache = inputs(packed_step())
    last = jnp.asarray([2, 3, 5])  # rows of each sequence's newest token

    @wrapped
    def ours(step, q, k, v, cache):
        return step.attend(q, k, v, cache)[1][last]

    def theirs(step, q, k, v, cache):
        cache = write_kv(cache, k, v, step.slots)
        allocator = step.allocator
        return paged_attention_reference(q[last], cache.k, cache.v, allocator.block_tables, allocator.lengths)

    def gradient(function):
        loss = lambda arrays, step: (function(step, *arrays) ** 2).sum()  # noqa: E731
        return jax.jit(jax.grad(loss))((q, k, v, cache), step)

    got, wanted = gradient(ours), gradient(theirs)
    assert_close(got, wanted, atol=1e-5)
    assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(wanted))
