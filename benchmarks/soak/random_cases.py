"""Random calls of paged_attention against the oracle: `python -m benchmarks.soak.random_cases`.

A family fixes everything static: shapes, dtype, partitions, the options in use. The rest is drawn for each case, on the
device, inside one compiled loop: lengths (0, 1 and lengths around a block's end included), tables, blocks that two
sequences share, garbage ids after each sequence's blocks, NaN, infinity or huge numbers in every slot without a token,
and the values of all options. A case passes if every row is within the error budget of tests/cases.py (twice the
error of plain jnp at the same precision, plus half a unit in the last place of the row's largest number and 3e-6) and
every lse is within 0.2%.

Each family also has cases with an injected mistake, keys instead of values, which must be found.
"""

import argparse
import dataclasses
import functools
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harness import add_output, compile_all, open_store
from jaxpaged import paged_attention, paged_attention_reference
from tests.cases import GARBAGE_IDS, plain_jnp

SEQS = 8
TWINS = 8  # cases per family with the injected mistake
LSE_TOLERANCE = 2e-3
AT_ONCE = 14  # families that are compiled together


@dataclasses.dataclass(frozen=True)
class Family:
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    max_blocks: int
    num_partitions: int | None = None
    q_len: int = 1
    options: tuple[str, ...] = ()
    dtype: str = "bfloat16"

    @property
    def capacity(self) -> int:
        return self.max_blocks * self.block_size


ALL = ("scale", "sliding_window", "logits_soft_cap", "alibi_slopes", "sinks")
FAMILIES = (
    Family("plain", 8, 2, 128, 16, 40),
    Family("single pass", 8, 2, 128, 16, 40, num_partitions=1),
    Family("seven partitions", 8, 2, 128, 16, 40, num_partitions=7),
    Family("more partitions than tiles", 4, 1, 128, 16, 10, num_partitions=16),
    Family("long", 4, 1, 128, 16, 256),
    Family("long, all options, 4 queries", 6, 2, 64, 16, 256, options=ALL, q_len=4),
    Family("head_dim 256, window", 4, 1, 256, 32, 20, options=("sliding_window",)),
    Family("mha", 6, 6, 128, 16, 24),
    Family("group of 3", 6, 2, 64, 16, 40),
    Family("group of 7", 14, 2, 128, 32, 20),
    Family("group of 12", 12, 1, 64, 16, 40),
    Family("group of 64", 64, 1, 128, 16, 24),
    Family("head_dim 32", 8, 2, 32, 16, 40),
    Family("head_dim 64", 8, 2, 64, 16, 40, num_partitions=4),
    Family("head_dim 80", 4, 2, 80, 16, 40),
    Family("head_dim 96", 4, 2, 96, 16, 40, num_partitions=2),
    Family("head_dim 192", 4, 2, 192, 16, 40),
    Family("head_dim 256", 4, 2, 256, 16, 40, num_partitions=3),
    Family("block 8", 8, 2, 128, 8, 80),
    Family("block 32", 8, 2, 128, 32, 20, num_partitions=2),
    Family("block 64", 8, 2, 128, 64, 10),
    Family("block 128", 8, 2, 128, 128, 5, num_partitions=3),
    Family("block 256", 8, 2, 128, 256, 3),
    Family("float16", 8, 2, 128, 16, 40, dtype="float16"),
    Family("4 queries, partitions", 8, 2, 128, 16, 40, q_len=4, num_partitions=5),
    Family("16 queries", 4, 1, 64, 16, 24, q_len=16),
    Family("16 queries, partitions", 4, 1, 128, 16, 40, q_len=16, num_partitions=3),
    Family("13 queries, all options", 6, 2, 256, 16, 24, q_len=13, options=ALL),
    Family("70 queries", 8, 2, 128, 16, 24, q_len=70),
    Family("70 queries, all options", 6, 2, 64, 16, 24, q_len=70, options=ALL),
    Family("window", 8, 2, 128, 16, 40, options=("sliding_window",)),
    Family("window, partitions", 8, 2, 128, 16, 40, options=("sliding_window",), num_partitions=4),
    Family("window, 4 queries", 8, 2, 64, 16, 40, options=("sliding_window",), q_len=4),
    Family("scale and soft cap", 8, 2, 128, 16, 40, options=("scale", "logits_soft_cap")),
    Family("alibi", 8, 2, 128, 16, 40, options=("alibi_slopes",), num_partitions=3),
    Family("sinks", 8, 2, 128, 16, 40, options=("sinks",)),
    Family("sinks, partitions", 8, 2, 64, 16, 40, options=("sinks",), num_partitions=6),
    Family("all options", 6, 2, 64, 16, 40, options=ALL),
    Family("all options, partitions", 6, 2, 128, 16, 40, options=ALL, num_partitions=4),
    Family("all options, 4 queries, float16", 6, 2, 64, 16, 40, options=ALL, q_len=4, dtype="float16"),
    Family("all options, block 64", 8, 1, 128, 64, 10, options=ALL, num_partitions=2),
    Family("all options, head_dim 256", 4, 2, 256, 32, 20, options=ALL),
)


