"""What the threads of the kernel for adapters compute, by its PTX, without a GPU.

Optional, as `test_resources`: it needs the wheels that `make test-ptxas` installs.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lora.tiles import make_tiles
from tests.kernels import resources
from tests.kernels.adapters import Case, assert_right, assert_wrong
from tests.kernels.ptx import Grid

pytestmark = pytest.mark.skipif(not resources.installed(), reason="no ptxas: run make test-ptxas")

CASES = {
    "three parts": Case(tokens=40, parts=(320, 128, 64)),
    "one step of each": Case(tokens=3, parts=(64,), features=256),
    "rank 32": Case(tokens=33, parts=(256,), rank=32, features=256),
    "rank 64, float16": Case(tokens=20, parts=(128, 64), rank=64, features=768, dtype=jnp.float16),
    "many steps": Case(tokens=5, parts=(1088,), features=2048),
}
STAGES = {"three parts": dict(num_stages=4)}  # of the others as many as by default
ORDER = "adapters", "rows", "x", "a", "b", "out"  # of the kernel's parameters: as it uses them first


@pytest.fixture(scope="module", params=["sm_80", "sm_90", "sm_120"])
def kernels(request):
    """The PTX of each case, for a GPU."""
    shapes = {
        name: dict(kernel="lora", ptx=True, dtype=jnp.dtype(case.dtype).name, **STAGES.get(name, {}))
        | {field: value for field, value in dataclasses.asdict(case).items() if field != "dtype"}
        for name, case in CASES.items()
    }
    found = resources.compiled(request.param, shapes)
    return {name: its["lora"]["ptx"] for name, its in found.items()}


def run(case, ptx, *, late=True):
    """out of all programs; rows that none wrote are zeros."""
    x, a, b, ids = arrays = case.arrays()
    tiles = make_tiles(ids, case.adapters)
    named = dict(
        adapters=tiles.adapters,
        rows=jnp.tile(tiles.rows, (1, 4)),
        x=x,
        a=a.reshape(-1, case.features),
        b=b.reshape(-1, sum(case.parts)),
        out=jnp.zeros((case.tokens, sum(case.parts)), case.dtype),
    )
    grid = Grid(ptx, [np.asarray(named[name]) for name in ORDER])
    grid.run(len(tiles.adapters), len(case.parts), late=late)
    assert not any(written.any() for written in grid.written[:-1])
    has_adapter = (ids >= 0) & (ids < case.adapters)
    assert (grid.written[-1].reshape(case.tokens, -1) == np.asarray(has_adapter)[:, None]).all()
    return grid.arrays[-1].view(case.dtype).reshape(case.tokens, -1), arrays


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("late", [True, False], ids=["copies come late", "copies come early"])
def test_each_row_by_its_own_adapter(kernels, name, late):
    out, arrays = run(CASES[name], kernels[name], late=late)
    assert_right(CASES[name], out, *arrays)


def test_mistakes_are_noticed(kernels):
    case, ptx = CASES["three parts"], kernels["three parts"]

    def changed(*change):
        assert change[0] in ptx
        return run(case, ptx.replace(*change))

    for change in (
        ("cp.async.wait_group \t2", "cp.async.wait_group \t3"),  # one copy too many may still be under way
    ):
        out, arrays = changed(*change)
        assert_wrong(case, out, *arrays)
    with pytest.raises(AssertionError, match="no barrier"):
        changed("mbarrier.arrive", "//")
