"""The kernels lower for a Hopper GPU on a machine without one: catches what interpret mode alone would let pass."""

import itertools

import jax.numpy as jnp
import pytest

from tests.kernels.lowering import OPTIONS, traced

pytestmark = pytest.mark.slow


def lower(**shape):
    trace, _ = traced(**shape)
    assert trace.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == 1


# A block's size sets the copies of a tile, head_dim its products: each meets two or more of the other, and the extremes
# of both meet.
HEADS_OF_BLOCKS = {
    8: (32, 96, 192, 256),
    16: (64, 112, 128),
    32: (64, 96, 120),
    64: (80, 112, 192),
    128: (80, 128),
    256: (32, 120, 256),
}


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(head_dim, size) for size, heads in HEADS_OF_BLOCKS.items() for head_dim in heads]
)
def test_heads_and_blocks(head_dim, block_size):
    lower(head_dim=head_dim, block_size=block_size)


FEW_PARTITIONS = 1, 2, 3
ROWS_OF_HEADS = 32, 40, 80, 96, 112, 120, 144, 160, 168, 192, 224, 240, 256


@pytest.mark.parametrize(
    ("head_dim", "num_partitions", "options"),
    # In turns, and at the ends each number of partitions.
    [(head_dim, FEW_PARTITIONS[i % 3], OPTIONS * (i % 2)) for i, head_dim in enumerate(ROWS_OF_HEADS)]
    + [(32, 3, ()), (32, 2, OPTIONS), (256, 3, OPTIONS), (256, 2, ())],
)
def test_many_rows(head_dim, num_partitions, options):
    lower(head_dim=head_dim, q_len=16, num_partitions=num_partitions, options=options)


@pytest.mark.parametrize(
    ("group", "dtype"),
    [(group, jnp.bfloat16) for group in (1, 2, 3, 5, 7, 8, 12, 16, 32, 64)]
    + [(group, jnp.float16) for group in (1, 64)],  # as many rows of the products; the type is theirs
)
def test_groups_and_dtypes(group, dtype):
    lower(group=group, dtype=dtype)


PARTITIONS = 8, 11, 16


@pytest.mark.parametrize(
    ("head_dim", "group", "num_partitions"),
    [  # every pair of values of any two, and what takes the most shared memory
        (head_dim, group, PARTITIONS[(i + j) % 3])
        for i, head_dim in enumerate((64, 96, 120, 128, 256))
        for j, group in enumerate((1, 4, 16))
    ]
    + [(256, 16, 16)],
)
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


@pytest.mark.parametrize("num_partitions", FEW_PARTITIONS)
@pytest.mark.parametrize("q_len", [1, 2])
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


NARROW_HEADS = 32, 64, 80, 96, 112, 160, 192, 256


@pytest.mark.parametrize(
    ("cache_dtype", "scales", "dtype", "head_dim", "block_size"),
    [  # each dtype with each kind of scales; in turns the rest
        (
            cache_dtype,
            scales,
            (jnp.bfloat16, jnp.float16)[i % 2],
            NARROW_HEADS[i % 8],
            (16, 8, 64, 256)[(i + i // 4) % 4],
        )
        for i, (cache_dtype, scales) in enumerate(
            itertools.product(NARROW, [(None, None), ("tensor", "head"), TOKEN_HEAD, ("head", "token_head")])
        )
    ],
)
def test_narrow_caches(cache_dtype, scales, dtype, head_dim, block_size):
    lower(cache_dtype=cache_dtype, scales=scales, dtype=dtype, head_dim=head_dim, block_size=block_size)


@pytest.mark.parametrize("block_size", [8, 256])
@pytest.mark.parametrize("head_dim", [32, 256])
def test_narrow_heads_and_blocks(head_dim, block_size):
    lower(head_dim=head_dim, block_size=block_size, cache_dtype=jnp.float8_e4m3fn, scales=TOKEN_HEAD)


@pytest.mark.parametrize(
    ("group", "head_dim"), [(1, 64), (5, 128), (16, 128), (64, 80), (64, 96), (64, 192), (64, 256)]
)
def test_narrow_groups(group, head_dim):
    lower(group=group, head_dim=head_dim, cache_dtype=jnp.int8, scales=("head", "head"), num_partitions=8)


@pytest.mark.parametrize(("head_dim", "q_len"), [(64, 16), (128, 16), (192, 16), (256, 16)])
def test_narrow_runs_of_prompts(head_dim, q_len):
    lower(seqs=512, q_len=q_len, head_dim=head_dim, num_partitions=None, cache_dtype=jnp.int8, scales=TOKEN_HEAD)


@pytest.mark.parametrize(("group", "num_partitions"), [(1, 8), (12, 1), (16, 8), (32, 1), (32, 8)])
def test_narrow_rings_fit(group, num_partitions):
    lower(group=group, cache_dtype=jnp.int8, scales=TOKEN_HEAD, num_partitions=num_partitions)


@pytest.mark.parametrize("q_len", [1, 4])
def test_narrow_options(q_len):
    lower(q_len=q_len, num_partitions=3, options=OPTIONS, cache_dtype=jnp.int8, scales=TOKEN_HEAD)
