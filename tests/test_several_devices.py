"""Arrays on several devices, here up to eight CPU devices: each one works on its own part, and nothing is gathered."""

import contextlib
import dataclasses
import functools
import math
import os
import socket
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpaged.linen
import jaxpaged.nnx
from jaxpaged import (
    AttentionSettings,
    AttentionStep,
    BlockAllocator,
    CacheLayer,
    KVCache,
    _device,
    paged_attention,
    rotary_frequencies,
)
from jaxpaged._attention import attend, xla
from jaxpaged._by_kernel import by_kernel
from jaxpaged.ops import (
    context_parallel_attention,
    context_parallel_slots,
    copy_blocks,
    gather_kv,
    rotate_and_write_kv,
    scatter_kv,
    write_kv,
)
from tests.cases import find_groups, make_case
from tests.compiled import collectives

POOL = P(None, None, "devices")
OVER_HEADS = P(None, "devices"), POOL, POOL, P(), P()
OVER_SEQS = P("devices"), P(), P(), P("devices"), P("devices")
SINKS = np.linspace(-2.0, 4.0, 8, dtype=np.float32)
CASE = make_case(lengths=(0, 1, 40, 80), heads=8, kv_heads=4, options={"sinks": SINKS})


def make_mesh(num_devices: int, kind: AxisType = AxisType.Explicit) -> jax.sharding.Mesh:
    return jax.make_mesh((num_devices,), ("devices",), axis_types=(kind,), devices=jax.devices()[:num_devices])


def put(arrays, specs, mesh):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]


def assert_close(ours, theirs, atol=1e-6):
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(left, right, atol=atol)


def run_alone(function, *arrays, but=()):
    """Runs a program, and asserts that `but` are its only collectives."""
    compiled = jax.jit(function).lower(*arrays).compile()
    assert collectives(compiled.as_text()) == list(but)
    return compiled(*arrays)


@pytest.fixture
def on_an_h100(monkeypatch):
    monkeypatch.setattr(_device, "gpu", lambda: _device.Gpu(132, 9.0))


def lowered(function, *arrays) -> str:
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def on_parts(function, mesh, specs, out_specs, **options):
    """Applies the function to each device's part of its arguments."""
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out_specs, **options)


@pytest.mark.parametrize(("specs", "num_devices"), [(OVER_HEADS, 2), (OVER_HEADS, 4), (OVER_SEQS, 2)])
def test_attention_on_an_explicit_mesh(specs, num_devices):
    function = functools.partial(paged_attention, return_lse=True, **CASE.options)
    found = run_alone(function, *put(CASE.arrays, specs, make_mesh(num_devices)))
    assert_close(found, function(*CASE.arrays))
    for array in found:
        assert tuple(jax.typeof(array).sharding.spec) == (*specs[0], None, None)[: array.ndim]


def test_unsharded_arguments_are_sharded():
    _, k_cache, v_cache, *_ = put(CASE.arrays, OVER_HEADS, make_mesh(2))
    tables, lengths = CASE.arrays[3:]
    expected = paged_attention(*CASE.arrays, sliding_window=4)
    for rest in ((tables, lengths), (np.asarray(tables).tolist(), np.asarray(lengths).tolist())):
        assert_close(paged_attention(CASE.q, k_cache, v_cache, *rest, sliding_window=4), expected)
    with jax.no_tracing():  # a second call compiles nothing
        paged_attention(CASE.q, k_cache, v_cache, tables, lengths, sliding_window=4)
    with pytest.raises(ValueError, match="sliding_window must be int32"):  # though 4.0 == 4
        paged_attention(CASE.q, k_cache, v_cache, tables, lengths, sliding_window=4.0)


@pytest.mark.parametrize("specs", [(P(None, "devices"), P(), P(), P(), P()), (P(), P(None, "devices"), POOL, P(), P())])
def test_other_shardings_are_refused(specs):
    with pytest.raises(ValueError, match=r"(q|k_cache) must be sharded as .* got .* jax\.sharding\.reshard"):
        paged_attention(*put(CASE.arrays, specs, make_mesh(2)), **CASE.options)


