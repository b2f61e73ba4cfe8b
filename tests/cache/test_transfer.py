"""Moving whole blocks, as literal traces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache
from jaxpaged.ops import copy_blocks, gather_kv, scatter_kv
from tests.compiled import cache_sized_copies, inputs
from tests.transfers import COPIES, EVERY_CACHE, EVERY_DTYPE, block_leaves, filled, ids, numbered, same_bits, shown

STACKED = pytest.mark.parametrize("num_layers", [None, 3])
gather = jax.jit(gather_kv)


@COPIES
@STACKED
def test_copy_blocks(source_ids, destination_ids, expected, num_layers):
    cache = copy_blocks(numbered(num_layers), ids(*source_ids), ids(*destination_ids))
    layers = np.add.outer(10 * np.arange(num_layers or 1), expected).tolist()
    assert shown(cache.k) == (layers if num_layers else layers[0])
    assert shown(cache.v - 100) == shown(cache.k)


@EVERY_CACHE
@STACKED
def test_copy_blocks_keeps_every_bit(dtype, scale, num_layers):
    before = filled(dtype, scale, num_layers)
    after = jax.jit(copy_blocks)(before, ids(1, 2), ids(4, 5))
    for old, new in zip(block_leaves(before), block_leaves(after), strict=True):
        assert (new == old[:, [0, 1, 2, 3, 1, 2]]).all()
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, before)
    assert same_bits(copy_blocks(before, ids(), ids()), before)


@EVERY_CACHE
@STACKED
def test_gathered_tokens_follow_the_block_table(dtype, scale, num_layers):
    cache = filled(dtype, scale, num_layers)
    tables = np.asarray([[3, 1, 2**31 - 1], [5, -7, 10**6], [2, 4, 1]], np.int32)
    contiguous = gather(cache, tables, ids(6, 0, 12))
    assert contiguous.k.dtype == cache.k.dtype
    assert contiguous.k.shape == (*cache.k.shape[:-4], 3, 12, 3, 8)
    for pool, tokens in zip(block_leaves(cache), block_leaves(contiguous), strict=True):
        blocks = pool.reshape(len(pool), 6, 4, -1)
        first, empty, last = tokens.reshape(len(pool), 3, 12, -1).swapaxes(0, 1)
        assert (first[:, :6] == blocks[:, [3, 1]].reshape(len(pool), 8, -1)[:, :6]).all()
        assert (last == blocks[:, [2, 4, 1]].reshape(last.shape)).all()
        assert not first[:, 6:].any()
        assert not empty.any()


@EVERY_CACHE
@STACKED
def test_scattering_is_the_inverse_of_gathering(dtype, scale, num_layers):
    before = filled(dtype, scale, num_layers)
    tables, lengths = np.asarray([[3, 1, 99], [5, 0, -1], [2, -5, 7]], np.int32), ids(8, 4, 0)
    contiguous = gather(before, tables, lengths)
    moved = np.asarray([[7, 8, 99], [1, 0, -1], [2, -5, 7]], np.int32)
    empty = filled(dtype, scale, num_layers, num_blocks=9)
    after = jax.jit(scatter_kv)(empty, contiguous, moved, lengths)
    for old, untouched, new in zip(*map(block_leaves, (before, empty, after)), strict=True):
        assert (new[:, [7, 8, 1]] == old[:, [3, 1, 5]]).all()
        assert (new[:, [0, 2, 3, 4, 5, 6]] == untouched[:, [0, 2, 3, 4, 5, 6]]).all()
    assert same_bits(gather(after, moved, lengths), contiguous)


def test_scattering_writes_no_slot_past_the_length():
    contiguous = gather_kv(numbered(), ids(3, 5)[None], ids(3))
    cache = scatter_kv(numbered(), contiguous, ids(1, 2)[None], ids(3))
    assert cache.k[..., 0, 0].tolist() == [[0, 0], [3, 3], [5, 2], [3, 3], [4, 4], [5, 5]]


def test_gathering_hides_nan_past_the_length():
    cache = numbered()
    cache = KVCache(cache.k.at[3, 1:].set(jnp.nan), cache.v.at[4].set(jnp.nan))
    contiguous = gather_kv(cache, ids(3, 4)[None], ids(1))
    assert contiguous.k[..., 0, 0].tolist() == [[3, 0, 0, 0]]
    assert contiguous.v[..., 0, 0].tolist() == [[103, 0, 0, 0]]


@EVERY_DTYPE
@pytest.mark.parametrize("num_layers", [None, 2])
def test_no_operation_allocates_a_second_cache(dtype, num_layers):
    cache, *_ = jax.eval_shape(lambda: inputs(dtype=dtype, num_layers=num_layers))
    some, tables, lengths = ids(*range(1, 9)), np.arange(1, 9, dtype=np.int32).reshape(2, 4), ids(33, 64)
    contiguous = jax.eval_shape(gather_kv, cache, tables, lengths)
    calls = (
        (copy_blocks, (cache, some, some), True),
        (scatter_kv, (cache, contiguous, tables, lengths), True),
        (gather_kv, (cache, tables, lengths), False),
    )
    size = 2 * cache.k.size * cache.k.dtype.itemsize
    for function, arguments, in_place in calls:
        compiled = jax.jit(function, donate_argnums=(0,) if in_place else ()).lower(*arguments).compile()
        assert cache_sized_copies(compiled.as_text()) == [], function.__name__
        memory = compiled.memory_analysis()
        assert memory.temp_size_in_bytes < size / 8, function.__name__
        if in_place:
            assert memory.alias_size_in_bytes >= size, function.__name__


def scattered(contiguous, cache=None):
    return scatter_kv(cache or numbered(), contiguous, ids(1, 2)[:, None], ids(2, 2))


def float8(scale):
    return KVCache.create(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=8, dtype="float8_e5m2", scale_per=scale)


ROW = ids(1, 2)[None]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: copy_blocks(numbered(), ids(1), ids(1, 2)),
            r"got source_ids.shape=\(1,\), destination_ids.shape=\(2,\). Pad with the null block",
        ),
        (lambda: copy_blocks(numbered(), ROW, ids(1)), r"source_ids must be int32 \[pairs\]; got int32 \[1, 2\]"),
        (
            lambda: copy_blocks(numbered(), ids(1), jnp.zeros(1)),
            r"destination_ids must be int32 \[pairs\]; got float32 \[1\]",
        ),
        (lambda: copy_blocks(KVCache(*jnp.zeros((2, 3, 8))), ids(1), ids(2)), r"got k.shape=\(3, 8\)"),
        (
            lambda: copy_blocks(KVCache(*jnp.zeros((2, 2, 1, 8))), ids(1), ids(2)),
            r"k and v of a cache must be .*got .*\(2, 1, 8\)",
        ),
        (
            lambda: gather_kv(numbered(), ids(1, 2), ids(1)),
            r"block_tables must be int32 \[seqs, max_blocks\]; got int32 \[2\]",
        ),
        (
            lambda: gather_kv(numbered(), ROW, ids(1, 2)),
            r"lengths must be int32 \[1\], one for each row of block_tables; got int32 \[2\]",
        ),
        (lambda: gather_kv(numbered(), ROW, jnp.zeros(1)), r"lengths must be .* got float32 \[1\]"),
        (lambda: gather_kv(numbered(), ROW[:0], ids()), r"got .*shape=\(0, 2\)"),
        (
            lambda: scattered(numbered(num_blocks=3)),
            r"contiguous must be \[2, 2, 1, 8\] in float32 .* got contiguous.k.shape=\(3, 2, 1, 8\)",
        ),
        (
            lambda: scattered(numbered(num_blocks=2, dtype=jnp.bfloat16)),
            r"contiguous must be .* in float32 .* in bfloat16",
        ),
        (lambda: scattered(numbered(3, num_blocks=2)), r"got contiguous.k.shape=\(3, 2, 2, 1, 8\)"),
        (
            lambda: scattered(KVCache(numbered().k, None, value_dim=6)),
            r"values of 8 numbers, .* got .* 6 of the key's",
        ),
        (
            lambda: scattered(gather_kv(float8("head"), ROW.T, ids(2, 2)), float8("token_head")),
            "contiguous must have scales of the same granularity as the cache",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
