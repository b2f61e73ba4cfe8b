"""The builder of attention inputs, the table of options, and the error budget of all oracle tests."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged import BlockAllocator, paged_attention, paged_attention_reference


def paired(values, *others):
    """Combines the values in turn, so that each occurs: for sweeps whose product would compile too many kernels."""
    return [(value, *(other[i % len(other)] for other in others)) for i, value in enumerate(values)]


GARBAGE_IDS = (-7, -1, 2**31 - 1, 10**6)  # entries of a table after a sequence's blocks

# Every option of paged_attention, by its name in test ids. `heads` is 6 in all cases.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "window": {"sliding_window": 20},
    "window of all": {"sliding_window": 2**31 - 1},
    "window of one": {"sliding_window": 1},
    "soft cap": {"logits_soft_cap": 3.0},
    "alibi": {"alibi_slopes": np.linspace(0.02, 0.5, 6, dtype=np.float32)},
    "sinks": {"sinks": np.linspace(-2.0, 4.0, 6, dtype=np.float32)},
    "all": {
        "scale": 0.3,
        "sliding_window": 33,
        "logits_soft_cap": 3.0,
        "alibi_slopes": np.linspace(0.02, 0.5, 6, dtype=np.float32),
        "sinks": np.linspace(-2.0, 4.0, 6, dtype=np.float32),
    },
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of paged_attention, and the same numbers as contiguous arrays."""

    q: jax.Array
    k_cache: jax.Array
    v_cache: jax.Array
    block_tables: jax.Array
    lengths: jax.Array
    options: dict[str, Any]

    @property
    def arrays(self) -> tuple[Any, ...]:
        v_cache = None if "value_dim" in self.options else self.v_cache
        return self.q, self.k_cache, v_cache, self.block_tables, self.lengths

    def replace(self, **changes: Any) -> "Case":
        return dataclasses.replace(self, **changes)


