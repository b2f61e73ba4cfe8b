"""Trees of drafted tokens in the decode kernel: in interpret mode with race detection."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import tree_mask
from tests.cases import OPTIONS, make_case, oracle
from tests.kernels.interpret import attend, races_found

pytestmark = pytest.mark.slow


def tree_case(q_len, *, lengths=(0, 5, 40, 150), **shape):
    """Each sequence another random tree; the tokens on both sides of a tile's end are part of the last one's."""
    rng = np.random.default_rng(q_len)
    parents = np.stack([rng.integers(-1, np.arange(q_len)) for _ in lengths])
    case = make_case(lengths=lengths, max_blocks=10, q_len=q_len, dtype=jnp.bfloat16, **shape)
    options = case.options | {"tree_mask": tree_mask(jnp.asarray(parents, jnp.int32))}
    return case.replace(options=options)


def errors(case, **how):
    """The largest of each sequence, in its outputs and its lse."""
    out, lse = attend(case, **how)
    expected, expected_lse = oracle(case)
    lse, expected_lse = (np.where(np.isfinite(x), x, -1e3) for x in (np.asarray(lse), expected_lse))
    worst = np.abs(np.asarray(out, np.float32) - expected).max(axis=(1, 2, 3))
    return np.maximum(worst, np.abs(lse - expected_lse).max(axis=(1, 2)))


@pytest.mark.parametrize(
    ("q_len", "shape", "how"),
    [
        (8, dict(options=OPTIONS["soft cap"] | OPTIONS["sinks"]), how)  # 24 rows
        for how in (dict(), dict(num_partitions=3))
    ]
    + [
        (40, dict(heads=2, kv_heads=2), how)  # two words
        for how in (dict(), dict(num_partitions=3))
    ]
    + [(8, dict(cache_dtype=jnp.int8, scale_shape="token_head"), how) for how in (dict(), dict(num_partitions=3))],
)
def test_trees(q_len, shape, how):
    case = tree_case(q_len, **shape)
    assert (errors(case, **how) < 0.03).all()
    assert not races_found()


def test_bits_that_are_no_tree():
    """The kernel follows the bits, as the reference does, whether or not a token sees all that its ancestors see; the
    first sequence is shorter than its new tokens."""
    case = make_case(lengths=(5, 20), max_blocks=10, heads=3, kv_heads=1, head_dim=128, q_len=8, dtype=jnp.bfloat16)
    closed = oracle(case)[0]
    bits = np.random.default_rng(0).integers(2**32, size=(2, 8, 1), dtype=np.uint32)
    case = case.replace(options={"tree_mask": jnp.asarray(bits)})
    expected, expected_lse = oracle(case)
    assert np.abs(expected - closed)[1].max() > 0.3
    out, lse = attend(case, num_partitions=1)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.03)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-3)


def test_another_tree_is_noticed():
    case = tree_case(8)
    chain = tree_mask(jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32) - 1, (4, 8)))
    out, _ = attend(case.replace(options=case.options | {"tree_mask": chain}))
    worst = np.abs(np.asarray(out, np.float32) - oracle(case)[0]).max(axis=(1, 2, 3))
    assert (worst[1:] > 0.1).all()
