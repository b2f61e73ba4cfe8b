"""The kernel that copies blocks: in interpret mode on a CPU with race detection, and lowered for a Hopper GPU."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged import KVCache, _device
from jaxpaged._by_kernel import NO_HINTS, Choice
from jaxpaged._cache import copy_blocks as copying
from jaxpaged.ops import copy_blocks
from pallas_kernels.copy_blocks import config as copy_config
from tests.kernels.interpret import races_found
from tests.transfers import (
    COPIES,
    EIGHT_BITS,
    EVERY_CACHE,
    block_leaves,
    by_numpy,
    filled,
    ids,
    numbered,
    random_pairs,
    shown,
)

pytestmark = pytest.mark.slow

H100 = _device.Gpu(132, 9.0)


@pytest.fixture
def on_an_h100(monkeypatch):
    monkeypatch.setattr(_device, "gpu", lambda: H100)


def interpreted(cache: KVCache, source_ids: jax.Array, destination_ids: jax.Array, **over) -> KVCache:
    """`over` overrides fields of the default configuration."""
    config = copy_config.default_config(
        block_numbers=int(np.prod(cache.k.shape[-3:])),
        itemsize=cache.k.dtype.itemsize,
        num_pools=2,
        num_layers=cache.k.shape[0] if cache.k.ndim == 5 else 1,
        num_pairs=source_ids.size,
        num_sms=1,
    )
    config = dataclasses.replace(config, **over)
    choice = Choice(copy_config.KERNEL, config, interpret=plgpu.InterpretGPUParams(detect_races=True))
    copied = jax.block_until_ready(copying.copy_by_kernel(choice, cache, source_ids, destination_ids))
    assert not races_found()
    return copied


@COPIES
@pytest.mark.parametrize("num_layers", [None, 3])
def test_literal_traces(source_ids, destination_ids, expected, num_layers):
    if not source_ids:
        return  # never comes to the kernel
    cache = interpreted(numbered(num_layers), ids(*source_ids), ids(*destination_ids))
    layers = np.asarray(expected)[None] + 10 * np.arange(num_layers or 1)[:, None]
    assert shown(cache.k) == (layers[0] if num_layers is None else layers).tolist()
    assert shown(cache.v) == (100 + (layers[0] if num_layers is None else layers)).tolist()


@EVERY_CACHE
def test_every_bit_of_every_cache(dtype, scale):
    before = filled(dtype, scale, num_layers=2)
    after = interpreted(before, ids(1, 2, 3), ids(2, 1, 5))
    for old, new in zip(block_leaves(before), block_leaves(after), strict=True):
        assert (new == old[:, [0, 2, 1, 3, 4, 3]]).all()
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, before)


@pytest.mark.parametrize("of", ["k", "v"])
def test_scales_of_tokens_of_one_alone(of):
    before = filled(jnp.int8, "token_head")
    before = dataclasses.replace(before, **{"k_scale" if of == "v" else "v_scale": jnp.ones(())})
    after = interpreted(before, ids(1, 2), ids(2, 4))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert (new == (old if old.ndim == 0 else old[jnp.asarray([0, 1, 1, 3, 2, 5])])).all()


@pytest.mark.parametrize("seed", range(4))
def test_any_pairs(seed):
    """Tiles and slices smaller than a block, and more of them than there are stages and programs."""
    before = filled(jnp.float32, None, 2, num_blocks=12)  # blocks of 96 numbers
    pairs = random_pairs(seed, num_pairs=10, num_blocks=(12, 40)[seed % 2])
    rings = dict(num_stages=2 + seed % 3, num_programs=1 + seed % 4, num_slice_programs=1 + seed % 2)
    shape = dict(width=16, rows=6, tile_rows=(6, 2)[seed % 2], slice_rows=(2, 1)[seed % 2], stage_slices=1 + seed // 2)
    after = interpreted(before, *pairs, **shape, **rings)
    for old, new in zip(block_leaves(before), block_leaves(after), strict=True):
        assert (new == by_numpy(old, *pairs)).all()


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_has_every_pair_that_counts_once_and_on_its_side(seed):
    num_blocks = (8, 30)[seed % 2]
    pairs, (num_direct, num_others) = copying.plan(*random_pairs(seed, 16, num_blocks), num_blocks)
    direct = pairs[:num_direct].tolist()
    others = pairs[len(pairs) - int(num_others) :].tolist()
    sources, destinations = (np.asarray(direct + others, int).reshape(-1, 2)[:, end].tolist() for end in (0, 1))
    assert len(set(destinations)) == len(destinations)
    for source, destination in direct:
        assert source not in destinations
        assert destination not in sources
    blocks = np.arange(num_blocks)[None]
    new = blocks.copy()
    new[:, destinations] = blocks[:, sources]
    assert (new == by_numpy(blocks, *random_pairs(seed, 16, num_blocks))).all()


@pytest.mark.parametrize(("side", "expected"), [(0, [0, 2, 1, 3, 4, 5, 6]), (1, [0, 1, 2, 3, 4, 5, 3])])
def test_a_plan_without_some_pairs_is_noticed(monkeypatch, side, expected):
    """The twin of the tests above: what is left out of the plan is not copied."""
    plan = copying.plan

    def one_side(*arguments):
        pairs, counts = plan(*arguments)
        return pairs, counts.at[side].set(0)

    monkeypatch.setattr(copying, "plan", one_side)
    cache = numbered(num_blocks=7)  # another shape than in any other test: nothing compiled is found again
    assert shown(interpreted(cache, ids(1, 2, 3), ids(2, 1, 6), num_stages=2 + side).k) == expected


def traced(block=(16, 8, 128), *, dtype=jnp.bfloat16, num_layers=None, num_blocks=64, num_pairs=8, sharding=None):
    """The traced call of what users call, on an H100."""
    layers = () if num_layers is None else (num_layers,)
    narrow = jnp.dtype(dtype).itemsize == 1
    pool = jax.ShapeDtypeStruct((*layers, num_blocks, *block), dtype, sharding=sharding)
    scale = jax.ShapeDtypeStruct(pool.shape[:-1], jnp.float32, sharding=sharding) if narrow else None
    some = jax.ShapeDtypeStruct((num_pairs,), jnp.int32, sharding=sharding)
    jitted = jax.jit(lambda *arrays: copy_blocks(*arrays), donate_argnums=0)  # a new one: nothing traced is found again
    return jitted.trace(KVCache(pool, pool, scale, scale), some, some)


def lower(*block, **shape) -> str:
    return traced(*block, **shape).lower(lowering_platforms=("cuda",)).as_text()


BLOCKS = [
    ((16, 8, 128), 32),
    ((16, 8, 128), None),
    ((8, 1, 120), 2),
    ((16, 5, 80), None),
    ((256, 8, 256), 2),
    ((2, 1, 8), 3),
]


NUMBERS = (jnp.bfloat16, EIGHT_BITS[0], jnp.float32)


@pytest.mark.parametrize(  # numbers of 2, 1 and 4 bytes: more than its size the kernel does not know of a dtype
    ("block", "num_layers", "dtype"),
    [(*block, NUMBERS[i % 3]) for i, block in enumerate(BLOCKS)] + [(*BLOCKS[0], dtype) for dtype in NUMBERS[1:]],
)
def test_lowers(on_an_h100, block, num_layers, dtype):
    text = lower(block, dtype=dtype, num_layers=num_layers)
    assert text.count("@mosaic_gpu_v2") == 1  # keys and values of all layers in one
    assert text.count("stablehlo.output_operand_alias<") == 2


def test_blocks_that_the_kernel_does_not_take_go_through_xla(on_an_h100):
    assert "mosaic_gpu" not in lower((3, 1, 8))
    assert "mosaic_gpu" not in lower(num_pairs=0)


def test_other_devices_go_through_xla(on_an_h100, monkeypatch):
    assert "mosaic_gpu" not in traced().lower(lowering_platforms=("cpu",)).as_text()
    monkeypatch.setattr(_device, "gpu", lambda: _device.Gpu(148, 10.0))
    assert "mosaic_gpu" not in lower()


def test_vmap_and_gradients_go_through_xla(on_an_h100):
    cache, pairs = numbered(), (ids(1, 2), ids(4, 5))
    caches = jax.tree.map(lambda *leaves: jnp.stack(leaves), cache, jax.tree.map(lambda leaf: -leaf, cache))
    batched = jax.vmap(copy_blocks, in_axes=(0, None, None))(caches, *pairs)
    assert [shown(k) for k in batched.k] == [[0, 1, 2, 3, 1, 2], [0, -1, -2, -3, -1, -2]]
    by_ids = jax.vmap(copy_blocks, in_axes=(None, 0, None))(cache, jnp.stack([ids(1, 2), ids(3, 0)]), pairs[1])
    assert [shown(v) for v in by_ids.v] == [[100, 101, 102, 103, 101, 102], [100, 101, 102, 103, 103, 105]]
    gradient = jax.grad(lambda cache: copy_blocks(cache, *pairs).k.sum())(cache)
    assert shown(gradient.k) == [1, 2, 2, 1, 0, 0]


@pytest.mark.parametrize(
    ("over", "reason"),
    [
        (dict(gpu=_device.GPUS["A100"]), "needs Hopper"),
        (dict(dtype=np.float64), "2 or 4 bytes"),
        (dict(block=(3, 8)), "a multiple of 16 numbers"),
        (dict(block=(2, 8), num_blocks=2**31), "fewer than 2\\^31 rows"),
        (dict(num_pairs=0), "one pair"),
        (dict(of_values=(8, 1, 128)), "of one shape"),
    ],
    ids=str,
)
def test_limits(over, reason):
    def limits(*, gpu=H100, dtype=jnp.bfloat16, num_blocks=1000, block=(16, 8, 128), of_values=None, num_pairs=8):
        pools = (jax.ShapeDtypeStruct((1, num_blocks, *each), dtype) for each in (block, of_values or block))
        pairs = jax.ShapeDtypeStruct((num_pairs, 2), jnp.int32)
        return next(copy_config.limits(copy_config.Copies(tuple(pools), pairs, None), gpu, NO_HINTS), None)

    assert limits() is None
    assert re.search(reason, limits(**over))


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("block_numbers", [16, 16384, 8 * 120, 16 * 5 * 80, 256 * 8 * 256, 16 * 97, 48])
def test_configurations_fit(block_numbers, itemsize):
    shape = dict(block_numbers=block_numbers, itemsize=itemsize, num_pools=2)
    config = copy_config.default_config(**shape, num_layers=32, num_pairs=512, num_sms=132)
    assert config.rows * config.width == block_numbers
    assert config.rows % config.tile_rows == config.tile_rows % config.slice_rows == 0
    row_bytes = config.width * itemsize
    assert config.num_stages >= 2
    assert (
        config.num_stages * copy_config.padded_rows(config.tile_rows, row_bytes) * row_bytes <= copy_config.SMEM_BYTES
    )
    assert 4 * (copy_config.SMEM_BYTES + 1024) <= 227 * 1024 + 1024
    assert config.num_stages * config.stage_slices <= copy_config.MAX_BARRIERS
    assert config.stage_slices == 1 or config.slice_rows * row_bytes % copy_config.ALIGNMENT == 0
    assert config.stage_slices * config.slice_rows <= config.tile_rows
    aside = config.num_slice_programs * config.slice_rows * row_bytes
    assert aside <= min(512 * 1024, 64 * block_numbers * itemsize)
    assert config.num_slice_programs <= config.num_programs == 4 * 132
    alone = copy_config.default_config(**shape, num_layers=1, num_pairs=1, num_sms=132)
    assert alone.num_programs == 2 * config.rows // config.tile_rows
