"""The kernel for adapters: in interpret mode, as PTX without a GPU, lowered, and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxpaged
from jaxpaged import _device, _lora
from pallas_kernels.common.interpret import interpret_mode
from pallas_kernels.lora.config import default_config, limit
from pallas_kernels.lora.kernel import launch
from pallas_kernels.lora.tiles import make_tiles
from tests.kernels import resources
from tests.kernels.adapters import ADAPTERS, Case, assert_right, assert_wrong
from tests.kernels.interpret import H100, races_found
from tests.kernels.lowering import mosaic_for, traced_lora

pytestmark = pytest.mark.slow

CASES = {
    "three parts, the last step of two is not whole": Case(tokens=40, parts=(320, 128, 64)),
    "one tile": Case(tokens=3, parts=(64,), features=256),
    "rank 32": Case(tokens=33, parts=(256,), rank=32, features=256),
    "rank 64, float16": Case(tokens=20, parts=(128, 64), rank=64, features=256, dtype=jnp.float16),
}


def interpreted(case, *arrays, **changes):
    with interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out = jax.block_until_ready(launch(*arrays, config=dataclasses.replace(case.config, **changes)))
    assert not races_found()
    return out


@pytest.mark.parametrize("name", CASES)
def test_each_row_by_its_own_adapter(name):
    case = CASES[name]
    arrays = case.arrays()
    assert_right(case, interpreted(case, *arrays), *arrays)
    *matrices, ids = arrays
    assert_wrong(case, interpreted(case, *matrices, jnp.roll(ids, 1)), *arrays)


@pytest.mark.parametrize("num_stages", [2, 3, 9])  # fewer than there are steps, and more
def test_stages(num_stages):
    case = Case(tokens=20, parts=(320,), features=512)
    arrays = case.arrays()
    assert_right(case, interpreted(case, *arrays, num_stages=num_stages), *arrays)


def test_bits_do_not_depend_on_neighbours():
    case = Case(tokens=40, parts=(64,), features=256)
    *matrices, ids = case.arrays()
    together = interpreted(case, *matrices, ids)
    for i in (0, 7):
        alone = interpreted(case, *matrices, jnp.where(jnp.arange(case.tokens) == i, ids, -1))
        assert (alone[i] == together[i]).all()


def test_no_row_has_an_adapter():
    case = Case(tokens=5, parts=(64,), features=256)
    *matrices, ids = case.arrays()
    assert not interpreted(case, *matrices, jnp.full_like(ids, -1)).any()


@pytest.mark.parametrize("tokens", [1, 5, 16, 100])
def test_each_row_is_in_one_tile_of_its_own_adapter(tokens):
    ids = np.asarray(Case(tokens=tokens, parts=(64,)).arrays()[3])
    rows, adapters = map(np.asarray, make_tiles(jnp.asarray(ids), ADAPTERS))
    is_row = rows < tokens
    assert sorted(rows[is_row].tolist()) == np.flatnonzero((ids >= 0) & (ids < ADAPTERS)).tolist()
    assert (ids[rows[is_row]] == np.broadcast_to(adapters[:, None], rows.shape)[is_row]).all()
    assert (adapters[~is_row.any(axis=1)] == ADAPTERS).all()


def test_all_rows_of_as_many_adapters_as_there_can_be():
    """No tile is missing if each adapter has one that is nearly empty."""
    ids = jnp.asarray([i for i in range(4) for _ in range(17)], jnp.int32)
    rows, adapters = make_tiles(ids, 4)
    assert adapters.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sorted(rows[rows < 68].tolist()) == [*range(68)]


GOOD = dict(rank=16, features=4096, parts=(4096, 1024, 1024), compute_capability=9.0)


@pytest.mark.parametrize(
    ("dtypes", "wrong", "message"),
    [
        ([jnp.float32] * 3, {}, "all bfloat16 or all float16; got float32, float32, float32"),
        ([jnp.bfloat16, jnp.float16, jnp.float16], {}, "got bfloat16, float16, float16"),
        ([jnp.bfloat16] * 3, dict(rank=8), "got rank=8. Fill a smaller one up with zeros"),
        ([jnp.bfloat16] * 3, dict(rank=128), "got rank=128"),
        ([jnp.bfloat16] * 3, dict(features=4000), "got features=4000 and outputs=6144"),
        ([jnp.bfloat16] * 3, dict(parts=(4096, 32)), "got features=4096 and outputs=4128"),
        ([jnp.bfloat16] * 3, dict(compute_capability=7.5), "got compute_capability=7.5"),
    ],
)
def test_what_the_kernel_does_not_take(dtypes, wrong, message):
    assert message in limit(dtypes, **GOOD | wrong)
    assert limit([jnp.bfloat16] * 3, **GOOD) == limit([jnp.float16] * 3, **GOOD) == ""


def test_stages_fit_every_gpu():
    for gpu in resources.GPUS:
        of = functools.partial(default_config, parts=(64,), compute_capability=resources.compute_capability(gpu))
        assert [of(rank=rank).num_stages for rank in (16, 32, 64)] == ([6, 3, 3] if gpu in TWICE else [5, 2, 2])


TWICE = "sm_90", "sm_100"  # two programs share a SM


def test_it_must_be_named(monkeypatch):
    case = Case(tokens=5, parts=(64,), features=256)
    *matrices, ids = case.arrays()
    arrays = *(jnp.nan_to_num(x) for x in matrices), ids
    function = functools.partial(jaxpaged.lora, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match='implementation must be None, "mosaic_gpu" or "xla"'):
        jaxpaged.lora(*arrays, implementation="triton")
    with pytest.raises(NotImplementedError, match="need an NVIDIA GPU"):
        function(*arrays)
    monkeypatch.setattr(_device, "gpu", lambda: H100)
    with pytest.raises(NotImplementedError, match=r'got float32, .* Or pass implementation="xla"'):
        function(arrays[0].astype(jnp.float32), *arrays[1:])
    assert "by_kernel" in str(jax.make_jaxpr(function)(*arrays))
    assert "by_kernel" not in str(jax.make_jaxpr(jaxpaged.lora)(*arrays))
    # Lowered for a CPU it is XLA, and so are its gradients.
    assert (function(*arrays) == jaxpaged.lora(*arrays, implementation="xla")).all()

    def loss(function, *arrays):
        return jnp.sin(function(*arrays, ids).astype(jnp.float32)).sum()

    got, wanted = (jax.grad(functools.partial(loss, f), (0, 1, 2))(*arrays[:3]) for f in (function, jaxpaged.lora))
    for ours, theirs in zip(got, wanted, strict=True):
        assert np.abs(np.asarray(theirs, np.float32)).max() > 0.1
        assert (ours == theirs).all()
    mapped = jax.vmap(lambda x: function(x, *arrays[1:]))(jnp.stack([arrays[0], 2 * arrays[0]]))
    assert (mapped[1] == jaxpaged.lora(2 * arrays[0], *arrays[1:])).all()


@pytest.mark.parametrize("rank", [16, 64])
def test_lowers(rank):
    with mosaic_for(9.0):
        text = traced_lora(rank=rank).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1


@pytest.mark.parametrize("tokens", [16, 256, 768])
@pytest.mark.parametrize("outputs", [4096, 1024])
@pytest.mark.gpu
def test_on_a_gpu(tokens, outputs):
    case = Case(tokens=tokens, parts=(outputs,), features=4096, adapters=64)
    *matrices, ids = case.arrays()
    function = jax.jit(functools.partial(jaxpaged.lora, implementation="mosaic_gpu"))
    out = function(*matrices, ids)
    assert_right(case, out, *matrices, ids)
    assert (out == function(*matrices, ids)).all()
    alone = function(*matrices, jnp.where(jnp.arange(tokens) == 5, ids, -1))
    assert (alone[5] == out[5]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_parts_ranks_and_dtypes_on_a_gpu(name):
    case = CASES[name]
    arrays = case.arrays()
    sizes = dict(rank=case.rank, parts=case.parts, compute_capability=_device.gpu().compute_capability)
    assert_right(case, jax.jit(functools.partial(launch, config=default_config(**sizes)))(*arrays), *arrays)
    *matrices, ids = arrays
    mapped = jax.jit(jax.vmap(functools.partial(_lora._by_kernel, case.config), (0, None, None, None)))
    if len(case.parts) == 1:
        assert_right(case, mapped(matrices[0][None], *matrices[1:], ids)[0], *arrays)