@pytest.mark.parametrize(
    ("q_spec", "pool_spec", "seqs_spec", "by_step", "by_call"),
    [
        (P(), P(), P(), True, True),
        (P("devices"), P(), P("devices"), False, False),
        (P(None, "devices"), POOL, P(), True, False),
    ],
    ids=["nothing sharded", "sequences", "heads"],
)
def test_a_plan_is_for_sequences_on_every_device(on_an_h100, q_spec, pool_spec, seqs_spec, by_step, by_call):
    """A step of sharded sequences makes none, and a call whose queries or KV heads are sharded makes its own."""
    mesh, blocks = make_mesh(2), dict(num_blocks=50_000, block_size=16)

    def shapes(spec, make):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), jax.eval_shape(make))

    allocator = shapes(P(), lambda: BlockAllocator.create(**blocks, num_seqs=4, max_blocks_per_seq=10_000))
    cache = shapes(pool_spec, lambda: KVCache.create(**blocks, num_kv_heads=4, head_dim=64, dtype="float32"))
    q, lengths = shapes(q_spec, lambda: jnp.ones((4, 8, 64))), shapes(seqs_spec, lambda: jnp.zeros(4, jnp.int32))

    def read(q, lengths, allocator, slots, cache):
        step = AttentionStep.create(dataclasses.replace(allocator, lengths=lengths), slots, num_kv_heads=4)
        step.attend(q, None, None, cache, implementation="xla")
        return step.plan

    with mock.patch.object(attend, "planned_attention", wraps=attend.planned_attention) as attention:
        plan = jax.eval_shape(read, q, lengths, allocator, shapes(P(), lambda: jnp.zeros(4, jnp.int32)), cache)
    assert (plan is not None) == by_step
    assert (attention.call_args.kwargs["plan"] is not None) == by_call


def test_prefix_groups_are_the_same_on_every_device():
    tables = CASE.block_tables.at[2:, 0].set(CASE.block_tables[2, 0])
    case = CASE.replace(block_tables=tables)
    groups = find_groups(case)
    assert groups.num_blocks.any()
    arrays = put(case.arrays, OVER_HEADS, make_mesh(2))
    ours = paged_attention(*arrays, prefix_groups=groups, **case.options)
    assert_close(ours, paged_attention(*case.arrays, **case.options))
    arrays = put(case.arrays, OVER_SEQS, make_mesh(2))
    with pytest.raises(ValueError, match=r"prefix_groups needs .* got q sharded as P\('devices', .* jax\.shard_map"):
        paged_attention(*arrays, prefix_groups=groups, **case.options)


def opaque(a, *, num_partitions):
    """Like a kernel, a function that XLA cannot partition."""
    triangle = jnp.linalg.qr(a.k_cache.reshape(-1, a.k_cache.shape[2] * a.k_cache.shape[3]), mode="r")
    return a.q * triangle.sum(), a.q[..., 0]


def test_no_cache_is_gathered_for_an_opaque_kernel(monkeypatch):
    monkeypatch.setattr(xla, "attend", opaque)
    function = functools.partial(paged_attention, implementation="xla")
    auto = make_mesh(2, AxisType.Auto)

    def found(function, mesh):
        return collectives(jax.jit(function).lower(*put(CASE.arrays, OVER_HEADS, mesh)).compile().as_text())

    assert found(function, make_mesh(2)) == []
    assert found(on_parts(function, auto, OVER_HEADS, OVER_HEADS[0]), auto) == []
    assert found(function, auto) == ["all-gather"], "this is what happens silently; the kernels refuse it"


