"""Calls the prefill kernel on the newest tokens of a case's sequences; a test says how many of each."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged._attention.call import Call
from jaxpaged._attention.choose import Choice
from jaxpaged._attention.run import run
from pallas_kernels.prefill.config import default_config
from pallas_kernels.prefill.portable import config as portable_config
from tests.cases import Case, assert_lse, assert_within_budget, oracle, within_budget
from tests.kernels.interpret import make_call

PADDING = 3  # rows of q after the last sequence's


def packed(x: Any, counts: tuple[int, ...]) -> np.ndarray:
    """[seqs, q_len, ...] -> [tokens, ...]: the last of each sequence's rows, without padding."""
    x = np.asarray(x)
    return np.concatenate([row[row.shape[0] - count :] for row, count in zip(x, counts, strict=True)])


def with_trees(case: Case, counts: tuple[int, ...], words: int) -> tuple[Case, np.ndarray]:
    """A random tree of each sequence's newest tokens, if they are not more than there are bits: the case with that of
    all its rows, a chain before; and the mask of the packed rows, uint32 [tokens + padding, words]."""
    rng, q_len = np.random.default_rng(0), case.q.shape[1]
    padded, packed = [], []
    for count in counts:
        parents = np.arange(q_len) - 1
        if count <= 32 * words:  # a root follows the last token of the history
            parents[q_len - count :] = q_len - count + rng.integers(-1, np.arange(count))
        seen = np.eye(q_len, dtype=bool)
        for token in np.flatnonzero(parents >= 0):
            seen[token] |= seen[parents[token]]
        padded.append(_bits(seen, -(-q_len // 32)))
        newest = seen[q_len - count :, q_len - count :]
        packed.append(_bits(newest, words) if count <= 32 * words else np.full((count, words), 0x5A5A5A5A, np.uint32))
    mask = np.concatenate([*packed, np.zeros((PADDING, words), np.uint32)])
    return case.replace(options=case.options | {"tree_mask": jax.device_put(np.stack(padded))}), mask


def _bits(seen: np.ndarray, words: int) -> np.ndarray:
    """bool [n, m] as uint32 [n, words]."""
    padded = np.pad(seen, ((0, 0), (0, 32 * words - seen.shape[1])))
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


def attend(
    case: Case,
    counts: tuple[int, ...],
    *,
    num_sms: int,
    interpret: Any,
    num_parts: int = 1,
    causal: bool = True,
    mask: Any = None,
    portable_for: float | None = None,
    **changes: Any,
) -> tuple[jax.Array, jax.Array]:
    """Out [tokens + padding, heads, head_dim] and the lse. `mask`: of `with_trees`. `portable_for`: by the portable
    kernel, as on a GPU of that compute capability. `changes`: of the default configuration."""
    a = make_call(case)
    shape = dict(
        group=a.group, head_dim=a.head_dim, num_parts=num_parts, causal=causal, itemsize=a.k_cache.dtype.itemsize
    )
    config: Any = default_config(**shape, num_sms=num_sms)
    if portable_for is not None:
        config = portable_config.default_config(**shape, compute_capability=portable_for)
    config = dataclasses.replace(config, **changes)
    q = jnp.asarray(packed(case.q, counts))
    q = jnp.concatenate([q, jnp.full((PADDING, *q.shape[1:]), jnp.nan, q.dtype)])
    starts = jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
    arrays = q, a.k_cache, a.v_cache, a.block_tables, a.lengths, a.options, starts
    mask = None if mask is None else jnp.asarray(mask)
    kernel = "paged_prefill" if portable_for is None else "portable_prefill"
    choice = Choice(kernel, config, interpret=interpret)
    return run(choice, Call(*arrays, mask, causal=causal))


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
