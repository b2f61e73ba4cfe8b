"""The rules that choose a configuration: pure functions of ints."""

import functools
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged._attention.plan import PARTIAL_BYTES
from pallas_kernels import _sizes, decode_config, portable_config
from pallas_kernels._sizes import filled_rows
from pallas_kernels.paged_decode import _refs as decode_refs
from pallas_kernels.portable_decode import _refs
from tests.kernels.lowering import SHAPE

SUPPORTED = dict(
    head_dim=128,
    block_size=16,
    group=4,
    q_len=16,
    q_dtype=jnp.bfloat16,
    cache_dtype=jnp.bfloat16,
    compute_capability=9.0,
)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 120, 128, 192, 256])
@pytest.mark.parametrize("num_partitions", [None, 1, 7, 16, "a plan"])
def test_fits_a_gpu(head_dim, num_partitions):
    rows_of = [(33, 1), (64, 1), (4, 16), (3, 13)]
    for (group, q_len), seqs, capacity in itertools.product(rows_of, (1, 4, 8, 64, 512), (512, 8192, 131072)):
        shape = dict(head_dim=head_dim, group=group, q_len=q_len)
        planned = num_partitions == "a plan"
        how = dict(planned=True) if planned else dict(num_partitions=num_partitions)
        config = decode_config.default_config(**(SHAPE | shape | dict(seqs=seqs, capacity=capacity) | how))
        assert config.num_partitions == (1 if planned else num_partitions or config.num_partitions)
        assert config.tile % 64 == 0
        assert smem_bytes(config, **shape) <= 227 * 1024
        assert config.num_stages >= (2 if capacity > config.num_partitions * config.tile else 1)


def smem_bytes(config, *, head_dim, group, q_len):
    """What a program of the decode kernel for Hopper takes in all, added up once more."""
    sizes = dict(q_len=q_len, group=group, head_dim=head_dim)
    taken = decode_refs.scratch(config, **sizes, copies_of_tile=1, dtype=jnp.bfloat16)
    return 2048 + sum(map(bytes_of, taken.values()))  # and Mosaic's own, for reductions