def test_kernels_are_lowered_for_each_device(on_an_h100):
    arrays = make_case(lengths=(3, 50), max_blocks=4, dtype=jnp.bfloat16).arrays
    auto = make_mesh(2, AxisType.Auto)
    explicit, partitioned = put(arrays, OVER_HEADS, make_mesh(2)), put(arrays, OVER_HEADS, auto)
    named = functools.partial(paged_attention, implementation="mosaic_gpu")
    for function, inputs in (
        (named, explicit),
        *((on_parts(named, auto, OVER_HEADS, OVER_HEADS[0], check_vma=check), partitioned) for check in (True, False)),
        (named, jax.device_put(arrays, jax.devices()[1])),
    ):
        text = lowered(function, *inputs)
        assert "mosaic_gpu_v2" in text
        assert "all_gather" not in text
    with jax.set_mesh(auto):
        assert "mosaic_gpu_v2" in lowered(jax.sharding.explicit_axes(named, in_sharding=OVER_HEADS), *partitioned)
    with pytest.raises(NotImplementedError, match=r"gather the whole cache.*explicit mesh.*jax\.shard_map"):
        lowered(paged_attention, *partitioned)
    assert "mosaic_gpu_v2" not in lowered(functools.partial(paged_attention, implementation="xla"), *partitioned)


def test_the_platform_of_the_call_decides(on_an_h100):
    arrays = make_case(lengths=(3, 50), max_blocks=4, dtype=jnp.bfloat16).arrays
    starts = jnp.array([0, 1, 2])
    for options in ({}, {"query_starts": starts}):
        ours, theirs = (paged_attention(*arrays, implementation=name, **options) for name in (None, "xla"))
        np.testing.assert_array_equal(ours, theirs)
        with pytest.raises(NotImplementedError, match="lowered for another platform"):
            paged_attention(*arrays, implementation="mosaic_gpu", **options)


def new_cache(**options) -> KVCache:
    return KVCache.create(num_blocks=8, block_size=16, head_dim=8, **dict(num_kv_heads=4, dtype="float32") | options)


def sharded(cache: KVCache, mesh, axis: int = 2) -> KVCache:
    spec = P(*[None] * axis, "devices")
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), cache)


def test_every_function_of_a_cache_on_an_explicit_mesh():
    ids, others, tables, lengths = jnp.array([1, 2]), jnp.array([3, 4]), jnp.array([[1, 2], [2, 0]]), jnp.array([20, 3])
    x, slots = jax.random.normal(jax.random.key(0), (5, 4, 8)), jnp.array([16, 17, 40, 41, 99999])

    def step(cache):
        cache, q = rotate_and_write_kv(cache, x, x, 2 * x, slots, slots, rotary_frequencies(8))
        contiguous = gather_kv(cache, tables, lengths)
        copied = copy_blocks(cache, ids, others)
        written = scatter_kv(copied, contiguous, tables + 4, lengths)
        return cache, q, contiguous, copied, written

    cache = new_cache(dtype="int8")
    assert_close(run_alone(step, sharded(cache, make_mesh(4))), jax.jit(step)(cache), atol=0)


def test_a_layer_of_a_stack_on_an_explicit_mesh():
    x = jax.random.normal(jax.random.key(0), (2, 4, 8))

    def step(stack, allocator):
        allocator, slots, _ = allocator.append(jnp.ones(2, jnp.int32))
        layer, out = AttentionStep.create(allocator, slots).attend(x, x, x, CacheLayer(stack, 1))
        return layer.stack, out

    allocator = BlockAllocator.create(num_blocks=8, block_size=16, num_seqs=2, max_blocks_per_seq=2)
    stack = new_cache(num_layers=3)
    found = run_alone(step, sharded(stack, make_mesh(2), axis=3), allocator)
    assert_close(found, jax.jit(step)(stack, allocator), atol=0)


def test_the_kernel_copies_blocks_if_each_device_has_its_part(on_an_h100):
    cache = KVCache.create(num_blocks=8, block_size=16, num_kv_heads=4, head_dim=128, dtype=jnp.bfloat16)
    ids = jnp.array([1, 2]), jnp.array([3, 4])
    specs = POOL, P(), P()
    auto = make_mesh(2, AxisType.Auto)
    partitioned = sharded(cache, auto)
    for function, pool in (
        (copy_blocks, sharded(cache, make_mesh(2))),
        (copy_blocks, jax.device_put(cache, jax.devices()[1])),
        *((on_parts(copy_blocks, auto, specs, POOL, check_vma=check), partitioned) for check in (True, False)),
    ):
        assert "mosaic_gpu_v2" in lowered(function, pool, *ids)
    assert "mosaic_gpu_v2" not in lowered(copy_blocks, partitioned, *ids)


