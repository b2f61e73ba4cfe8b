"""`AttentionStep`: a pytree under every transformation, its layouts, its plan and its refusals."""

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

from jaxpaged import AttentionStep, BlockAllocator, CacheLayer, KVCache, _device, paged_attention_reference, tree_mask
from jaxpaged._attention.plan import make_plan
from jaxpaged.ops import PrefixGroups, write_kv

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
    """The packed slots of the new tokens, and the start of each sequence."""
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
    # The compared rows depend on every argument.
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


def test_the_layouts_agree_with_each_other_and_with_the_reference():
    """New tokens as rows of each sequence, packed between padding, and token by token."""
    before, cache = history(), make_cache()
    allocator, slots, _ = before.append(jnp.asarray(NEW), q_len=3)
    q, k, v = (random(seed, SEQS, 3, heads, HEAD_DIM) for seed, heads in ((3, HEADS), (4, KV_HEADS), (5, KV_HEADS)))
    is_new = np.arange(3) >= 3 - np.asarray(NEW)[:, None]
    options = dict(scale=0.4, sliding_window=5, logits_soft_cap=2.0, sinks=random(6, HEADS))

    uniform = AttentionStep.create(allocator, slots)
    assert (uniform.positions == allocator.positions(3)).all()
    rows_cache, rows = uniform.attend(q, k, v, cache, **options)
    written = write_kv(cache, k, v, slots)
    tables = allocator.block_tables, allocator.lengths
    reference = paged_attention_reference(q, written.k, written.v, *tables, **options)
    assert_close(rows_cache, written)
    np.testing.assert_allclose(rows[is_new], reference[is_new], atol=2e-6)

    def pack(x):
        return jnp.pad(x[is_new], [(1, 2), *[(0, 0)] * (x.ndim - 2)], constant_values=-1)

    starts = jnp.asarray([1, 4, 5, 7])
    packed = AttentionStep.create(allocator, pack(slots), query_starts=starts)
    assert packed.positions[1:-2].tolist() == uniform.positions[is_new].tolist()
    packed_cache, out = packed.attend(pack(q), pack(k), pack(v), cache, **options)
    assert_close(packed_cache, written)
    np.testing.assert_allclose(out[1:-2], reference[is_new], atol=2e-6)

    for i in range(3):  # only the first sequence has a token in the first column
        before, slots, _ = before.append(jnp.asarray(is_new[:, i], jnp.int32))
        single = AttentionStep.create(before, slots)
        assert single.positions.shape == (SEQS,)
        cache, out = single.attend(q[:, i], k[:, i], v[:, i], cache, **options)
        np.testing.assert_allclose(out[is_new[:, i]], reference[is_new[:, i], i], atol=2e-6)
    assert_close(cache, written)


@pytest.mark.parametrize("layout", ["uniform", "packed"])
def test_a_group_has_its_own_table_slots_and_window(layout):
    allocator, slots, _ = history((None, 4)).append(jnp.asarray(NEW), q_len=3)
    starts = None
    if layout == "packed":
        slots, starts = packed_slots(slots)
    step = AttentionStep.create(allocator, slots, query_starts=starts)
    assert step.positions.shape == slots.shape[1:]
    for index, window in enumerate((None, 4)):
        group, own = step.group(index), AttentionStep.create(allocator.group(index), slots[index], query_starts=starts)
        assert_close(dataclasses.replace(group, group_index=0), own)
        assert group.group_index == index
        _, q, k, v, cache = inputs(group)
        assert_close(
            group.attend(q, k, v, cache, sliding_window=window), own.attend(q, k, v, cache, sliding_window=window)
        )
    with pytest.raises(ValueError, match=r"has a window of 4 tokens.* pass sliding_window=4 or less; got None"):
        group.attend(q, k, v, cache)
    with pytest.raises(ValueError, match=r"has 2 groups of layers: call step\.group\(i\)"):
        step.attend(q, k, v, cache)
    with pytest.raises(ValueError, match=r"a group is from 0 to 1, .*; got 2"):
        step.group(2)
    alone = AttentionStep.create(history(), jnp.zeros(SEQS, jnp.int32))
    assert_close(alone.group(0), alone)
    with pytest.raises(ValueError, match=r"a group is from 0 to 0, .*; got 1"):
        alone.group(1)


