"""The kernels inside JAX's transformations, as lowered for a Hopper GPU: how often they are called, and on what."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from jaxpaged import BlockAllocator, CacheLayer, KVCache, _device, paged_attention
from jaxpaged.debug import explain
from jaxpaged.ops import write_kv

SEQS, MAX_BLOCKS, NUM_BLOCKS, BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 100, 16, 8, 2, 128
attend = functools.partial(paged_attention, implementation="mosaic_gpu")


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """As if JAX's default device were an H100."""
    monkeypatch.setattr(_device, "gpu", lambda: _device.Gpu(132, 9.0))


def inputs(num_layers=None):
    cache = KVCache.create(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=jnp.bfloat16,
        num_layers=num_layers,
    )
    allocator = BlockAllocator.create(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_seqs=SEQS, max_blocks_per_seq=MAX_BLOCKS
    )
    return cache, allocator, jnp.ones((SEQS, HEADS, HEAD_DIM), jnp.bfloat16)


def step(cache, allocator, q):
    allocator, slots, _ = allocator.append(jnp.ones(SEQS, jnp.int32))
    cache = write_kv(cache, q[:, :KV_HEADS], q[:, :KV_HEADS], slots)
    return cache, allocator, attend(q, cache.k, cache.v, allocator.block_tables, allocator.lengths)


def lowered(function, *arguments) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def kernel_calls(text: str) -> int:
    """Calls of a kernel in a module, those in the functions that it calls several times counted once."""
    return text.count("@mosaic_gpu_v2")


def test_a_decode_step_in_a_while_loop():
    def loop(cache, allocator, q):
        return lax.while_loop(
            lambda carry: (carry[1].lengths < 9).all(), lambda carry: step(*carry), (cache, allocator, q)
        )

    text = lowered(loop, *inputs())
    assert kernel_calls(text) == 1
    assert "stablehlo.while" in text


def test_a_scan_over_layers_of_a_stack_with_mixed_windows():
    stack, allocator, q = inputs(num_layers=3)

    def layers(stack, allocator, q, windows):
        allocator, slots, _ = allocator.append(jnp.ones(SEQS, jnp.int32))

        def layer(carry, i_and_window):
            (stack, q), (i, window) = carry, i_and_window
            cache = write_kv(CacheLayer(stack, i), q[:, :KV_HEADS], q[:, :KV_HEADS], slots)
            pool, tables = cache.pool, cache.block_tables(allocator.block_tables)
            return (cache.stack, attend(q, pool.k, pool.v, tables, allocator.lengths, sliding_window=window)), None

        return lax.scan(layer, (stack, q), (jnp.arange(3), windows))[0]

    text = lowered(layers, stack, allocator, q, jnp.asarray([5, 1000, 17], jnp.int32))
    assert kernel_calls(text) == 1


def test_a_window_that_is_a_number_bounds_what_there_is_to_do():
    cache, allocator, q = inputs()
    arrays = q, cache.k, cache.v, allocator.block_tables, allocator.lengths
    windows = (20, np.int32(20), jnp.int32(20), None)
    number, numpy_number, array, none = (explain(*arrays, sliding_window=window).config for window in windows)
    assert number == numpy_number
    assert array == none
    assert (number.num_partitions, none.num_partitions) == (1, 4)


def test_layers_whose_windows_come_to_one_config_share_a_kernel():
    def layers(cache, allocator, q):
        for window in (MAX_BLOCKS * BLOCK_SIZE, 5000, 2**31 - 1):
            q = attend(q, cache.k, cache.v, allocator.block_tables, allocator.lengths, sliding_window=window)
        return q

    assert kernel_calls(lowered(layers, *inputs())) == 1


@pytest.mark.parametrize("in_axes", [(0, 0, 0, 0, 0), (0, None, None, 0, 0)], ids=["pools", "one pool"])
def test_vmap_is_one_more_grid_axis(in_axes):
    """Neither a loop over the batch nor a copy of the pool for each of its members."""
    cache, allocator, q = inputs()
    arrays = q, cache.k, cache.v, allocator.block_tables, allocator.lengths
    mapped = [x if axis is None else jnp.stack([x] * 3) for x, axis in zip(arrays, in_axes, strict=True)]
    text = lowered(jax.vmap(attend, in_axes=in_axes), *mapped)
    assert kernel_calls(text) == 1
    assert "stablehlo.while" not in text
    assert pools_made(text, cache) == []


def pools_made(text, cache):
    """The operations of a module that make an array as large as the pool, or several."""
    pool = "x".join(map(str, cache.k.shape))
    made = [line for line in text.splitlines() if re.search(rf"-> tensor<(\d+x)?{pool}xbf16>", line)]
    return [line for line in made if "func.func" not in line and "custom_call" not in line]


@pytest.mark.parametrize("pool_is_mapped", [False, True])
def test_mapped_calls_are_one_without_a_plan(pool_is_mapped):
    cache, allocator, q = inputs()
    wide = jnp.pad(allocator.block_tables, ((0, 0), (0, 500)))
    axis = 0 if pool_is_mapped else None
    mapped = jax.vmap(lambda q, k, v: attend(q, k, v, wide, allocator.lengths), (0, axis, axis))
    pools = [jnp.stack([pool] * 3) if pool_is_mapped else pool for pool in (cache.k, cache.v)]
    text = lowered(mapped, jnp.stack([q] * 3), *pools)
    assert kernel_calls(text) == 1
    assert "stablehlo.while" not in text
    assert pools_made(text, cache) == []


def test_an_exported_decode_step_comes_back():
    pytest.importorskip("flatbuffers")
    exported = export.export(jax.jit(step, donate_argnums=(0, 1)), platforms=["cuda"])(*inputs())
    restored = export.deserialize(exported.serialize())
    assert restored.platforms == ("cuda",)
    assert restored.in_tree == exported.in_tree
    assert restored.out_tree == exported.out_tree
    assert restored.out_avals == exported.out_avals
    assert kernel_calls(restored.mlir_module()) == 1
