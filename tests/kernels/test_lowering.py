"""The decode kernel lowers for Hopper on a machine without a GPU: catches what interpret mode alone would let pass."""

import jax.numpy as jnp
import pytest

from tests.kernels.lowering import OPTIONS, mosaic_for, traced_decode

pytestmark = pytest.mark.slow


def lower(**shape):
    trace, _ = traced_decode(**shape)
    with mosaic_for(9.0):
        assert trace.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == 1


# A block's size sets the copies of a tile, head_dim its products: all of both, and the extremes of both meet.
HEADS_OF_BLOCKS = {8: (32, 192, 256), 16: (64, 112), 32: (96, 120), 64: (80,), 128: (128,), 256: (32, 256)}


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(head_dim, size) for size, heads in HEADS_OF_BLOCKS.items() for head_dim in heads]
)
def test_heads_and_blocks(head_dim, block_size):
    lower(head_dim=head_dim, block_size=block_size)


@pytest.mark.parametrize(
    ("group", "q_len", "dtype"),
    [(group, q_len, jnp.bfloat16) for group, q_len in ((1, 1), (3, 1), (33, 1), (64, 1), (7, 9), (1, 33))]
    + [(64, 1, jnp.float16), (4, 16, jnp.float16)],
)
def test_groups_and_dtypes(group, q_len, dtype):
    lower(group=group, q_len=q_len, dtype=dtype)


@pytest.mark.parametrize(("head_dim", "num_partitions"), [(64, 8), (120, 16), (256, 3)])
def test_partitions(head_dim, num_partitions):
    lower(head_dim=head_dim, num_partitions=num_partitions)


@pytest.mark.parametrize("options", [("sinks",), ("tree_bits",), OPTIONS])
def test_a_plan(options):
    lower(total_partitions=5, options=options)


@pytest.mark.parametrize("head_dim", [8, 40, 72, 168])
def test_heads_of_other_models(head_dim):
    lower(head_dim=head_dim)


@pytest.mark.parametrize("option", [*OPTIONS, "tree_bits"])
def test_each_option_alone(option):
    lower(options=(option,))
