"""The plain result that the error budget is measured against."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import OPTIONS, make_case, plain, plain_jnp


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("q_len", [None, 3])
def test_numpy_and_jnp_agree(name, q_len, dtype):
    case = make_case(q_len=q_len, dtype=dtype, options=OPTIONS[name])
    by_jnp = np.asarray(plain_jnp(*case.arrays, case.q.dtype, case.options)[0], np.float32)
    tolerance = 1e-6 if dtype == jnp.float32 else 2 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(plain(case), by_jnp, rtol=tolerance, atol=tolerance)