def draw_lengths(key: jax.Array, family: Family) -> jax.Array:
    """Half of the lengths are anywhere within the capacity, half at an edge of a block, a table, or the queries."""
    size, full = family.block_size, family.capacity
    edges = (0, 1, size - 1, size, size + 1, 2 * size, full, full - 1, full - size // 2, family.q_len - 1)
    which, edge, anywhere = jax.random.split(key, 3)
    return jnp.where(
        jax.random.bernoulli(which, 0.5, (SEQS,)),
        jax.random.choice(edge, jnp.asarray(edges, jnp.int32), (SEQS,)),
        jax.random.randint(anywhere, (SEQS,), 0, full + 1, jnp.int32),
    )


def draw_tables(key: jax.Array, lengths: jax.Array, family: Family) -> tuple[jax.Array, jax.Array]:
    """Block tables, and which slots of the pool hold a token, bool [blocks, block_size]."""
    order, share, garbage = jax.random.split(key, 3)
    num_blocks = SEQS * family.max_blocks + 4  # the null block, and three in no table
    tables = jax.random.permutation(order, num_blocks - 1)[: SEQS * family.max_blocks].reshape(SEQS, -1) + 1
    tables = tables.astype(jnp.int32)
    # Sequences with a full first block may share it.
    is_full = lengths >= family.block_size
    shares = is_full & jax.random.bernoulli(share, 0.3, (SEQS,))
    tables = tables.at[:, 0].set(jnp.where(shares, tables[jnp.argmax(is_full), 0], tables[:, 0]))
    entries = jnp.arange(family.max_blocks, dtype=jnp.int32)[None]
    positions = entries[..., None] * family.block_size + jnp.arange(family.block_size, dtype=jnp.int32)[None, None]
    holds = (positions < lengths[:, None, None]).astype(jnp.int32)
    legal = jnp.zeros((num_blocks, family.block_size), jnp.int32).at[tables].max(holds) > 0
    ids = jax.random.choice(garbage, jnp.asarray(GARBAGE_IDS, jnp.int32), tables.shape)
    return jnp.where(entries * family.block_size < lengths[:, None], tables, ids), legal


def draw_options(key: jax.Array, family: Family) -> dict[str, Any]:
    keys = dict(zip(ALL, jax.random.split(key, len(ALL)), strict=True))
    drawn = {
        "scale": lambda key: jax.random.uniform(key, (), jnp.float32, 0.02, 0.5),
        "sliding_window": lambda key: jax.random.randint(key, (), 1, family.capacity + 9, jnp.int32),
        "logits_soft_cap": lambda key: jax.random.uniform(key, (), jnp.float32, 1.0, 50.0),
        "alibi_slopes": lambda key: jnp.exp2(-jax.random.uniform(key, (family.heads,), jnp.float32, 0.0, 10.0)),
        "sinks": lambda key: 3 * jax.random.normal(key, (family.heads,), jnp.float32),
    }
    return {name: drawn[name](keys[name]) for name in family.options}


def try_case(family: Family, implementation: Any, args: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    """One case: the number of rows, the number of rows over the budget, and the largest error / budget."""
    key, is_twin = args
    keys = jax.random.split(key, 7)
    lengths = draw_lengths(keys[0], family)
    tables, legal = draw_tables(keys[1], lengths, family)
    options = draw_options(keys[2], family)
    dtype = jnp.dtype(family.dtype)
    huge = float(jnp.finfo(dtype).max)
    poison = jax.random.choice(keys[3], jnp.asarray((jnp.nan, jnp.inf, -jnp.inf, huge), jnp.float32))

    def pool(key: jax.Array) -> jax.Array:
        values = jax.random.normal(key, (*legal.shape, family.kv_heads, family.head_dim), jnp.float32)
        return jnp.where(legal[..., None, None], values, poison).astype(dtype)

    k_cache, v_cache = pool(keys[4]), pool(keys[5])
    size, values = jax.random.split(keys[6])
    q_len = () if family.q_len == 1 else (family.q_len,)
    q = jax.random.normal(values, (SEQS, *q_len, family.heads, family.head_dim), jnp.float32)
    q = (q * jax.random.choice(size, jnp.asarray((0.1, 1.0, 3.0), jnp.float32))).astype(dtype)  # flat to peaked

    arrays = q, k_cache, jnp.where(is_twin, k_cache, v_cache), tables, lengths
    options_of_ours = options | dict(num_partitions=family.num_partitions, implementation=implementation)
    out, lse = paged_attention(*arrays, return_lse=True, **options_of_ours)
    expected, expected_lse = paged_attention_reference(q, k_cache, v_cache, tables, lengths, return_lse=True, **options)
    plain, _ = plain_jnp(q, k_cache, v_cache, tables, lengths, dtype, options)
    worst = jnp.abs(out.astype(jnp.float32) - expected).max(axis=-1)
    budget = 2 * jnp.abs(plain.astype(jnp.float32) - expected).max(axis=-1)
    budget += float(jnp.finfo(dtype).eps) / 2 * jnp.abs(expected).max(axis=-1) + 3e-6
    lse_good = (lse == expected_lse) | (jnp.abs(lse - expected_lse) <= LSE_TOLERANCE * (1 + jnp.abs(expected_lse)))
    return {
        "bad_rows": (~(worst <= budget)).sum(dtype=jnp.int32),  # NaN is never within
        "bad_lse": (~lse_good).sum(dtype=jnp.int32),
        "worst": jnp.nan_to_num(worst / budget, nan=jnp.inf).max(),
    }


def loop(family: Family, implementation: Any, keys: jax.Array, is_twin: jax.Array) -> dict[str, jax.Array]:
    return lax.map(functools.partial(try_case, family, implementation), (keys, is_twin))


def summarise(family: Family, found: dict[str, np.ndarray], num_cases: int, seconds: float) -> dict[str, Any]:
    real = {name: values[TWINS:] for name, values in found.items()}
    bad = (real["bad_rows"] > 0) | (real["bad_lse"] > 0)
    return {
        "cases": num_cases,
        "rows": num_cases * SEQS * family.q_len * family.heads,
        "bad_cases": int(bad.sum()),
        "bad_rows": int(real["bad_rows"].sum()),
        "bad_lse": int(real["bad_lse"].sum()),
        "worst_over_budget": float(real["worst"].max()),
        "first_bad_case": int(np.argmax(bad)) if bad.any() else None,
        "twins_found": int((found["bad_rows"][:TWINS] > 0).sum()),
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="in all, spread evenly over the families")
    parser.add_argument("--families", nargs="+", choices=[family.name for family in FAMILIES], metavar="NAME")
    parser.add_argument("--implementation", choices=("mosaic_gpu", "xla"), default="mosaic_gpu")
    parser.add_argument("--seed", type=int, default=0)
    add_output(parser)
    options = parser.parse_args()

    families = [family for family in FAMILIES if options.families is None or family.name in options.families]
    each = -(-options.cases // len(FAMILIES))  # the same in a run of some --families
    what = {"seed": options.seed, "implementation": options.implementation, "cases_a_family": each}
    store = open_store("random_cases", options, **what)
    families = [family for family in families if family.name not in store.points]
    is_twin = jnp.arange(each + TWINS) < TWINS
    start = time.monotonic()
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, {options.implementation}, seed {options.seed}", flush=True)

    def make_keys(family: Family) -> jax.Array:
        return jax.random.split(jax.random.fold_in(jax.random.key(options.seed), FAMILIES.index(family)), each + TWINS)

    def job(family: Family) -> Any:
        program = jax.jit(functools.partial(loop, family, options.implementation))
        # The kernel gets numbers rounded to `dtype`. Without this option XLA passes unrounded ones to the oracle
        # and leaves p of plain jnp unrounded.
        return program.lower(make_keys(family), is_twin).compile({"xla_allow_excess_precision": False})

    print(
        f"{'family':<32} {'cases':>6} {'rows':>8} {'bad':>4} {'bad lse':>7} {'worst/budget':>12} {'twins':>6} {'s':>5}"
    )
    for batch in itertools.batched(families, AT_ONCE):
        programs = compile_all({family: functools.partial(job, family) for family in batch})
        for family in batch:
            begin = time.monotonic()
            found = {name: np.asarray(values) for name, values in programs[family](make_keys(family), is_twin).items()}
            result = summarise(family, found, each, time.monotonic() - begin)
            store.add(family.name, result)
            print(
                f"{family.name:<32} {each:6} {result['rows']:8} {result['bad_rows']:4} {result['bad_lse']:7} "
                f"{result['worst_over_budget']:12.3f} {result['twins_found']:4}/{TWINS} {result['seconds']:5.1f}",
                flush=True,
            )
        print(f"{time.monotonic() - start:.0f} s", flush=True)
    results = list(store.points.values())
    cases, rows, bad, twins = (
        sum(result[name] for result in results) for name in ("cases", "rows", "bad_cases", "twins_found")
    )
    print(
        f"{cases} cases, {rows} rows: {bad} cases over the budget; "
        f"mistakes found: {twins} of {TWINS * len(results)}; {time.monotonic() - start:.0f} s"
    )
    if bad or twins < TWINS * len(results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