INT8 = dict(q_len=2, cache_dtype=jnp.int8, scale_shape="head")


def heads_by_tokens(shape) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, ("heads", "tokens"), devices=jax.devices()[: math.prod(shape)])


@pytest.mark.parametrize(
    ("shape", "changes"),
    [((1, 2), {}), ((1, 4), {}), ((1, 2), INT8), ((1, 4), dict(q_len=151)), ((2, 4), INT8), ((4, 2), {})],
    ids=str,
)
def test_context_parallel_attention(shape, changes):
    """Each device attends only to its own tokens: pools, and rows before the start of a sequence, are poisoned. Prompts
    begin and end anywhere in a block."""
    lengths, heads = (0, 1, 63, 64, 200, 130), dict(heads=8, kv_heads=4, options={"sinks": SINKS})
    case = make_case(lengths=lengths, max_blocks=4, block_size=64, **heads, **changes)
    if q_len := changes.get("q_len"):
        exists = case.lengths[:, None] + jnp.arange(-q_len, 0)[None] >= 0
        case = case.replace(q=jnp.where(exists[..., None, None], case.q, jnp.nan))

    def attend(options, *arrays):
        return context_parallel_attention(*arrays, axis_name="tokens", **options)

    over_heads, pool = P(*[None] * (case.q.ndim - 2), "heads"), P(None, "tokens", "heads")
    specs = dict.fromkeys(case.options, P("heads")), over_heads, pool, pool, P(), P()
    mesh = heads_by_tokens(shape)
    options = {name: jax.device_put(x, NamedSharding(mesh, P("heads"))) for name, x in case.options.items()}
    arrays = put(case.arrays, specs[1:], mesh)
    sums = ["all-reduce"] * (2 if q_len else 1)
    ours = run_alone(on_parts(attend, mesh, specs, over_heads, check_vma=False), options, *arrays, but=sums)
    assert_close(ours, paged_attention(*case.arrays, **case.options, return_lse=True), atol=2e-6)


