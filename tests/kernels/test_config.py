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
from pallas_kernels.paged_decode import _inbox
from pallas_kernels.paged_decode import _refs as decode_refs
from pallas_kernels.portable_decode import _refs
from tests.kernels.lowering import SHAPE

SUPPORTED = dict(
    head_dim=128,
    block_size=16,
    group=4,
    q_len=1,
    q_dtype=jnp.bfloat16,
    cache_dtype=jnp.bfloat16,
    compute_capability=9.0,
)


@pytest.mark.parametrize(("itemsize", "token_scales"), [(1, 0), (1, 2), (2, 0)])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 120, 128, 192, 256])
@pytest.mark.parametrize("num_partitions", [None, 1, 7, 16, "a plan"])
def test_fits_a_gpu(head_dim, num_partitions, itemsize, token_scales):
    if itemsize == 1 and head_dim == 120:
        pytest.skip("not taken")
    rows_of = [(1, 1), (8, 1), (16, 1), (32, 1), (64, 1), (5, 3), (7, 4), (5, 8), (4, 16)]
    for (group, q_len), seqs, capacity in itertools.product(rows_of, (1, 4, 8, 64, 512), (512, 8192, 131072)):
        shape = dict(head_dim=head_dim, group=group, q_len=q_len, itemsize=itemsize, token_scales=token_scales)
        planned = num_partitions == "a plan"
        how = dict(planned=True) if planned else dict(num_partitions=num_partitions)
        config = decode_config.default_config(**(SHAPE | shape | dict(seqs=seqs, capacity=capacity) | how))
        assert config.num_partitions == (1 if planned else num_partitions or config.num_partitions)
        assert config.num_partials * config.cluster == config.num_partitions
        assert config.cluster <= 8
        assert config.num_stages >= 1
        assert _sizes.padded_width(head_dim) % config.chunk == 0
        assert config.chunk % 64 == config.tile % 64 == 0
        two_programs = config.last_first
        assert smem_bytes(config, **shape) <= (113 if two_programs else 227) * 1024
        if num_partitions is None and head_dim <= 128 and capacity > config.num_partitions * config.tile:
            assert config.num_stages >= 2


def smem_bytes(config, *, head_dim, group, q_len, itemsize, token_scales):
    """What a program of the decode kernel takes in all, added up once more."""
    taken = decode_refs.scratch(
        config,
        q_len=q_len,
        group=group,
        head_dim=head_dim,
        copies_of_tile=1,
        token_scales=token_scales,
        dtype=jnp.bfloat16,
        cache_dtype={1: jnp.int8, 2: jnp.bfloat16}[itemsize],
    )
    return 2048 + sum(map(bytes_of, taken.values()))  # and Mosaic's own, for reductions


