"""The rules that choose a configuration: pure functions of ints."""

import dataclasses
import itertools
import math
import re

import jax.numpy as jnp
import pytest

from pallas_kernels.common.interface import PARTIAL_BYTES, Shapes
from pallas_kernels.decode import config as decode_config
from pallas_kernels.decode.refs import scratch
from pallas_kernels.prefill import config as prefill_config

DTYPES = dict(q_dtype=jnp.bfloat16, cache_dtype=jnp.bfloat16)
SHAPES = Shapes(group=4, head_dim=128, value_dim=128, block_size=16, **DTYPES)
SCALES = (jnp.zeros((1, 16, 1)),) * 2  # a scale a token and head
CALL = dict(pairs=64, capacity=8192, num_sms=108, compute_capability=8.0)


def count_bytes(ref):
    if hasattr(ref, "num_barriers"):
        return 8 * math.prod(ref.num_barriers)
    return -(-math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize // 1024) * 1024


@pytest.mark.parametrize(("compute_capability", "smem"), [(8.0, 163), (8.6, 99), (8.9, 99), (9.0, 227), (12.0, 99)])
def test_the_decode_kernel_fits_every_gpu(compute_capability, smem):
    for head_dim, (group, q_len), dtype in itertools.product(
        (32, 64, 120, 128, 192, 256), ((1, 1), (4, 1), (16, 4), (24, 1), (64, 1)), (jnp.int8, jnp.bfloat16)
    ):
        changes = dict(head_dim=head_dim, value_dim=head_dim, group=group, q_len=q_len, cache_dtype=dtype)
        shapes = dataclasses.replace(SHAPES, **changes)
        if smem == 99 and head_dim == 256 and q_len * group == 64:
            continue  # not taken
        config = decode_config.default_config(shapes, **CALL | dict(compute_capability=compute_capability))
        num_bytes = sum(map(count_bytes, scratch(config, shapes, SCALES).values()))
        assert num_bytes + 2048 <= smem * 1024  # and Mosaic's reductions
        barriers = 8 * 2 * config.num_stages if config.copies == "tma" else 0
        assert num_bytes - barriers == decode_config.smem_bytes(shapes, config.num_stages)


@pytest.mark.parametrize(("compute_capability", "smem"), [(8.0, 163), (8.9, 99), (9.0, 227), (12.0, 99)])
def test_latents_fit_every_gpu(compute_capability, smem):
    for width, group, dtype in itertools.product((576, 320, 640), (16, 20, 32, 128), (jnp.int8, jnp.bfloat16)):
        changes = dict(head_dim=width, value_dim=width - 64, is_latent=True, group=group, cache_dtype=dtype)
        shapes = dataclasses.replace(SHAPES, **changes)
        how = dict(compute_capability=compute_capability, pairs=8)
        config = decode_config.default_config(shapes, **CALL | how)
        arrays = scratch(config, dataclasses.replace(shapes, group=group // config.head_parts), SCALES)
        assert sum(map(count_bytes, arrays.values())) + 2048 <= smem * 1024
        assert group % config.head_parts == 0
        assert group // config.head_parts * (width - 64) <= decode_config.MOST_SUMS
        assert config.num_partitions * 8 * config.head_parts <= 2 * CALL["num_sms"]


def test_partitions_of_the_decode_kernel():
    """All its programs run at once, if one a sequence and KV head does; none is without a tile; who asks gets them."""

    def count(seqs=8, **changes):
        return decode_config.default_config(SHAPES, **CALL | dict(pairs=seqs * 8) | changes).num_partitions

    for seqs, capacity in itertools.product((1, 4, 8, 27, 64, 1000), (64, 300, 8192, 131072)):
        partitions = count(seqs=seqs, capacity=capacity)
        assert 1 <= partitions <= -(-capacity // decode_config.TILE)
        assert partitions == 1 or seqs * 8 * partitions <= 4 * CALL["num_sms"]
        assert count(seqs=2 * seqs, capacity=capacity) <= partitions <= count(seqs=seqs, capacity=2 * capacity)
        assert count(seqs=seqs, capacity=capacity, window=128) <= partitions
    assert count(seqs=1) > count(seqs=64) == 1
    assert count(window=128) < count()
    assert count(num_partitions=7) == 7
    assert count(capacity=300, num_partitions=256) == 5


@pytest.mark.parametrize(("compute_capability", "rows"), [(8.0, 64), (8.9, 48)])
def test_rows_that_the_decode_kernel_has_room_for(compute_capability, rows):
    shapes = dataclasses.replace(SHAPES, head_dim=256, value_dim=256)
    assert decode_config.most_rows(shapes, compute_capability) == rows


@pytest.mark.parametrize(
    ("compute_capability", "changes", "message"),
    [
        (7.5, dict(), "compute_capability=7.5"),
        (9.0, dict(q_dtype=jnp.float32), "float32"),
        (9.0, dict(cache_dtype=jnp.float16), "cache_dtype=.*float16"),
        (8.0, dict(cache_dtype=jnp.float8_e4m3fn), "from compute capability 8.9"),
        (9.0, dict(head_dim=20), "head_dim=20"),
        (9.0, dict(value_dim=20), "value_dim=20"),
        (9.0, dict(head_dim=72, cache_dtype=jnp.int8), "head_dim=72"),
        (9.0, dict(block_size=48), "block_size=48"),
        (9.0, dict(group=65, q_len=1), "group=65"),
        (8.9, dict(group=64, q_len=1, head_dim=256, value_dim=256), "needs 106496"),
    ],
)
def test_what_the_decode_kernel_does_not_take(compute_capability, changes, message):
    supported = dataclasses.replace(SHAPES, q_len=16)
    assert not list(decode_config.shape_limits(supported, 9.0))
    limits = decode_config.shape_limits(dataclasses.replace(supported, **changes), compute_capability)
    assert re.search(message, next(limits))


@pytest.mark.parametrize("head_dim", [64, 120, 128, 192, 256])
def test_partials_that_nobody_asked_for_take_little_memory(head_dim):
    for (group, q_len), seqs, capacity in itertools.product(
        ((4, 1), (33, 1), (64, 1), (4, 16)), (1, 4, 9, 33, 132, 264, 1024), (512, 8192, 131072)
    ):
        changes = dict(head_dim=head_dim, value_dim=head_dim, group=group, q_len=q_len)
        shapes, pairs = dataclasses.replace(SHAPES, **changes), 8 * seqs
        how = dict(pairs=pairs, capacity=capacity, num_sms=132, compute_capability=9.0)
        num_partitions = decode_config.default_config(shapes, **how).num_partitions
        if num_partitions > 1:
            assert pairs * num_partitions * shapes.partial_size * 4 <= PARTIAL_BYTES


def test_parts_of_the_prefill_kernel():
    """No more than there are SMs for; fewer for more items, wider heads and shorter sequences."""

    def count(num_items=8, visible=8192, head_dim=128):
        return prefill_config.default_parts(num_items=num_items, visible=visible, head_dim=head_dim, num_sms=132)

    for num_items, visible, head_dim in itertools.product((1, 8, 33, 64, 500), (64, 512, 8192, 131072), (64, 128)):
        parts = count(num_items, visible, head_dim)
        assert parts == 1 or num_items * parts <= 132
        assert 1 <= count(2 * num_items, visible, head_dim) <= parts <= count(num_items, 2 * visible, head_dim)
        assert count(num_items, visible, 2 * head_dim) <= parts
    assert count(num_items=8) > count(num_items=64) > count(num_items=128) == 1