def test_gradients_of_context_parallel_attention():
    case, mesh, pool = make_case(lengths=(1, 130), block_size=64), heads_by_tokens((1, 4)), P(None, "tokens")
    arrays, rest = [jnp.nan_to_num(x) for x in case.arrays[:3]], case.arrays[3:]

    def gradients(attend, *arrays):
        def loss(*arrays):
            out = attend(*arrays)
            return jnp.vdot(out, jnp.arange(out.size, dtype=out.dtype) / out.size)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)

    def over_tokens(*arrays):
        return context_parallel_attention(*arrays, *rest, axis_name="tokens")[0]

    specs = P(), pool, pool
    ours = gradients(on_parts(over_tokens, mesh, specs, P(), check_vma=False), *put(arrays, specs, mesh))
    theirs = gradients(lambda *arrays: paged_attention(*arrays, *rest), *arrays)
    assert all(jnp.abs(x).max() > 0.01 for x in theirs)
    assert_close(ours, theirs, atol=2e-6)


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
def test_steps_with_heads_over_one_axis_and_tokens_over_another(shape):
    """Two prompts that write and attend, against one device."""
    mesh, sizes = heads_by_tokens(shape), dict(num_blocks=12, block_size=32)

    def step(cache, allocator, q, k, v, num_new, slots_of, attend):
        allocator, slots, _ = allocator.append(num_new, q_len=40)
        cache = write_kv(cache, k, v, slots_of(slots))
        scales = dict(k_scale=cache.k_scale, v_scale=cache.v_scale)
        out, _ = attend(q, cache.k, cache.v, allocator.block_tables, allocator.lengths, **scales)
        return cache, allocator, out

    attend = functools.partial(paged_attention, return_lse=True)
    on_one = jax.jit(functools.partial(step, slots_of=lambda slots: slots, attend=attend))
    slots_of = functools.partial(context_parallel_slots, block_size=32 // shape[1], axis_name="tokens")
    attend = functools.partial(context_parallel_attention, axis_name="tokens")
    pool, over_heads = P(None, "tokens", "heads"), P(None, None, "heads")
    specs = dict(
        in_specs=(pool, P(), *[over_heads] * 3, P()), out_specs=(pool, P(), over_heads), mesh=mesh, check_vma=False
    )
    on_several = jax.jit(jax.shard_map(functools.partial(step, slots_of=slots_of, attend=attend), **specs))

    cache = KVCache.create(**sizes, num_kv_heads=4, head_dim=8, dtype="int8")  # with scales of tokens and heads
    theirs = cache, BlockAllocator.create(**sizes, num_seqs=3, max_blocks_per_seq=3)
    ours = jax.device_put(theirs, (NamedSharding(mesh, pool), NamedSharding(mesh, P())))
    for seed, num_new in enumerate([[40, 7, 1], [3, 40, 0]]):
        q, k, v = (jax.random.normal(jax.random.key(seed), (3, 40, heads, 8)) for heads in (8, 4, 4))
        inputs = q, k, v, jnp.array(num_new)
        *theirs, expected = on_one(*theirs, *inputs)
        *ours, out = on_several(*ours, *put(inputs, specs["in_specs"][2:], mesh))
        assert_close(out, expected)
        assert_close(ours, theirs, atol=0)


def test_context_parallel_slots_and_a_token_of_another_device():
    slots = np.arange(-3, 8 * 64 + 5)
    place = on_parts(
        lambda: context_parallel_slots(slots, block_size=16, axis_name="devices")[None],
        make_mesh(4),
        (),
        P("devices"),
        check_vma=False,
    )
    for device, own in enumerate(np.asarray(place())):
        for slot, place in zip(slots, own, strict=True):
            block, offset = divmod(slot, 64)
            assert place == (block * 16 + offset % 16 if offset // 16 == device and slot >= 0 else -1)


def test_two_processes():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "-m", "tests.two_processes", port]
    with subprocess.Popen([*command, "1"], env=environment) as second:
        try:
            subprocess.run([*command, "0"], env=environment, check=True, timeout=100)
        except Exception:
            second.kill()
            raise
    assert second.returncode == 0


def test_one_kv_head_on_a_mesh_of_one_device():
    mesh = jax.make_mesh((1,), ("devices",))
    cache = KVCache.create(num_blocks=2, block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
    k, slots = jnp.ones((2, 1, 8), cache.k.dtype), jnp.array([4, 5])
    put = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((cache, POOL), (k, P(None, "devices")))]
    assert (write_kv(put[0], put[1], put[1], slots).k == write_kv(cache, k, k, slots).k).all()


def test_a_kernel_is_called_without_jit():
    with jax.disable_jit():
        assert by_kernel(lambda x: x + 1, lambda x: x + 2, jnp.float32(3)) == 5


def settings(heads_axis, num_kv_heads=4):
    return AttentionSettings(
        num_heads=8,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        rotary_frequencies=rotary_frequencies(8),
        fused=False,
        heads_axis=heads_axis,
        use_bias=True,
        use_output_bias=True,
        norm_epsilon=1e-3,
        use_sinks=True,
        use_gate=True,
    )


FEATURES = 16
TO_HEADS = {"kernel": P(None, "devices"), "bias": P("devices")}
PARAMETERS = {
    **dict.fromkeys(["q_proj", "k_proj", "v_proj", "gate_proj"], TO_HEADS),
    "o_proj": {"kernel": P("devices", None), "bias": P()},
    "q_norm": {"scale": P()},
    "k_norm": {"scale": P()},
    "sinks": P("devices"),
}


def module_inputs():
    allocator = BlockAllocator.create(num_blocks=8, block_size=16, num_seqs=2, max_blocks_per_seq=2)
    allocator, slots, _ = allocator.append(jnp.array([3, 1]), q_len=3)
    return jax.random.normal(jax.random.key(0), (2, 3, FEATURES)), new_cache(), AttentionStep.create(allocator, slots)


@jax.jit
def noisy(weights):
    """Biases that are not zero, and scales that are not one."""
    return jax.tree.map(lambda x: x + jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), weights)