def bytes_of(ref):
    if hasattr(ref, "num_barriers"):
        return 8 * int(np.prod(ref.num_barriers))
    if hasattr(ref, "refs"):  # a union
        return max(map(bytes_of, ref.refs))
    return -(-math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize // 1024) * 1024


@pytest.mark.parametrize(
    ("head_dim", "parts", "width"),
    [(8, 1, 64), (40, 1, 64), (72, 3, 192), (80, 1, 128), (112, 1, 128), (120, 3, 192), (168, 3, 192), (256, 1, 256)],
)
def test_parts_of_a_head(head_dim, parts, width):
    assert _sizes.num_parts(head_dim) == parts
    assert _sizes.padded_width(head_dim) == width
    decode_config.check_supported(**(SUPPORTED | {"head_dim": head_dim}))


def test_no_more_stages_than_tiles():
    def config(**shape):
        return decode_config.default_config(**(SHAPE | shape))

    one_tile = config(seqs=1, capacity=512)
    assert (one_tile.num_partitions, one_tile.tile, one_tile.num_stages, one_tile.keys_ahead) == (4, 128, 1, False)
    assert config(seqs=64, capacity=100).num_stages == 2
    assert config(seqs=64, capacity=8192).num_stages == 3


@pytest.mark.parametrize(
    ("shape", "ahead"),
    [
        (dict(), True),
        (dict(group=16), True),
        (dict(head_dim=256, group=8), True),
        (dict(group=24), False),
        (dict(head_dim=120), False),  # in parts
        (dict(itemsize=1), False),
        (dict(capacity=64), False),
    ],
)
def test_keys_are_multiplied_ahead_where_the_registers_allow_it(shape, ahead):
    assert decode_config.default_config(**(SHAPE | dict(seqs=64, capacity=2048) | shape)).keys_ahead == ahead


partitions_for = functools.partial(decode_config.partitions_for, num_sms=132, fast_memory=False)


def test_partitions_fall_with_the_batch_while_they_fill_the_gpu():
    for shared in (False, True):
        counts = [partitions_for(pairs, 8192, shared=shared) for pairs in range(1, 67)]
        assert counts[0] == 64
        assert counts[7] == 8
        assert counts[63] == 2
        assert all(few <= many for many, few in itertools.pairwise(counts))


@pytest.mark.parametrize(
    ("shared", "capacity", "counts"),
    [
        (False, 2048, [2, 1, 1, 1, 1, 1, 1]),
        (False, 8192, [2, 2, 2, 2, 2, 2, 1]),
        (False, 131072, [2, 2, 2, 2, 2, 2, 1]),
        (True, 2048, [2, 1, 1, 1, 1, 1, 1]),
        (True, 4096, [2, 2, 4, 4, 4, 2, 1]),
        (True, 8192, [4, 2, 4, 4, 4, 2, 1]),
        (True, 32768, [4, 2, 4, 4, 4, 2, 1]),
        (True, 131072, [2, 2, 4, 4, 4, 2, 1]),
    ],
)
def test_parts_of_long_sequences(shared, capacity, counts):
    pairs = (32, 64, 67, 128, 512, 1024, 2048)
    assert [partitions_for(n, capacity, shared=shared) for n in pairs] == counts


@pytest.mark.parametrize(
    ("shared", "capacity", "counts"),
    [
        (False, 131072, [8, 8, 4, 4, 4, 4, 4, 2, 2, 2, 2]),
        (True, 131072, [8, 8, 8, 8, 4, 4, 4, 4, 4, 2, 2]),
        (True, 32768, [8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4]),
        (True, 4096, [8, 8, 4, 4, 4, 4, 2, 2, 2, 2, 2]),
    ],
)
def test_long_sequences_are_not_left_to_a_few_programs(shared, capacity, counts):
    pairs = (5, 8, 9, 13, 14, 16, 17, 23, 26, 27, 33)
    assert [partitions_for(n, capacity, shared=shared) for n in pairs] == counts


def test_quarters_of_long_sequences_on_an_h200():
    def partitions(seqs, **shape):
        return decode_config.default_config(**(SHAPE | dict(seqs=seqs, capacity=131072) | shape)).num_partitions

    assert partitions(4) == 2
    assert partitions(4, fast_memory=True) == partitions(4, capacity=32768) == 4
    assert all(partitions(seqs) == partitions(seqs, fast_memory=True) for seqs in (1, 2, 3, 5, 8, 16, 64, 512))


def test_short_sequences_of_many_stay_whole():
    def tokens(**shape):
        config = decode_config.default_config(**(SHAPE | shape))
        return config.unsplit_tiles * config.tile

    assert tokens(seqs=64) == tokens(seqs=34) == 512
    assert tokens(seqs=64, num_partitions=4) == 0  # a sequence's bits hang on its partitions alone
    assert tokens(seqs=8) == tokens(seqs=33) == tokens(seqs=64, capacity=2048) == tokens(seqs=128) == 0


def test_many_rows():
    def config(**shape):
        return decode_config.default_config(**(SHAPE | dict(q_len=16) | shape))

    def partitions(**shape):
        return [config(**(dict(seqs=seqs) | shape)).num_partitions for seqs in (1, 3, 8, 12, 64)]

    assert partitions() == partitions(itemsize=1) == [8, 5, 2, 1, 1]
    assert partitions(capacity=2048) == [4, 4, 2, 1, 1]
    assert partitions(capacity=131072)[0] == 16
    assert partitions(capacity=1023) == [1, 1, 1, 1, 1]
    assert [config(group=group, q_len=1).rows_first for group in (32, 33, 64)] == [False, True, True]
    assert not config(itemsize=1).rows_first
    assert config().cluster == config(num_partitions=4).cluster == 1
    assert config(itemsize=1, head_dim=64).cluster == 1
    assert all(config(head_dim=256, num_partitions=n).num_stages >= 2 for n in (None, 1, 4))


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 120, 128, 192, 256])
def test_partials_that_nobody_asked_for_take_little_memory(head_dim, itemsize):
    rows_of = itertools.product((1, 4, 7, 32, 64), (1, 5, 8, 16))
    for (group, q_len), seqs, capacity in itertools.product(
        rows_of, (1, 4, 9, 33, 132, 264, 1024), (512, 8192, 131072)
    ):
        if group * q_len > decode_config.MAX_ROWS:
            continue
        shape = dict(group=group, q_len=q_len, head_dim=head_dim, itemsize=itemsize, seqs=seqs, capacity=capacity)
        config = decode_config.default_config(**(SHAPE | shape))
        if config.num_partials > 1:
            rows = filled_rows(q_len, group, rows_first=config.rows_first)
            numbers = seqs * SHAPE["kv_heads"] * config.num_partials * _sizes.padded_width(head_dim) * rows
            assert numbers * 4 <= PARTIAL_BYTES


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("num_partitions", [1, 4])
def test_fixed_partitions_add_up_alike_whatever_the_batch(num_partitions, itemsize):
    """The order of the sums follows from the tile, the chunk and the partitions."""
    configs = (
        decode_config.default_config(**(SHAPE | dict(seqs=seqs, num_partitions=num_partitions, itemsize=itemsize)))
        for seqs in (1, 2, 8, 64, 512)
    )
    orders = {(c.tile, c.chunk, c.num_partitions, c.cluster, c.last_first) for c in configs}
    assert len(orders) == 1


