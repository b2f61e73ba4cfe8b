"""The kernels lower for a Hopper GPU on a machine without one: catches what interpret mode alone would let pass."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import decode_config, paged_decode, partition_plan

OPTIONS = ("sliding_window", "logits_soft_cap", "alibi_slopes", "sinks")


def traced(
    *,
    seqs=2,
    kv_heads=2,
    capacity=1024,
    head_dim=128,
    block_size=16,
    group=4,
    q_len=1,
    dtype=jnp.bfloat16,
    num_partitions=1,
    options=(),
    cache_dtype=None,
    scales=(None, None),
    sharding=None,
):
    """The traced call, for an H100, and its configuration."""
    max_blocks = capacity // block_size
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    cache = shape((64, block_size, kv_heads, head_dim), cache_dtype or dtype)
    config = decode_config.default_config(
        seqs=seqs,
        kv_heads=kv_heads,
        group=group,
        q_len=q_len,
        head_dim=head_dim,
        capacity=capacity,
        num_sms=132,
        num_partitions=num_partitions,
        itemsize=cache.dtype.itemsize,
        token_scales=scales.count("token_head"),
    )
    scale_shapes = {"tensor": (), "head": (kv_heads,), "token_head": cache.shape[:3]}
    types = {
        "scale": shape((), jnp.float32),
        "sliding_window": shape((), jnp.int32),
        "logits_soft_cap": shape((), jnp.float32),
        "alibi_slopes": shape((kv_heads * group,), jnp.float32),
        "sinks": shape((kv_heads * group,), jnp.float32),
    }

    @jax.jit
    def launch(*arrays, **named):
        plan, total = None, config.total_partitions
        if total is not None:
            plan = partition_plan.make(arrays[-1], named.get("sliding_window"), q_len=q_len, total_partitions=total)
        return paged_decode.launch(*arrays, **named, plan=plan, config=config)

    q = shape((seqs, q_len, kv_heads * group, head_dim), dtype)
    arrays = q, cache, cache, shape((seqs, max_blocks), jnp.int32), shape((seqs,), jnp.int32)
    named = {name: types[name] for name in ("scale", *options)}
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        if scale is not None:
            named[name] = shape(scale_shapes[scale], jnp.float32)
    return launch.trace(*arrays, **named), config


def lower(**shape):
    trace, config = traced(**shape)
    text = trace.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == (1 if config.num_partials == 1 else 2)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 112, 120, 128, 192, 256])
def test_heads_and_blocks(head_dim, block_size):
    lower(head_dim=head_dim, block_size=block_size)


@pytest.mark.parametrize("num_partitions", [1, 3, "balanced"])
@pytest.mark.parametrize("head_dim", [32, 40, 80, 96, 112, 120, 144, 160, 168, 192, 224, 240, 256])
def test_many_rows(head_dim, num_partitions):
    lower(head_dim=head_dim, q_len=16, num_partitions=num_partitions)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 12, 16, 32, 64])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_groups_and_dtypes(group, dtype):
    lower(group=group, dtype=dtype)


@pytest.mark.parametrize("head_dim", [64, 96, 120, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("num_partitions", [8, 11, 16])
def test_partitions(head_dim, group, num_partitions):
    lower(head_dim=head_dim, group=group, num_partitions=num_partitions)


@pytest.mark.parametrize(("q_len", "group", "num_partitions"), [(1, 4, 2), (1, 4, 9), (2, 1, 5), (2, 2, 3), (3, 6, 2)])
def test_clusters(q_len, group, num_partitions):
    lower(q_len=q_len, group=group, num_partitions=num_partitions)


def test_clusters_that_take_the_most():
    """226 KiB of shared memory."""
    lower(seqs=1, kv_heads=8, capacity=8192, head_dim=64, q_len=8, group=5, num_partitions=7)


@pytest.mark.parametrize(("seqs", "options"), [(4, ()), (64, OPTIONS)])
def test_two_programs_a_sm(seqs, options):
    lower(seqs=seqs, kv_heads=8, capacity=8192, num_partitions=None, options=options)


@pytest.mark.parametrize("head_dim", [8, 40, 72, 168])
def test_heads_of_other_models(head_dim):
    lower(head_dim=head_dim)


@pytest.mark.parametrize("num_partitions", [1, 3, "balanced"])
@pytest.mark.parametrize("q_len", [1, 2, 16])
def test_options(q_len, num_partitions):
    lower(q_len=q_len, num_partitions=num_partitions, options=OPTIONS)


@pytest.mark.parametrize(("head_dim", "q_len"), [(64, 16), (120, 16), (192, 16), (256, 16)])
def test_many_runs_of_prompts(head_dim, q_len):
    lower(seqs=4096, kv_heads=8, q_len=q_len, head_dim=head_dim, num_partitions=None)


@pytest.mark.parametrize(("group", "waits"), [(4, 1), (32, 0)])
def test_values_are_freed_once_their_product_is_done(group, waits):
    """With the next tile's keys under way. Interpret mode does a product at once and would not miss this wait."""
    trace, config = traced(group=group)
    assert config.keys_ahead == bool(waits)
    assert str(trace.jaxpr).count("wgmma_wait[n=1]") == 2 * waits  # in the loop over whole tiles, and over others


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_alone(option):
    lower(options=(option,))


NARROW = (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)
TOKEN_HEAD = ("token_head", "token_head")


@pytest.mark.parametrize("scales", [(None, None), ("tensor", "head"), TOKEN_HEAD, ("head", "token_head")])
@pytest.mark.parametrize("cache_dtype", NARROW)
def test_narrow_caches(cache_dtype, scales):
    lower(cache_dtype=cache_dtype, scales=scales)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 112, 160, 192, 256])
def test_narrow_heads(head_dim):
    lower(head_dim=head_dim, dtype=jnp.float16, cache_dtype=jnp.float8_e4m3fn, scales=TOKEN_HEAD)


@pytest.mark.parametrize("block_size", [8, 64, 256])
def test_narrow_blocks(block_size):
    lower(block_size=block_size, cache_dtype=jnp.float8_e4m3fn, scales=TOKEN_HEAD)


@pytest.mark.parametrize(
    ("group", "head_dim"), [(1, 64), (5, 128), (16, 128), (64, 80), (64, 96), (64, 192), (64, 256)]
)
def test_narrow_groups(group, head_dim):
    lower(group=group, head_dim=head_dim, cache_dtype=jnp.int8, scales=("head", "head"), num_partitions=8)


@pytest.mark.parametrize(("head_dim", "q_len"), [(64, 16), (128, 16), (192, 16), (256, 16)])
def test_narrow_runs_of_prompts(head_dim, q_len):
    lower(seqs=512, q_len=q_len, head_dim=head_dim, num_partitions=None, cache_dtype=jnp.int8, scales=TOKEN_HEAD)


@pytest.mark.parametrize("num_partitions", [1, 8])
@pytest.mark.parametrize("group", [1, 12, 16, 32])
def test_narrow_rings_fit(group, num_partitions):
    lower(group=group, cache_dtype=jnp.int8, scales=TOKEN_HEAD, num_partitions=num_partitions)


@pytest.mark.parametrize("q_len", [1, 4])
def test_narrow_options(q_len):
    lower(q_len=q_len, num_partitions=3, options=OPTIONS, cache_dtype=jnp.int8, scales=TOKEN_HEAD)
