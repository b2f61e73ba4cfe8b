"""The rules that choose a configuration: pure functions of ints."""

import functools
import itertools
import math
import re

import jax.numpy as jnp
import pytest

from jaxpaged._attention.plan import PARTIAL_BYTES
from pallas_kernels.decode import config as decode_config
from pallas_kernels.decode.refs import scratch
from pallas_kernels.prefill import config as prefill_config

SUPPORTED = dict(
    head_dim=128,
    block_size=16,
    group=4,
    q_len=16,
    q_dtype=jnp.bfloat16,
    cache_dtype=jnp.bfloat16,
    compute_capability=9.0,
)


def count_bytes(ref):
    if hasattr(ref, "num_barriers"):
        return 8 * math.prod(ref.num_barriers)
    return -(-math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize // 1024) * 1024


SHAPE = dict(seqs=8, kv_heads=8, group=4, q_len=1, head_dim=128, capacity=8192, num_sms=108, compute_capability=8.0)


@pytest.mark.parametrize(("compute_capability", "smem"), [(8.0, 163), (8.6, 99), (8.9, 99), (9.0, 227), (12.0, 99)])
def test_the_decode_kernel_fits_every_gpu(compute_capability, smem):
    for head_dim, (group, q_len), itemsize in itertools.product(
        (32, 64, 120, 128, 192, 256), ((1, 1), (4, 1), (16, 4), (24, 1), (64, 1)), (1, 2)
    ):
        shape = dict(head_dim=head_dim, group=group, q_len=q_len)
        if smem == 99 and head_dim == 256 and q_len * group == 64:
            continue  # not taken
        config = decode_config.default_config(
            **(SHAPE | shape | dict(compute_capability=compute_capability, itemsize=itemsize))
        )
        arrays = scratch(
            config,
            **shape,
            block_size=16,
            dtype=jnp.bfloat16,
            cache_dtype=jnp.int8 if itemsize == 1 else jnp.bfloat16,
            scales=(jnp.zeros((1, 16, 1)),) * 2,
        )
        num_bytes = sum(map(count_bytes, arrays.values()))
        assert num_bytes + 2048 <= smem * 1024  # and Mosaic's reductions
        barriers = 8 * 2 * config.num_stages if config.copies == "tma" else 0
        assert num_bytes - barriers == decode_config.smem_bytes(config.num_stages, **shape, itemsize=itemsize)


def test_partitions_of_the_decode_kernel():
    default = functools.partial(decode_config.default_config, **SHAPE)
    assert default().num_partitions == 3  # two programs for each of 108 SMs
    assert decode_config.default_config(**(SHAPE | dict(seqs=64))).num_partitions == 1
    assert decode_config.default_config(**(SHAPE | dict(seqs=1))).num_partitions == 16
    assert decode_config.default_config(**(SHAPE | dict(capacity=300)), num_partitions=256).num_partitions == 5
    assert default(window=128).num_partitions == 2
    assert default(num_partitions=7).num_partitions == 7


@pytest.mark.parametrize(("compute_capability", "rows"), [(8.0, 64), (8.9, 48)])
def test_rows_that_the_decode_kernel_has_room_for(compute_capability, rows):
    sizes = dict(head_dim=256, itemsize=2, compute_capability=compute_capability)
    assert decode_config.most_rows(**sizes) == rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(compute_capability=7.5), "compute_capability=7.5"),
        (dict(q_dtype=jnp.float32), "float32"),
        (dict(cache_dtype=jnp.float16), "cache_dtype=.*float16"),
        (dict(cache_dtype=jnp.float8_e4m3fn, compute_capability=8.0), "from compute capability 8.9"),
        (dict(head_dim=20), "head_dim=20"),
        (dict(head_dim=72, cache_dtype=jnp.int8), "head_dim=72"),
        (dict(block_size=48), "block_size=48"),
        (dict(group=65, q_len=1), "group=65"),
        (dict(group=64, q_len=1, head_dim=256, compute_capability=8.9), "needs 106496"),
    ],
)
def test_what_the_decode_kernel_does_not_take(changes, message):
    assert decode_config.limit(**SUPPORTED) is None
    assert re.search(message, decode_config.limit(**(SUPPORTED | changes)))


@pytest.mark.parametrize("head_dim", [64, 120, 128, 192, 256])
def test_partials_that_nobody_asked_for_take_little_memory(head_dim):
    sizes = dict(head_dim=head_dim, num_sms=132, compute_capability=9.0)
    for (group, q_len), seqs, capacity in itertools.product(
        ((4, 1), (33, 1), (64, 1), (4, 16)), (1, 4, 9, 33, 132, 264, 1024), (512, 8192, 131072)
    ):
        shape = SHAPE | sizes | dict(group=group, q_len=q_len, seqs=seqs, capacity=capacity)
        num_partitions = decode_config.default_config(**shape).num_partitions
        if num_partitions > 1:
            numbers = decode_config.partial_size(group=group, q_len=q_len, head_dim=head_dim)
            assert seqs * SHAPE["kv_heads"] * num_partitions * numbers * 4 <= PARTIAL_BYTES


@pytest.mark.parametrize(
    ("num_items", "visible", "head_dim", "parts"),
    [
        (8, 8192, 128, 11),
        (8, 512, 128, 2),
        (32, 4096, 128, 4),
        (64, 2048, 128, 2),
        (64, 2048, 256, 1),
        (64, 8192, 128, 2),
        (128, 8192, 128, 1),
        (512, 131072, 64, 1),
    ],
)
def test_parts_of_the_prefill_kernel(num_items, visible, head_dim, parts):
    sizes = dict(num_items=num_items, visible=visible, head_dim=head_dim)
    assert prefill_config.default_parts(**sizes, num_sms=132) == parts
