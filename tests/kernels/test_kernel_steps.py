"""The steps of docs/kernel.md compute attention, in interpret mode without races."""

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.kernels.kernel_steps import Kernel, gather, scan
from tests.cases import assert_within_budget, make_case
from tests.kernels.interpret import races_found

pytestmark = pytest.mark.slow
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
STEPS = {
    "gather": gather,
    "scan": scan,
    "a tile at a time": Kernel(interpret=INTERPRET),
    "all": Kernel(stages=3, mask_all=False, partitions=2, interpret=INTERPRET),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step(name):
    case = make_case(lengths=(1, 70, 150), max_blocks=11, kv_heads=2, heads=8, dtype=jnp.bfloat16)
    assert_within_budget(case, STEPS[name](*case.arrays))
    assert name in ("gather", "scan") or not races_found()