def bytes_of(ref):
    if hasattr(ref, "num_barriers"):
        return 8 * int(np.prod(ref.num_barriers))
    return -(-math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize // 1024) * 1024


@pytest.mark.parametrize(
    ("head_dim", "parts", "width"),
    [(8, 1, 64), (40, 1, 64), (72, 3, 192), (80, 1, 128), (112, 1, 128), (120, 3, 192), (168, 3, 192), (256, 1, 256)],
)
def test_parts_of_a_head(head_dim, parts, width):
    assert _sizes.num_parts(head_dim) == parts
    assert _sizes.padded_width(head_dim) == width
    decode_config.check_supported(**(SUPPORTED | {"head_dim": head_dim}))


def default(**shape):
    return decode_config.default_config(**(SHAPE | shape))


def test_no_more_stages_than_tiles():
    assert default(seqs=64, capacity=128).num_stages == 1
    assert default(seqs=64, capacity=129).num_stages == 2
    assert default(seqs=64, capacity=8192, head_dim=64).num_stages == 6
    assert default(seqs=64, capacity=8192).num_stages == 2


def test_partitions():
    def partitions(**shape):
        return [default(**(dict(seqs=seqs) | shape)).num_partitions for seqs in (1, 3, 8, 12, 64)]

    assert partitions() == [8, 5, 2, 1, 1]
    assert partitions(capacity=2048) == [4, 4, 2, 1, 1]
    assert partitions(capacity=131072)[0] == 16
    assert partitions(capacity=1023) == [1, 1, 1, 1, 1]


def test_when_rows_come_first():
    taken = functools.partial(decode_config.rows_come_first, q_len=1)
    assert [taken(group=group, itemsize=2) for group in (32, 33, 64)] == [False, True, True]
    assert not taken(group=64, itemsize=1)


def test_tiles():
    assert [default(head_dim=head_dim).tile for head_dim in (64, 128, 120, 192, 256)] == [128, 128, 64, 64, 64]


@pytest.mark.parametrize("head_dim", [64, 120, 128, 192, 256])
def test_partials_that_nobody_asked_for_take_little_memory(head_dim):
    for (group, q_len), seqs, capacity in itertools.product(
        ((33, 1), (64, 1), (4, 16), (7, 8)), (1, 4, 9, 33, 132, 264, 1024), (512, 8192, 131072)
    ):
        config = default(group=group, q_len=q_len, head_dim=head_dim, seqs=seqs, capacity=capacity)
        if config.num_partitions > 1:
            rows = filled_rows(q_len, group, rows_first=True)
            numbers = seqs * SHAPE["kv_heads"] * config.num_partitions * _sizes.padded_width(head_dim) * rows
            assert numbers * 4 <= PARTIAL_BYTES


@pytest.mark.parametrize("num_partitions", [1, 4])
def test_fixed_partitions_add_up_alike_whatever_the_batch(num_partitions):
    """The order of the sums follows from the tile and the partitions."""
    configs = (default(seqs=seqs, num_partitions=num_partitions) for seqs in (1, 2, 8, 64, 512))
    assert len({(config.tile, config.num_partitions) for config in configs}) == 1


def test_a_known_window_bounds_what_a_sequence_is_cut_into():
    config = functools.partial(default, seqs=1, head_dim=64)
    assert config().num_partitions == config(window=8192).num_partitions == 8
    assert config(window=2**31 - 1) == config()
    assert config(window=1008).num_partitions == config(capacity=1023).num_partitions == 1
    # 143 tokens of 16 queries' windows can lie in three tiles of 128, 257 in four.
    assert config(capacity=128).num_stages == 1
    assert config(window=128).num_stages == 3
    assert config(window=242).num_stages == 3
    assert config(window=243).num_stages == 4


def test_supported():
    decode_config.check_supported(**SUPPORTED)


@pytest.mark.parametrize(
    ("change", "quoted"),
    [
        ({"head_dim": 100}, "head_dim=100"),
        ({"head_dim": 104}, "head_dim=104"),
        ({"head_dim": 512}, "head_dim=512"),
        ({"block_size": 24}, "block_size=24"),
        ({"group": 65}, "group=65"),
        ({"q_len": 17}, "q_len=17"),
        ({"q_dtype": jnp.float32}, "float32"),
        ({"cache_dtype": jnp.float16}, "float16"),
        ({"cache_dtype": jnp.int8}, "cache_dtype=.*int8"),
        ({"q_len": 8}, "q_len=8, group=4"),
        ({"compute_capability": 8.0}, "compute_capability=8.0"),
        ({"compute_capability": 10.0}, "compute_capability=10.0"),
    ],
)
def test_not_supported(change, quoted):
    with pytest.raises(NotImplementedError, match=quoted):
        decode_config.check_supported(**(SUPPORTED | change))


PORTABLE = dict(seqs=8, kv_heads=8, group=4, q_len=1, head_dim=128, capacity=8192, num_sms=108, compute_capability=8.0)


@pytest.mark.parametrize(("compute_capability", "smem"), [(8.0, 163), (8.6, 99), (8.9, 99), (9.0, 227), (12.0, 99)])
def test_the_portable_kernel_fits_every_gpu(compute_capability, smem):
    for head_dim, (group, q_len), itemsize in itertools.product(
        (32, 64, 120, 128, 192, 256), ((1, 1), (4, 1), (16, 4), (24, 1), (64, 1)), (1, 2)
    ):
        shape = dict(head_dim=head_dim, group=group, q_len=q_len)
        if smem == 99 and head_dim == 256 and q_len * group == 64:
            continue  # not taken
        config = portable_config.default_config(
            **(PORTABLE | shape | dict(compute_capability=compute_capability, itemsize=itemsize))
        )
        arrays = _refs.scratch(
            config,
            **shape,
            block_size=16,
            dtype=jnp.bfloat16,
            cache_dtype=jnp.int8 if itemsize == 1 else jnp.bfloat16,
            scales=(jnp.zeros((1, 16, 1)),) * 2,
        )
        num_bytes = decode_refs.num_bytes(arrays)
        assert num_bytes + 2048 <= smem * 1024  # and Mosaic's reductions
        barriers = 8 * 2 * config.num_stages if config.copies == "tma" else 0
        assert num_bytes - barriers == portable_config.smem_bytes(config.num_stages, **shape, itemsize=itemsize)


def test_partitions_of_the_portable_kernel():
    default = functools.partial(portable_config.default_config, **PORTABLE)
    assert default().num_partitions == 3  # two programs for each of 108 SMs
    assert portable_config.default_config(**(PORTABLE | dict(seqs=64))).num_partitions == 1
    assert portable_config.default_config(**(PORTABLE | dict(seqs=1))).num_partitions == 16
    assert portable_config.default_config(**(PORTABLE | dict(capacity=300)), num_partitions=256).num_partitions == 5
    assert default(window=128).num_partitions == 2
    assert default(num_partitions=7).num_partitions == 7


@pytest.mark.parametrize(("compute_capability", "rows"), [(8.0, 64), (8.9, 48)])
def test_rows_that_the_portable_kernel_has_room_for(compute_capability, rows):
    sizes = dict(head_dim=256, itemsize=2, compute_capability=compute_capability)
    assert portable_config.most_rows(**sizes) == rows


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
def test_what_the_portable_kernel_does_not_take(changes, message):
    portable_config.check_supported(**SUPPORTED)
    with pytest.raises(NotImplementedError, match=message):
        portable_config.check_supported(**(SUPPORTED | changes))
