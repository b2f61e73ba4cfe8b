"""`merge_attention` against attention over all tokens at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import paged_attention
from jaxpaged.ops import merge_attention
from tests.cases import make_case, oracle

SINKS = np.linspace(-2.0, 4.0, 6, dtype=np.float32)


def halves(case, *, sinks_in_both=False):
    """(out, lse) over the first two blocks of each sequence, and over the rest."""
    first = jnp.minimum(case.lengths, 32)
    rest = case.lengths - first
    tables = case.block_tables[:, 2:]
    over_first = paged_attention(
        case.q, case.k_cache, case.v_cache, case.block_tables, first, sinks=SINKS, return_lse=True
    )
    sinks = SINKS if sinks_in_both else None
    return over_first, paged_attention(case.q, case.k_cache, case.v_cache, tables, rest, sinks=sinks, return_lse=True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_merged_halves_equal_the_whole(dtype):
    case = make_case(options={"sinks": SINKS}, dtype=dtype)
    (out_a, lse_a), (out_b, lse_b) = halves(case)
    out, lse = merge_attention(out_a, lse_a, out_b, lse_b)
    expected, expected_lse = oracle(case)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=3e-6 if dtype == jnp.float32 else 0.02)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5 if dtype == jnp.float32 else 0.02)
    assert (np.asarray(lse)[0] == -np.inf).all()  # length 0
    assert not np.asarray(out)[0].any()


def test_sinks_in_both_halves_are_noticed():
    case = make_case(options={"sinks": SINKS})
    (out_a, lse_a), (out_b, lse_b) = halves(case, sinks_in_both=True)
    out, _ = merge_attention(out_a, lse_a, out_b, lse_b)
    assert np.abs(out - oracle(case)[0]).max() > 1e-3


@pytest.mark.parametrize("of", ["out", "lse", "both"])
def test_gradients_where_no_token_was_seen(of):
    """Zero for outputs, lses and both; elsewhere the softmax of the two lses."""
    out_a = out_b = jnp.ones((1, 3, 4))
    lses = jnp.array([[-jnp.inf, 0.5, -jnp.inf]]), jnp.array([[-jnp.inf, -jnp.inf, 1.5]])

    def loss(*arrays):
        out, lse = merge_attention(*arrays)
        of_out, of_lse = out.sum(), jnp.where(jnp.isfinite(lse), lse, 0.0).sum()
        return {"out": of_out, "lse": of_lse, "both": of_out + of_lse}[of]

    gradients = jax.grad(loss, argnums=(0, 1, 2, 3))(out_a, lses[0], out_b, lses[1])
    weights = jnp.array([0.0, 1.0, 0.0]), jnp.array([0.0, 0.0, 1.0])
    for weight, of_out, of_lse in zip(weights, gradients[::2], gradients[1::2], strict=True):
        np.testing.assert_array_equal(of_out[0], np.repeat(weight[:, None], 4, axis=1) if of != "lse" else 0.0)
        np.testing.assert_array_equal(of_lse[0], weight if of != "out" else 0.0)


def test_nan_is_not_hidden():
    nan = jnp.full((1, 2), jnp.nan)
    out, lse = merge_attention(jnp.ones((1, 2, 4)), nan, jnp.zeros((1, 2, 4)), jnp.full((1, 2), -jnp.inf))
    assert np.isnan(out).all()
    assert np.isnan(lse).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(out_b=jnp.zeros((3, 2, 4))),
            r"one shape and dtype; got out_a.shape=\(1, 2, 4\), out_b.shape=\(3, 2, 4\)",
        ),
        (dict(lse_b=jnp.zeros(2)), r"an lse must be float32 \[1, 2\].*got float32 \[2\]"),
        (dict(lse_a=jnp.zeros((1, 2), jnp.bfloat16)), r"an lse must be float32 \[1, 2\].*got bfloat16 \[1, 2\]"),
    ],
)
def test_errors(changes, message):
    arguments = dict.fromkeys(("out_a", "out_b"), jnp.zeros((1, 2, 4))) | dict.fromkeys(
        ("lse_a", "lse_b"), jnp.zeros((1, 2))
    )
    with pytest.raises(ValueError, match=message):
        merge_attention(**arguments | changes)