def test_long_tiles_where_the_start_counts():
    def tile(**shape):
        return decode_config.default_config(**(SHAPE | shape)).tile

    assert tile(seqs=1, kv_heads=32, capacity=4096) == 128
    assert tile(seqs=1, kv_heads=32, capacity=8192) == 64  # two programs a SM
    assert tile(seqs=1, kv_heads=32, capacity=131072) == 64
    assert tile(seqs=1, kv_heads=16, capacity=262144) == 64
    assert tile(seqs=64, capacity=8192) == 64
    assert tile(seqs=64, capacity=8192, itemsize=1) == 128
    assert tile(seqs=64, capacity=8192, itemsize=1, head_dim=192) == 64


def test_a_known_window_bounds_what_a_sequence_is_cut_into():
    def config(**shape):
        return decode_config.default_config(**(SHAPE | dict(seqs=64, head_dim=64) | shape))

    assert config().num_partitions == config(window=8192).num_partitions == 4
    assert config(window=2**31 - 1) == config()
    assert config(window=4095).num_partitions == config(capacity=4095).num_partitions == 1
    # 128 tokens can lie in three tiles of 64, 130 in four.
    assert config(capacity=128).num_stages == 2
    assert config(window=128).num_stages == 3
    assert config(window=127, q_len=4).num_stages == 4


def test_no_more_partitions_than_tiles():
    assert decode_config.default_config(**(SHAPE | dict(seqs=1, capacity=64))).num_partitions == 1


@pytest.mark.parametrize("width", [64, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 7, 12, 64])
def test_columns_that_a_member_of_a_cluster_adds_up(width, group):
    for cluster, q_len in itertools.product(range(2, 9), range(1, 17)):
        columns = _inbox.columns_of(width=width, cluster=cluster, q_len=q_len, group=group)
        assert width % columns == 0
        assert q_len == 1 or columns * group * 2 % 128 == 0  # bytes at which a token's rows begin


@pytest.mark.parametrize(
    ("shape", "columns"),
    [((128, 8, 1, 4), 16), ((128, 4, 1, 4), 32), ((256, 8, 1, 4), 32), ((256, 2, 1, 4), 64), ((64, 8, 2, 1), 64)],
)
def test_few_columns_where_many_share_them(shape, columns):
    assert _inbox.columns_of(**dict(zip(("width", "cluster", "q_len", "group"), shape, strict=True))) == columns


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
        ({"cache_dtype": jnp.int8, "head_dim": 176}, "head_dim=176"),
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
        (dict(group=65), "group=65"),
        (dict(group=64, head_dim=256, compute_capability=8.9), "needs 106496"),
    ],
)
def test_what_the_portable_kernel_does_not_take(changes, message):
    portable_config.check_supported(**SUPPORTED)
    with pytest.raises(NotImplementedError, match=message):
        portable_config.check_supported(**(SUPPORTED | changes))