def nnx_module(mesh, **sizes):
    """`call(weights, ...)`, the weights, and their sharding metadata; on one device without a mesh."""
    axis = None if mesh is None else "devices"

    def make():
        return nnx.split(jaxpaged.nnx.PagedAttention(FEATURES, settings(axis, **sizes), rngs=nnx.Rngs(0)))

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        graph, weights = jax.jit(make)()
    specs = nnx.to_pure_dict(nnx.get_partition_spec(weights))
    return lambda weights, *inputs: nnx.merge(graph, weights)(*inputs), weights, specs


def linen_module(mesh):
    module = jaxpaged.linen.PagedAttention(settings(None if mesh is None else "devices"))
    initialise = functools.partial(module.init, jax.random.key(0), *module_inputs())
    boxed = jax.eval_shape(initialise)
    shardings = None if mesh is None else linen.get_sharding(boxed, mesh)
    return module.apply, jax.jit(initialise, out_shardings=shardings)(), linen.get_partition_spec(boxed)["params"]


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
@pytest.mark.parametrize("make", [nnx_module, linen_module])
def test_a_module_over_heads(make, kind):
    x, cache, *rest = module_inputs()
    call, weights, _ = make(None)
    expected_cache, expected = jax.jit(call)(noisy(weights), x, cache, *rest)

    mesh = make_mesh(2, kind)
    call, weights, specs = make(mesh)
    assert specs == PARAMETERS
    for weight, spec in zip(jax.tree.leaves(weights), jax.tree.leaves(specs), strict=True):
        assert weight.sharding.is_equivalent_to(NamedSharding(mesh, spec), weight.ndim)
    cache, out = run_alone(call, noisy(weights), x, sharded(cache, mesh), *rest, but=["all-reduce"])
    assert_close((cache, out), (expected_cache, expected), atol=1e-5)
    for array in jax.tree.leaves(cache):
        assert array.sharding.shard_shape(array.shape)[2] == 2


def test_a_module_with_fewer_kv_heads_than_devices():
    x, cache, step = module_inputs()
    call, weights, _ = nnx_module(None)
    weights = noisy(weights)
    expected_cache, expected = jax.jit(call)(weights, x, cache, step)

    mesh = make_mesh(8)
    call, like, _ = nnx_module(mesh)
    with pytest.raises(ValueError, match=r"The 8 devices of heads_axis must .* num_kv_heads=4.* pass num_kv_heads=8 "):
        call(like, x, cache, step)
    call, like, _ = nnx_module(mesh, num_kv_heads=8)

    whole = dict(nnx.to_flat_state(weights))

    def repeat(path, shards):
        weight = whole[path][...]
        if path[0] in ("k_proj", "v_proj"):
            weight = jnp.repeat(weight.reshape(-1, 4, 8), 2, axis=1).reshape(shards.shape)
        return shards.replace(jax.device_put(weight, shards[...].sharding))

    weights = nnx.map_state(repeat, like)
    cache = sharded(new_cache(num_kv_heads=8), mesh)
    cache, out = run_alone(call, weights, x, cache, step, but=["all-reduce"])
    assert_close(out, expected, atol=1e-5)
    assert_close(np.asarray(cache.k), np.repeat(expected_cache.k, 2, axis=2), atol=1e-5)


def test_heads_of_a_module_by_a_logical_axis_name():
    with nnx.logical_axis_rules([("heads", "devices")]), jax.set_mesh(make_mesh(2)):
        module = jaxpaged.nnx.PagedAttention(FEATURES, settings("heads"), rngs=nnx.Rngs(0))
        assert nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(module))) == PARAMETERS
