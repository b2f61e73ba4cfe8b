"""Cases that test the kernels on a GPU: small, with poisoned memory, and together with every option."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged._attention.plan import make_plan
from jaxpaged._attention.reference import paged_attention_reference
from jaxpaged._attention.tree import tree_mask

TOLERANCE = 2e-2  # bfloat16 rounds weights and outputs by up to 2^-9 each; a wrong token has a much larger error
LENGTHS = (0, 1, 15, 16, 700, 1024)
PROMPTS: dict[str, Any] = dict(q_len=130, is_packed=True)  # q_len is the most tokens of a sequence

CASES: dict[str, dict[str, Any]] = {
    "bfloat16": dict(),
    "float16, head_dim 64, blocks of 32": dict(dtype=jnp.float16, head_dim=64, block_size=32),
    "head_dim 80, one head a KV head": dict(head_dim=80, heads=2),
    "head_dim 256, 3 partitions": dict(head_dim=256, num_partitions=3),
    "4 query tokens of 16 heads a KV head": dict(q_len=4, heads=32),
    "16 query tokens of 4 heads a KV head": dict(q_len=16),
    "64 heads a KV head": dict(heads=64, kv_heads=1),
    "a tree of 8 query tokens": dict(q_len=8, with_tree=True),
    "window, soft cap, ALiBi, sinks": dict(with_options=True),
    "a plan": dict(with_plan=True),
    "int8": dict(cache_dtype=jnp.int8),
    "int8, a scale a token and head": dict(cache_dtype=jnp.int8, with_token_scales=True),
    "float8_e4m3fn": dict(cache_dtype=jnp.float8_e4m3fn),
    "float8_e5m2": dict(cache_dtype=jnp.float8_e5m2),
    "a latent, 16 heads": dict(heads=16, kv_heads=1, head_dim=576, value_dim=512),
    "a latent, 128 heads": dict(heads=128, kv_heads=1, head_dim=576, value_dim=512),
    "prompts": PROMPTS,
    "prompts: float16, head_dim 64, blocks of 32": PROMPTS | dict(dtype=jnp.float16, head_dim=64, block_size=32),
    "prompts: head_dim 80, one head a KV head": PROMPTS | dict(head_dim=80, heads=2),
    "prompts: head_dim 256, 7 heads a KV head": PROMPTS | dict(head_dim=256, heads=14),
    "prompts: window, soft cap, ALiBi, sinks": PROMPTS | dict(with_options=True),
    "prompts: int8, a scale a token and head": PROMPTS | dict(cache_dtype=jnp.int8, with_token_scales=True),
    "prompts: float8_e4m3fn": PROMPTS | dict(cache_dtype=jnp.float8_e4m3fn),
}


class Case(NamedTuple):
    arrays: tuple[Any, ...]  # q, caches, tables, lengths
    options: dict[str, Any]  # options of both paged_attention and the reference
    how: dict[str, Any]  # other arguments of paged_attention
    value_dim: int | None  # for a latent cache


def make_case(
    *,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 128,
    block_size: int = 16,
    q_len: int = 1,
    dtype: Any = jnp.bfloat16,
    cache_dtype: Any = None,
    with_token_scales: bool = False,
    with_options: bool = False,
    with_plan: bool = False,
    with_tree: bool = False,
    is_packed: bool = False,
    num_partitions: int | None = None,
    value_dim: int | None = None,  # for a latent cache
) -> Case:
    """Makes a case with blocks in random order, and NaN in every slot and scale that no sequence owns."""
    rng, lengths = np.random.default_rng(0), LENGTHS
    tables, owned = _blocks(rng, lengths, block_size)

    def cache() -> jax.Array:
        values = rng.normal(size=(*owned.shape, kv_heads, head_dim)).astype(np.float32)
        if cache_dtype == jnp.int8:
            return jnp.asarray(np.clip(np.round(values * 40), -127, 127), jnp.int8)
        return jnp.asarray(np.where(owned[..., None, None], values, np.nan)).astype(cache_dtype or dtype)

    options: dict[str, Any] = {}
    if cache_dtype is not None:
        factor = np.where(owned[..., None], 1, np.nan) if with_token_scales else np.ones(())
        scales = np.broadcast_to(factor, (*factor.shape[:-1], kv_heads)).astype(np.float32)
        options |= dict(k_scale=jnp.asarray(scales / 40), v_scale=jnp.asarray(scales / 10))
    if with_options:
        options |= dict(sliding_window=300, logits_soft_cap=5.0)
        options |= dict(alibi_slopes=jnp.linspace(0.01, 0.5, heads), sinks=jnp.linspace(-2.0, 2.0, heads))
    if with_tree:
        parents = np.tile((np.arange(q_len) - 1) // 2, (len(lengths), 1))  # each token has two children
        options["tree_mask"] = tree_mask(jnp.asarray(parents, jnp.int32))
    rows: tuple[int, ...] = (len(lengths), q_len)
    if is_packed:
        starts = np.cumsum([0, *(min(length, q_len) for length in lengths)])
        rows = (int(starts[-1]),)
        options["query_starts"] = jnp.asarray(starts, jnp.int32)
    q = jnp.asarray(rng.normal(size=(*rows, heads, head_dim)), jnp.float32).astype(dtype)
    if value_dim is not None:
        options["scale"] = jnp.float32(head_dim**-0.5)
    arrays = (
        q,
        cache(),
        cache() if value_dim is None else None,
        jnp.asarray(tables),
        jnp.asarray(lengths, jnp.int32),
    )
    how: dict[str, Any] = {} if num_partitions is None else dict(num_partitions=num_partitions)
    if with_plan:
        how["plan"] = make_plan(arrays[-1], num_kv_heads=kv_heads, q_len=q_len)
    return Case(arrays, options, how, value_dim)


def _blocks(rng: np.random.Generator, lengths: tuple[int, ...], block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Block tables, int32 [seqs, max_blocks], and whether a sequence owns a slot, bool [blocks, block_size]."""
    held = [-(-length // block_size) for length in lengths]
    ids = rng.permutation(sum(held)) + 1
    tables = np.full((len(lengths), max(held)), -1, np.int32)  # -1: entries past a sequence's end must not be followed
    owned = np.zeros((sum(held) + 1, block_size), bool)
    for row, count, end, length in zip(tables, held, np.cumsum(held), lengths, strict=True):
        row[:count] = ids[end - count : end]
        for i, block_id in enumerate(row[:count]):
            owned[block_id, : length - i * block_size] = True
    return tables, owned


def worst_error(case: Case, attend: Callable[..., tuple[jax.Array, jax.Array]]) -> float:
    """The larger of two errors: of `lse`, and of any row of `out` relative to the largest number in that row. NaN or
    infinity if a result is not finite. `attend` has the arguments of `paged_attention` and returns out and lse."""
    out, lse = jax.jit(lambda arrays, options: attend(*arrays, **options, **case.how, value_dim=case.value_dim))(
        case.arrays, case.options
    )
    expected, expected_lse = jax.jit(
        lambda arrays, options: paged_attention_reference(*arrays, **options, value_dim=case.value_dim, return_lse=True)
    )(case.arrays, case.options)
    largest = jnp.maximum(jnp.abs(expected).max(axis=-1), 1e-6)
    of_rows = jnp.abs(out.astype(jnp.float32) - expected).max(axis=-1) / largest
    seen = expected_lse > -jnp.inf
    of_lse = jnp.where(seen, jnp.abs(lse - expected_lse), jnp.where(lse == expected_lse, 0.0, jnp.inf))
    return float(jnp.maximum(of_rows.max(), of_lse.max()))


def check(name: str, attend: Callable[..., tuple[jax.Array, jax.Array]]) -> tuple[str, bool]:
    """Runs a case. Returns its error, or why it failed, as text, and whether it is right."""
    try:
        error = worst_error(make_case(**CASES[name]), attend)
    except Exception as failure:  # whatever it is, the other cases must still run
        return f"{type(failure).__name__}: {str(failure).partition('\n')[0][:80]}", False
    return f"{error:.1e}", error < TOLERANCE
