"""Moving whole blocks, as literal traces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache
from jaxpaged.ops import copy_blocks, gather_kv, scatter_kv, widen_kv, write_kv
from tests.compiled import BLOCK_SIZE, HEAD_DIM, KV_HEADS, NUM_BLOCKS, cache_sized_copies, inputs
from tests.transfers import COPIES, EVERY_CACHE, EVERY_DTYPE, block_leaves, filled, ids, numbered, shown

STACKED = pytest.mark.parametrize("num_layers", [None, 3])
gather = jax.jit(gather_kv)


@COPIES
@pytest.mark.parametrize("num_layers", [None, 3])
def test_copy_blocks(source_ids, destination_ids, expected, num_layers):
    cache = copy_blocks(numbered(num_layers), ids(*source_ids), ids(*destination_ids))
    layers = [expected] if num_layers is None else [[10 * i + block for block in expected] for i in range(num_layers)]
    assert shown(cache.k) == (layers[0] if num_layers is None else layers)
    assert shown(cache.v) == jax.tree.map(lambda x: x + 100, layers[0] if num_layers is None else layers)


def same_bits(cache: KVCache, other: KVCache) -> bool:
    return all((a == b).all() for a, b in zip(block_leaves(cache), block_leaves(other), strict=True))


@EVERY_CACHE
@STACKED
def test_copy_blocks_keeps_every_bit(dtype, scale, num_layers):
    before = filled(dtype, scale, num_layers)
    after = jax.jit(copy_blocks)(before, ids(1, 2), ids(4, 5))
    for old, new in zip(block_leaves(before), block_leaves(after), strict=True):
        assert (new == old[:, [0, 1, 2, 3, 1, 2]]).all()
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, before)


@EVERY_DTYPE
def test_nothing_to_copy(dtype):
    before = filled(dtype, "token_head" if jnp.dtype(dtype).itemsize == 1 else None)
    after = copy_blocks(before, ids(), ids())
    for old, new in zip(block_leaves(before), block_leaves(after), strict=True):
        assert (new == old).all()


@EVERY_CACHE
@STACKED
def test_gathered_tokens_are_those_of_the_blocks_in_order(dtype, scale, num_layers):
    cache = filled(dtype, scale, num_layers)
    tables = np.asarray([[3, 1, 2**31 - 1], [5, -7, 10**6], [2, 4, 1]], np.int32)
    lengths = ids(6, 0, 12)
    contiguous = gather(cache, tables, lengths)
    assert contiguous.k.dtype == cache.k.dtype
    assert contiguous.k.shape == (*cache.k.shape[:-4], 3, 12, 3, 8)
    for name in ("k", "v", "k_scale", "v_scale"):
        pool, tokens = getattr(cache, name), getattr(contiguous, name)
        if name in ("k", "v") or scale == "token_head":
            layers, count = (num_layers or 1), pool.ndim - (num_layers is not None)
            pool = np.asarray(pool, np.float32).reshape(layers, 6, 4, *pool.shape[-(count - 2) :])
            tokens = np.asarray(tokens, np.float32).reshape(layers, 3, 12, *pool.shape[3:])
            assert (tokens[:, 0, :6] == pool[:, [3, 1]].reshape(layers, 8, *pool.shape[3:])[:, :6]).all()
            assert (tokens[:, 2] == pool[:, [2, 4, 1]].reshape(layers, 12, *pool.shape[3:])).all()
            assert (tokens[:, 0, 6:] == 0).all()
            assert (tokens[:, 1] == 0).all()


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
    back = gather(after, moved, lengths)
    assert same_bits(back, contiguous)


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


def test_what_was_written_is_what_is_gathered():
    k = jax.random.normal(jax.random.key(0), (2, 5, 1, 8))
    cache = KVCache.create(num_blocks=8, block_size=4, num_kv_heads=1, head_dim=8, dtype="float8_e4m3fn")
    slots = jnp.asarray([[8, 9, 10, 11, 20], [-1, -1, 4, 5, 6]], jnp.int32)
    cache = write_kv(cache, k, -k, slots)
    wide = widen_kv(gather_kv(cache, jnp.asarray([[2, 5], [1, 0]], jnp.int32), ids(5, 3)))
    np.testing.assert_allclose(wide.k[0, :5], k[0], atol=0.2)
    np.testing.assert_allclose(wide.v[1, :3], -k[1, 2:], atol=0.2)


def test_copying_within_a_stack_is_copying_in_each_of_its_layers():
    stack = numbered(3)
    alone = [copy_blocks(KVCache(k, v), ids(1), ids(5)) for k, v in zip(stack.k, stack.v, strict=True)]
    assert shown(copy_blocks(stack, ids(1), ids(5)).v) == [shown(cache.v) for cache in alone]


@EVERY_DTYPE
@pytest.mark.parametrize("num_layers", [None, 2])
def test_no_operation_holds_a_second_cache(dtype, num_layers):
    sizes = dict(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    cache = jax.eval_shape(functools.partial(KVCache.create, **sizes, dtype=dtype, num_layers=num_layers))
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


def test_without_donation_a_copy_is_seen():
    cache, *_ = inputs()
    compiled = jax.jit(copy_blocks).lower(cache, ids(1), ids(2)).compile()
    assert len(cache_sized_copies(compiled.as_text())) >= 2


@pytest.mark.parametrize(
    ("source_ids", "destination_ids", "message"),
    [
        (ids(1), ids(1, 2), r"got source_ids.shape=\(1,\), destination_ids.shape=\(2,\). Pad with the null block"),
        (ids(1)[None], ids(1), r"source_ids must be int32, of one axis; got int32 \[1, 1\]"),
        (ids(1), jnp.zeros(1), r"destination_ids must be int32, of one axis; got float32 \[1\]"),
    ],
)
def test_copy_blocks_errors(source_ids, destination_ids, message):
    with pytest.raises(ValueError, match=message):
        copy_blocks(numbered(), source_ids, destination_ids)


def test_what_is_no_cache():
    with pytest.raises(ValueError, match=r"got k.shape=\(3, 8\)"):
        copy_blocks(KVCache(jnp.zeros((3, 8)), jnp.zeros((3, 8))), ids(1), ids(2))


@pytest.mark.parametrize(
    ("contiguous", "message"),
    [
        (
            numbered(num_blocks=3),
            r"contiguous must be \[2, 2, 1, 8\] in float32, .* got contiguous.k.shape=\(3, 2, 1, 8\)",
        ),
        (numbered(num_blocks=2, dtype=jnp.bfloat16), r"contiguous must be .* in float32, .* in bfloat16"),
        (numbered(3, num_blocks=2), r"got contiguous.k.shape=\(3, 2, 2, 1, 8\)"),
    ],
)
def test_scattering_errors(contiguous, message):
    with pytest.raises(ValueError, match=message):
        scatter_kv(numbered(), contiguous, ids(1, 2)[:, None], ids(2, 2))


def test_scattering_other_scales():
    cache, other = (
        KVCache.create(num_blocks=4, block_size=2, num_kv_heads=1, head_dim=8, dtype="float8_e5m2", scale_per=scale)
        for scale in ("token_head", "head")
    )
    with pytest.raises(ValueError, match="contiguous must have scales of the kind that the cache has"):
        scatter_kv(cache, gather_kv(other, ids(1)[None], ids(2)), ids(1)[None], ids(2))


@pytest.mark.parametrize(
    ("tables", "lengths", "message"),
    [
        (ids(1, 2), ids(1), r"block_tables must be int32 \[seqs, max_blocks\]; got int32 \[2\]"),
        (ids(1, 2)[None], ids(1, 2), r"lengths must be int32 \[seqs\] with seqs=1 .* got int32 \[2\]"),
        (ids(1, 2)[None], jnp.zeros(1), r"lengths must be .* got float32 \[1\]"),
    ],
)
def test_gather_errors(tables, lengths, message):
    with pytest.raises(ValueError, match=message):
        gather_kv(numbered(), tables, lengths)