def make_case(
    seed: int = 0,
    *,
    lengths: tuple[int, ...] | None = None,
    max_blocks: int = 5,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    value_dim: int | None = None,
    is_latent: bool = False,  # v_cache is part of k_cache
    block_size: int = 16,
    q_len: int | None = None,
    dtype: Any = jnp.float32,
    cache_dtype: Any = None,
    scale_shape: str | None = None,  # quantised caches: "tensor", "head" or "token_head"
    options: dict[str, Any] | None = None,
) -> Case:
    """Permuted tables, a block that two sequences share, garbage ids after each sequence's blocks, and NaN in every
    block outside the tables and in every slot past the end."""
    rng = np.random.default_rng(seed)
    if lengths is None:
        full = max_blocks * block_size
        lengths = (0, 1, block_size - 1, block_size, block_size + 1, full, full - block_size // 2, 2 * block_size + 3)
    seqs, held = len(lengths), [-(-length // block_size) for length in lengths]
    num_blocks = sum(held) + 4  # the null block, and three in no table
    ids = iter(rng.permutation(num_blocks - 1) + 1)
    tables = rng.choice(np.asarray(GARBAGE_IDS, np.int32), (seqs, max_blocks))
    for row, count in zip(tables, held, strict=True):
        row[:count] = [next(ids) for _ in range(count)]
    full_rows = [i for i, length in enumerate(lengths) if length >= block_size]
    if len(full_rows) > 1:
        tables[full_rows[1], 0] = tables[full_rows[0], 0]

    legal = np.zeros((num_blocks, block_size), bool)  # slots that hold a token of some sequence
    for row, length in zip(tables, lengths, strict=True):
        for j in range(-(-length // block_size)):
            legal[row[j], : min(block_size, length - j * block_size)] = True

    if cache_dtype == jnp.int8 and scale_shape is None:
        scale_shape = "tensor"  # int8 needs scales
    chosen: dict[str, Any] = dict(options or {})

    def cache(name: str, head_dim: int) -> jax.Array:
        cache_shape = (num_blocks, block_size, kv_heads, head_dim)
        values = rng.normal(size=cache_shape).astype(np.float32)
        if cache_dtype == jnp.int8:
            values = np.where(legal[..., None, None], np.clip(np.round(values * 40), -127, 127), 127)
        else:
            values[~legal] = np.nan
        if scale_shape is not None:
            shape = {"tensor": (), "head": (kv_heads,), "token_head": cache_shape[:3]}[scale_shape]
            scales = np.asarray(rng.uniform(0.01, 0.05, shape), np.float32)
            if scale_shape == "token_head":
                scales[~legal] = np.nan
            chosen[name] = jax.device_put(scales)
        return jax.device_put(values.astype(cache_dtype or dtype))  # `jnp.asarray` would compile a program per shape

    k_cache = cache("k_scale", head_dim)
    if not is_latent:
        v_cache = cache("v_scale", value_dim or head_dim)
    else:
        v_cache = jax.device_put(np.asarray(k_cache)[..., :value_dim])
        chosen = {"scale": 0.1, **chosen, "value_dim": value_dim}
    q_shape = (seqs, heads, head_dim) if q_len is None else (seqs, q_len, heads, head_dim)
    return Case(
        q=jax.device_put(rng.normal(size=q_shape).astype(np.float32).astype(dtype)),
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=jax.device_put(tables.astype(np.int32)),
        lengths=jax.device_put(np.asarray(lengths, np.int32)),
        options=chosen,
    )


# Shared by all modules, so that equal shapes are compiled once.
jitted_attention = jax.jit(
    paged_attention, static_argnames=("num_partitions", "implementation", "return_lse", "value_dim")
)
jitted_reference = jax.jit(paged_attention_reference, static_argnames=("return_lse", "value_dim"))


def oracle(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The right output and lse, float32: by NumPy in float64 (`TestReference` in `tests/attention/test_attention.py`
    compares it with the reference); of a large pool or a tree by the reference itself."""
    if case.k_cache.size > 2**20 or "tree_mask" in case.options:
        out, lse = jitted_reference(*case.arrays, **case.options, return_lse=True)
        return np.asarray(out), np.asarray(lse)
    out, lse = _by_numpy(case, np.float64, np.float64)
    return out.astype(np.float32), lse.astype(np.float32)


def plain(case: Case) -> np.ndarray:
    """The result of plain arrays at the case's own precision: logits and sums in float32, weights and output rounded
    to q's dtype. Its distance from the oracle is the yardstick of the error budget."""
    same = case.k_cache.dtype == case.q.dtype and "k_scale" not in case.options
    return _by_numpy(case, case.q.dtype if same else np.float32, case.q.dtype)[0].astype(np.float32)


def _by_numpy(case: Case, wide: Any, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Computes in the dtype `wide`, with output in `dtype`. Needs no compilation."""
    options: dict[str, Any] = {
        name: value if isinstance(value, int | float) else np.asarray(value) for name, value in case.options.items()
    }
    q, k_cache, v_cache, tables, lengths = map(
        np.asarray, (case.q, case.k_cache, case.v_cache, case.block_tables, case.lengths)
    )
    v_scale = options.get("k_scale" if "value_dim" in options else "v_scale")
    k, v = _dequantised(k_cache, options.get("k_scale"), wide), _dequantised(v_cache, v_scale, wide)
    with np.errstate(all="ignore"):
        return _plain(np, q.astype(wide), k, v, tables, lengths, dtype, options)


def _dequantised(cache: np.ndarray, factor: np.ndarray | None, dtype: Any) -> np.ndarray:
    if factor is None:
        return cache.astype(dtype)
    return cache.astype(dtype) * np.broadcast_to(factor, cache.shape[:3])[..., None]


def _plain(xp, q, k_cache, v_cache, block_tables, lengths, dtype, options):
    """`xp`: numpy, or jax.numpy."""
    ranked = q.ndim == 4
    q = q if ranked else q[:, None]
    seqs, q_len, heads, _ = q.shape
    group = heads // k_cache.shape[2]
    tokens = xp.arange(block_tables.shape[1] * k_cache.shape[1])
    positions = (lengths[:, None] - q_len + xp.arange(q_len)[None])[:, None, :, None]  # [seqs, 1, q_len, 1]
    distance = positions - tokens[None, None, None]
    seen = (distance >= 0) & (positions >= 0)
    if "sliding_window" in options:
        seen &= distance < options["sliding_window"]
    ids = xp.clip(block_tables, 0, k_cache.shape[0] - 1)

    def gather(cache):
        values = xp.repeat(cache[ids].reshape(seqs, -1, *cache.shape[2:]), group, axis=2)
        return xp.where(seen.any(axis=(1, 2))[:, :, None, None], values, xp.zeros_like(values))

    def product(spec, left, right):  # summed in float32, or in float64 if they are
        if xp is jnp:
            return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)
        wide = np.promote_types(left.dtype, np.float32)
        return np.einsum(spec, left.astype(wide), right.astype(wide), optimize=True)

    logits = product("sqhd,sthd->shqt", q, gather(k_cache))
    logits = logits * options.get("scale", q.shape[-1] ** -0.5)
    if "logits_soft_cap" in options:
        logits = options["logits_soft_cap"] * xp.tanh(logits / options["logits_soft_cap"])
    if "alibi_slopes" in options:
        logits = logits - options["alibi_slopes"][None, :, None, None] * distance.astype(xp.float32)
    logits = xp.where(seen, logits, -xp.inf)
    m = logits.max(axis=-1, keepdims=True)
    if "sinks" in options:
        m = xp.maximum(m, options["sinks"][None, :, None, None])
    m = xp.where(xp.isfinite(m), m, 0.0)
    weights = xp.exp(logits - m)
    total = weights.sum(axis=-1, keepdims=True)
    if "sinks" in options:
        total += xp.exp(options["sinks"][None, :, None, None] - m)
    weights = (weights / xp.where(total > 0, total, 1.0)).astype(v_cache.dtype)
    out = product("shqt,sthd->sqhd", weights, gather(v_cache)).astype(dtype)
    lse = xp.where(seen.any(axis=-1, keepdims=True), m + xp.log(total), -xp.inf)[..., 0].swapaxes(1, 2)
    return (out, lse) if ranked else (out[:, 0], lse[:, 0])


plain_jnp = jax.jit(functools.partial(_plain, jnp), static_argnames="dtype")  # for large arrays, on a GPU


def find_groups(case: Case, **which: Any) -> Any:
    """`BlockAllocator.prefix_groups` of a case's tables."""
    seqs, max_blocks = case.block_tables.shape
    sizes: Any = dict(num_blocks=case.k_cache.shape[0], block_size=case.k_cache.shape[1])
    allocator = BlockAllocator.create(**sizes, num_seqs=seqs, max_blocks_per_seq=max_blocks)
    allocator = dataclasses.replace(allocator, block_tables=case.block_tables, lengths=case.lengths)
    return allocator.prefix_groups(**(dict(q_len=case.q.shape[1] if case.q.ndim == 4 else 1) | which))


def within_budget(case: Case, out: Any) -> np.ndarray:
    """bool per row [seqs, (q_len,) heads]: whether a row's worst error is at most twice the error of `plain`, plus half
    a unit in the last place of its largest number and 3e-6. A norm over many rows would hide wrong ones."""
    expected, _ = oracle(case)
    out = np.asarray(out, np.float32)
    assert out.shape == expected.shape
    worst = np.abs(out - expected).max(axis=-1)
    budget = 2 * np.abs(plain(case) - expected).max(axis=-1)
    budget += float(jnp.finfo(case.q.dtype).eps) / 2 * np.abs(expected).max(axis=-1) + 3e-6
    return worst <= budget  # NaN is never within


def assert_within_budget(case: Case, out: Any) -> None:
    good = within_budget(case, out)
    assert good.all(), f"{(~good).sum()} of {good.size} rows over the budget, first at {np.argwhere(~good)[0]}"


def assert_lse(case: Case, lse: Any) -> None:
    _, expected = oracle(case)
    assert lse.dtype == jnp.float32
    tolerance = 1e-5 if case.q.dtype == jnp.float32 else 2e-3
    np.testing.assert_allclose(np.asarray(lse), expected, rtol=tolerance, atol=tolerance)
