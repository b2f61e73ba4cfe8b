"""Calls the prefill kernel on the newest tokens of a case's sequences, as many of each as a test says."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import paged_prefill
from tests.cases import Case, assert_lse, assert_within_budget, oracle, within_budget
from tests.kernels.interpret import arguments_of

PADDING = 3  # rows of q after the last sequence's


def packed(x: Any, counts: tuple[int, ...]) -> np.ndarray:
    """[seqs, q_len, ...] -> [tokens, ...]: the last of each sequence's rows, without padding."""
    x = np.asarray(x)
    return np.concatenate([row[row.shape[0] - count :] for row, count in zip(x, counts, strict=True)])


def attend(
    case: Case, counts: tuple[int, ...], *, num_sms: int, interpret: Any, num_parts: int = 1, causal: bool = True
) -> tuple[jax.Array, jax.Array]:
    """Out [tokens + padding, heads, head_dim] and the lse."""
    a = arguments_of(case)
    config = paged_prefill.default_config(
        group=a.group,
        head_dim=a.q.shape[-1],
        num_sms=num_sms,
        num_parts=num_parts,
        causal=causal,
        itemsize=a.k_cache.dtype.itemsize,
    )
    q = jnp.asarray(packed(case.q, counts))
    q = jnp.concatenate([q, jnp.full((PADDING, *q.shape[1:]), jnp.nan, q.dtype)])
    starts = jnp.asarray(np.cumsum([0, *counts]), jnp.int32)

    return _launch(config, interpret, q, a, starts)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(config: paged_prefill.Config, interpret: Any, q: jax.Array, a: Any, starts: jax.Array) -> Any:
    token_bytes = 4 * a.k_cache.shape[2] * a.k_cache.shape[3]
    work = paged_prefill.make_work_list(starts, a.lengths, tokens=q.shape[0], token_bytes=token_bytes, config=config)
    return paged_prefill.launch(
        q,
        a.k_cache,
        a.v_cache,
        a.block_tables,
        work,
        a.options,
        config=config,
        interpret=interpret,
    )


def good_rows(case: Case, counts: tuple[int, ...], out: Any) -> np.ndarray:
    """bool [tokens, heads]: which rows are within the budget of the whole case."""
    q_len = case.q.shape[1]
    starts = np.cumsum([0, *counts])
    padded = np.zeros(case.q.shape, np.float32)
    for s, count in enumerate(counts):
        padded[s, q_len - count :] = np.asarray(out, np.float32)[starts[s] : starts[s + 1]]
    return packed(within_budget(case, padded), counts)


def check(case: Case, counts: tuple[int, ...], *, num_sms: int = 2, interpret: Any = None, num_parts: int = 1) -> None:
    out, lse = attend(case, counts, num_sms=num_sms, interpret=interpret, num_parts=num_parts)
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