SLOTS = jnp.zeros((SEQS, 2), jnp.int32)
PACKED = dict(slots=jnp.zeros(5, jnp.int32), query_starts=jnp.asarray([0, 2, 2, 5]))
MISTAKES = {
    "slots of two groups": (dict(slots=SLOTS[None]), r"slots must be int32 .*; got int32 \[1, 3, 2\] for 1 groups"),
    "slots of no token": (dict(slots=3), r"slots must be int32 .*; got int32 \[\] for 1 groups"),
    "slots dtype": (dict(slots=SLOTS.astype(jnp.float32)), r"slots must be int32 .*; got float32 \[3, 2\]"),
    "packed slots of rows": (PACKED | dict(slots=SLOTS), r"with query_starts \[tokens\], .*; got int32 \[3, 2\]"),
    "slots of other sequences": (
        dict(slots=SLOTS[:2]),
        r"a row for each of the allocator's 3 sequences; got \[2, 2\]. Pass query_starts with packed tokens",
    ),
    "packed without query_starts": (dict(slots=PACKED["slots"]), r"the allocator's 3 sequences; got \[5\]. Pass query"),
    "query_starts shape": (
        PACKED | dict(query_starts=jnp.asarray([0, 2, 5])),
        r"query_starts must be int32 \[4\], one more than the allocator's sequences; got int32 \[3\]",
    ),
    "query_starts dtype": (
        PACKED | dict(query_starts=jnp.zeros(4)),
        r"query_starts must be int32 \[4\], .*; got float32 \[4\]",
    ),
    "positions shape": (
        dict(positions=jnp.zeros(SEQS, jnp.int32)),
        r"positions must be int32 \[3, 2\], one a token; got int32 \[3\]",
    ),
    "positions dtype": (
        dict(positions=jnp.zeros((3, 2))),
        r"positions must be int32 \[3, 2\], .*; got float32 \[3, 2\]",
    ),
    "packed positions": (
        PACKED | dict(positions=jnp.zeros((5, 1), jnp.int32)),
        r"positions must be int32 \[5\], one a token; got int32 \[5, 1\]",
    ),
    "partitions": (dict(num_partitions=0), r"num_partitions must be an int of at least 1, .*; got num_partitions=0"),
    "KV heads": (dict(num_kv_heads=0), r"num_kv_heads must be at least 1; got num_kv_heads=0"),
    "half a KV head": (dict(num_kv_heads=1.5), r"num_kv_heads must be an int; got num_kv_heads=1.5"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_arguments_are_refused(name):
    changes, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        AttentionStep.create(history(), **dict(slots=SLOTS) | changes)


def test_arrays_may_be_lists():
    step = AttentionStep.create(history(), SLOTS.tolist(), positions=np.zeros((SEQS, 2), np.int64), adapters=[-1] * 6)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((step.slots, step.positions, step.adapters))} == {"int32"}


def test_invalid_arguments_of_attend():
    step, q, k, v, cache = inputs(packed_step())
    with pytest.raises(ValueError, match=r"needs the cache last, a KVCache or CacheLayer; got ArrayImpl"):
        step.attend(cache, q, k, v)
    with pytest.raises(ValueError, match=r"interleaved"):
        step.attend(q, k, v, cache, interleaved=True)
    with pytest.raises(ValueError, match=r"interleaved"):
        step.attend(q, None, None, cache, interleaved=True)


@pytest.mark.parametrize("rotation", [{}, dict(rotary_frequencies=FREQUENCIES), dict(interleaved=True)], ids=str)
@pytest.mark.parametrize("kind", STEPS)
def test_a_layer_without_keys_reads_another_layers_cache(kind, rotation):
    if rotation:
        rotation = dict(rotary_frequencies=FREQUENCIES) | rotation
    step, q, k, v, cache = inputs(STEPS[kind]())
    written, expected = step.attend(q, k, v, cache, **rotation)
    same, out = step.attend(q, None, None, written, **rotation)
    assert same is written
    np.testing.assert_allclose(out, expected, atol=2e-6)
    _, plain = step.attend(q, None, None, written)
    assert np.allclose(plain, expected, atol=1e-3) == (not rotation)


def test_a_layer_without_keys_rotates_the_rest_of_a_latent():
    step = packed_step()
    cache = KVCache.create(**BLOCKS, num_kv_heads=1, head_dim=20, value_dim=16, is_latent=True, dtype="float32")
    q, k = random(3, 6, HEADS, 20), random(4, 6, 1, 20)
    how = dict(rotary_frequencies=(1.0, 0.3), scale=0.3)
    written, expected = step.attend(q, k, None, cache, **how)
    _, out = step.attend(q, None, None, written, **how)
    assert out.shape == (6, HEADS, 16)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", ["one token", "packed"])
def test_a_batch_axis_of_one_is_kept(kind, axis):
    if kind == "packed":
        step = packed_step()
    else:
        allocator, slots, _ = history().append(jnp.ones(SEQS, jnp.int32))
        step = AttentionStep.create(allocator, slots)
    step, *tokens, cache = inputs(step)
    after, expected = attend(step, *tokens, cache)
    ours, out = attend(step, *(jnp.expand_dims(x, axis) for x in tokens), cache)
    assert_close(ours, after)
    assert out.shape == jnp.expand_dims(expected, axis).shape
    assert (jnp.squeeze(out, axis) == expected).all()
    _, out = step.attend(jnp.expand_dims(tokens[0], axis), None, None, after, rotary_frequencies=FREQUENCIES)
    np.testing.assert_allclose(jnp.squeeze(out, axis), expected, atol=2e-6)


LONG = dict(num_blocks=16, block_size=16, num_seqs=4, max_blocks_per_seq=10_000)  # some may be very long


@pytest.fixture
def on_an_h100(monkeypatch):
    monkeypatch.setattr(_device, "gpu", lambda: _device.GPUS["H100"])


def plans_in_layers(*, q_len=None, step_options=None, **options):
    """The number of plans made inside a scan over layers, and outside: each has one argmax."""
    allocator = BlockAllocator.create(**LONG)
    slots = jnp.zeros((4,) if q_len is None else (4, q_len), jnp.int32)
    cache = KVCache.create(num_blocks=16, block_size=16, num_kv_heads=2, head_dim=64, dtype="bfloat16", num_layers=3)
    q = jnp.ones((*slots.shape, 4, 64), jnp.bfloat16)

    def layers(allocator, q, stack):
        step = AttentionStep.create(allocator, slots, **step_options or {})

        def layer(carry, i):
            stack, q = carry
            layer, out = step.attend(q, q[..., :2, :], q[..., :2, :], CacheLayer(stack, i), **options)
            return (layer.stack, out), None

        return jax.lax.scan(layer, (stack, q), jnp.arange(3))[0]

    jaxpr = jax.make_jaxpr(layers)(allocator, q, cache)
    (scan,) = (equation for equation in jaxpr.eqns if equation.primitive.name == "scan")
    inside, everything = (str(x).count(" argmax[") for x in (scan.params["jaxpr"], jaxpr))
    return inside, everything - inside


@pytest.mark.parametrize("q_len", [None, 2])
def test_one_plan_serves_all_layers(on_an_h100, q_len):
    assert plans_in_layers(q_len=q_len) == (1, 0)
    one = dict(num_kv_heads=2)
    assert plans_in_layers(q_len=q_len, step_options=one) == (0, 1)
    # A layer with a window makes its own plan; a layer with num_partitions needs none.
    assert plans_in_layers(q_len=q_len, step_options=one, sliding_window=jnp.int32(10**5))[0] == 1
    assert plans_in_layers(q_len=q_len, step_options=one, num_partitions=2)[0] == 0
    assert plans_in_layers(q_len=q_len, step_options=one | dict(num_partitions=2)) == (0, 0)


def test_the_plan_of_a_step(on_an_h100):
    allocator = dataclasses.replace(BlockAllocator.create(**LONG), lengths=jnp.asarray([100_000, 5, 700, 0]))
    slots = jnp.zeros(4, jnp.int32)

    def make_step_plan(allocator=allocator, **options):
        return AttentionStep.create(allocator, slots, **dict(num_kv_heads=2) | options).plan

    assert (make_step_plan().partitions == make_plan(allocator.lengths, num_kv_heads=2).partitions).all()
    assert make_step_plan(num_kv_heads=None) is None
    assert make_step_plan(num_partitions=3) is None
    assert make_step_plan(query_starts=jnp.arange(5)) is None
    # It is the plan of the tokens that groups do not share.
    groups = PrefixGroups(starts=jnp.asarray([0, 1]), first=jnp.asarray([0]), num_blocks=jnp.asarray([6000, 0, 0, 0]))
    rest = make_plan(jnp.asarray([4000, 5, 700, 0]), num_kv_heads=2)
    assert (make_step_plan(prefix_groups=groups).partitions == rest.partitions).all()
    assert (rest.partitions != make_step_plan().partitions).any()
    short = dataclasses.replace(allocator, block_tables=allocator.block_tables[:, :100])
    assert make_step_plan(short) is None


def test_no_plan_without_a_gpu():
    assert AttentionStep.create(BlockAllocator.create(**LONG), jnp.zeros(4, jnp.int32), num_kv_heads=2).plan is None
