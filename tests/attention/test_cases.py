"""The oracle and the yardstick of the error budget."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import OPTIONS, jitted_reference, make_case, oracle, plain, plain_jnp


@pytest.mark.parametrize(
    "shape",
    [dict(q_len=5, options=options) for options in OPTIONS.values()]
    + [dict(q_len=100, options=OPTIONS["all"]), dict(heads=6, kv_heads=1)]
    + [
        dict(cache_dtype=cache_dtype, scale_shape=scale_shape)
        for cache_dtype, scale_shape in [
            (jnp.bfloat16, None),
            (jnp.float8_e4m3fn, "tensor"),
            (jnp.float8_e5m2, "head"),
            (jnp.int8, "token_head"),
        ]
    ],
)
def test_the_oracle_is_the_reference(shape):
    case = make_case(**shape)
    for ours, theirs in zip(jitted_reference(*case.arrays, **case.options, return_lse=True), oracle(case), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("q_len", [None, 3])
def test_numpy_and_jnp_agree(name, q_len, dtype):
    case = make_case(q_len=q_len, dtype=dtype, options=OPTIONS[name])
    by_jnp = np.asarray(plain_jnp(*case.arrays, case.q.dtype, case.options)[0], np.float32)
    tolerance = 1e-6 if dtype == jnp.float32 else 2 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(plain(case), by_jnp, rtol=tolerance, atol=tolerance)
