"""The portable prefill kernel on a GPU, in both forms of Mosaic: `pytest -m gpu`. Pools are poisoned, as in all cases.

native     as Mosaic compiles it for this GPU
sm_80      Mosaic told that the GPU is an A100
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import _device
from jaxpaged._selftest.kept import quick_test
from tests.attention.conformance import Conformance
from tests.cases import OPTIONS, make_case, paired
from tests.kernels import prefill
from tests.kernels.lowering import mosaic_for

pytestmark = pytest.mark.gpu

BF16 = jnp.bfloat16
LENGTHS = (0, 1, 15, 33, 300, 777, 1040, 64)
COUNTS = (0, 1, 15, 7, 300, 100, 33, 64)


def ragged_case(**shape):
    most = max(shape.get("lengths", LENGTHS))
    blocks = -(-most // shape.get("block_size", 16))
    return make_case(**(dict(lengths=LENGTHS, max_blocks=blocks, q_len=max(COUNTS), head_dim=128, dtype=BF16) | shape))


class TestPortablePrefill(Conformance):
    """Chunks, prompts, and the last tokens of long sequences, as on a GPU with little shared memory."""

    case = long_case = staticmethod(ragged_case)
    options_of_partitions = "sinks", "all"
    q_lens = ()
    dtypes = (jnp.float16,)
    head_dims = 32, 64, 80, 192, 256
    block_sizes = 8, 64, 256
    groups = (2, 2), (7, 1), (64, 1)
    scaled_caches = (jnp.int8, "token_head"), (jnp.float8_e4m3fn, "head"), (jnp.float8_e5m2, "tensor")
    compute_capability = 8.9

    def attend(self, case, num_partitions=1):
        lengths = np.asarray(case.lengths)
        counts = COUNTS if len(lengths) == len(COUNTS) else tuple(np.minimum(lengths, case.q.shape[1]).tolist())
        how = dict(num_sms=132, interpret=None, num_parts=num_partitions, portable_for=self.compute_capability)
        first, second = (prefill.attend(case, counts, **how) for _ in range(2))
        tokens = sum(counts)
        for x, y in zip(first, second, strict=True):
            np.testing.assert_array_equal(np.asarray(x[:tokens], np.float32), np.asarray(y[:tokens], np.float32))
        return prefill.unpacked(case, counts, *first)


SHAPES = {
    "all": dict(options=OPTIONS["all"]),
    "wide": dict(head_dim=256, options=OPTIONS["sinks"]),
    "int8": dict(cache_dtype=jnp.int8, scale_shape="token_head"),
    "float8 wide": dict(cache_dtype=jnp.float8_e5m2, scale_shape="token_head", head_dim=256),
}


@pytest.mark.parametrize(
    ("name", "compute_capability", "form"),
    [*paired(SHAPES, (8.0,), ("sm_80",)), *paired(SHAPES, (8.0, 10.0), ("native",))],
)
def test_other_shared_memory(name, compute_capability, form, request):
    if form == "sm_80":  # the jitted launch is the same
        jax.clear_caches()
        request.addfinalizer(jax.clear_caches)
    with mosaic_for(8.0) if form == "sm_80" else contextlib.nullcontext():
        prefill.check(ragged_case(**SHAPES[name]), COUNTS, num_sms=132, portable_for=compute_capability)


@pytest.mark.parametrize("compute_capability", [8.0, 8.9])
def test_the_self_test_of_other_gpus(compute_capability):
    gpu = dataclasses.replace(_device.gpu(), compute_capability=compute_capability)
    assert quick_test(gpu) == ""
