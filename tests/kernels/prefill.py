"""Calls the prefill kernel on the newest tokens of a case's sequences; a test says how many of each."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged._attention.run import run
from jaxpaged._by_kernel import Choice
from pallas_kernels import prefill
from pallas_kernels.common.interface import Call
from pallas_kernels.prefill import portable
from pallas_kernels.prefill.config import default_config
from pallas_kernels.prefill.portable import config as portable_config
from tests.cases import Case, assert_lse, assert_within_budget, oracle, within_budget
from tests.kernels.interpret import make_call

PADDING = 3  # rows of q after the last sequence's


def packed(x: Any, counts: tuple[int, ...]) -> np.ndarray:
    """[seqs, q_len, ...] -> [tokens, ...]: the last of each sequence's rows, without padding."""
    x = np.asarray(x)
    return np.concatenate([row[row.shape[0] - count :] for row, count in zip(x, counts, strict=True)])


def attend(
    case: Case,
    counts: tuple[int, ...],
    *,
    num_sms: int,
    interpret: Any,
    causal: bool = True,
    portable_for: float | None = None,
    **changes: Any,
) -> tuple[jax.Array, jax.Array]:
    """Out [tokens + padding, heads, head_dim] and the lse. `portable_for`: by the portable kernel, as on a GPU of
    that compute capability. `changes`: of the default configuration."""
    a = make_call(case)
    config: Any
    if portable_for is None:
        config = default_config(a.shapes(), num_sms=num_sms)
    else:
        config = portable_config.default_config(a.shapes(), compute_capability=portable_for)
    config = dataclasses.replace(config, causal=causal, **changes)
    q = jnp.asarray(packed(case.q, counts))
    q = jnp.concatenate([q, jnp.full((PADDING, *q.shape[1:]), jnp.nan, q.dtype)])
    starts = jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
    arrays = q, a.k_cache, a.v_cache, a.block_tables, a.lengths, a.options, a.value_dim, starts
    kernel = prefill.KERNEL if portable_for is None else portable.KERNEL
    choice = Choice(kernel, config, interpret=interpret)
    return run(choice, Call(*arrays, causal=causal))


def unpacked(case: Case, counts: tuple[int, ...], out: Any, lse: Any) -> tuple[np.ndarray, np.ndarray]:
    """The results of packed rows in the shapes of the case; the other rows are the oracle's."""
    outs, lses = (x.copy() for x in oracle(case))
    outs, start = outs.astype(out.dtype), 0
    for s, count in enumerate(counts):
        rows = slice(case.q.shape[1] - count, None)
        outs[s, rows], lses[s, rows] = out[start : start + count], lse[start : start + count]
        start += count
    return outs, lses


def good_rows(case: Case, counts: tuple[int, ...], out: Any) -> np.ndarray:
    """bool [tokens, heads]: which rows are within the budget of the whole case."""
    q_len = case.q.shape[1]
    starts = np.cumsum([0, *counts])
    padded = np.zeros(case.q.shape, np.float32)
    for s, count in enumerate(counts):
        padded[s, q_len - count :] = np.asarray(out, np.float32)[starts[s] : starts[s + 1]]
    return packed(within_budget(case, padded), counts)


def check(case: Case, counts: tuple[int, ...], *, num_sms: int = 2, **how: Any) -> None:
    out, lse = attend(case, counts, num_sms=num_sms, **{"interpret": None} | how)
    tokens = sum(counts)
    assert out.dtype == case.q.dtype
    assert good_rows(case, counts, out).all()
    np.testing.assert_allclose(lse[:tokens], packed(oracle(case)[1], counts), rtol=2e-3, atol=2e-3)
    assert not np.asarray(out[tokens:]).any()
    assert (np.asarray(lse[tokens:]) == -np.inf).all()


def check_shared(case: Case, *, num_sms: int, interpret: Any = None, num_parts: int = 1) -> None:
    """Of sequences with one table and one length, a token of each: all of them as the queries of one sequence."""
    one = case.replace(q=case.q[None], block_tables=case.block_tables[:1], lengths=case.lengths[:1])
    how = dict(num_sms=num_sms, interpret=interpret, num_parts=num_parts, causal=False)
    out, lse = attend(one, case.q.shape[:1], **how)
    tokens = case.q.shape[0]
    assert_within_budget(case, out[:tokens])
    assert_lse(case, lse[:tokens])
    assert not np.asarray(out[tokens:]).any()
