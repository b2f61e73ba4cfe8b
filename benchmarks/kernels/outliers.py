"""One sequence longer than the others, in wide tables: `python -m benchmarks.kernels.outliers`.

All sequences of a batch have the same length except one, which is 1 to 128 times longer. All tables are 131072 tokens
wide. Lengths are given at run time, so each batch size is one program, as on a server. `default` is `paged_attention`,
`even` the decode kernel with equal partitions; both must agree. 32/8 heads, head_dim 128, bfloat16, blocks of 16,
shuffled over a pool of 2^20 tokens through which the calls rotate. The floor is a kernel that only reads, timed for
seven numbers of tokens and interpolated.
"""

import argparse
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checks import poisoned, worst_error
from benchmarks.harness import (
    Store,
    add_output,
    compile_all,
    geometric_mean,
    open_store,
    random,
    read_chain,
    slope_microseconds,
)
from benchmarks.kernels.forms import attend
from jaxpaged import paged_attention

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
TOKENS, TABLE_TOKENS, NUM_CALLS = 2**20, 2**17, 16
NUM_BLOCKS, MAX_BLOCKS = TOKENS // BLOCK_SIZE, TABLE_TOKENS // BLOCK_SIZE
BATCHES, LENGTHS, FACTORS = (4, 8, 16, 24, 32, 48, 64, 96, 128), (256, 1024, 4096), tuple(2**i for i in range(8))
LEAST, MOST = 15_000, 420_000  # tokens of a batch: 20 and 550 us of reading on an H100
FLOORS = tuple(2**i for i in range(13, 20))  # tokens
CACHE = jax.ShapeDtypeStruct((NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM), jnp.bfloat16)
WAYS = {
    "default": functools.partial(paged_attention, implementation="mosaic_gpu"),
    "even": functools.partial(attend, "tma"),
}


def chain(way: str, q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, tables: tuple, lengths: jax.Array) -> Any:
    """The last and the first output."""
    first = None
    for table in tables:
        q = WAYS[way](q, k_cache, v_cache, table, lengths)
        first = q if first is None else first
    return q, first


def compile_way(batch: int, way: str) -> Any:
    q = jax.ShapeDtypeStruct((batch, 1, HEADS, HEAD_DIM), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((batch, MAX_BLOCKS), jnp.int32)
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return jax.jit(functools.partial(chain, way)).lower(q, CACHE, CACHE, (table,) * NUM_CALLS, lengths).compile()


def compile_floor(tokens: int) -> Any:
    floor = functools.partial(read_chain, slots=tokens, num_calls=NUM_CALLS)
    return jax.jit(floor).lower(jax.ShapeDtypeStruct((HEAD_DIM,), jnp.float32), ((CACHE, CACHE),)).compile()


@jax.jit
def cut_tables(ids: jax.Array, starts: jax.Array) -> tuple[jax.Array, ...]:
    """One a call. Sequence i takes the blocks of the shuffled pool from starts[i] on, each call's from elsewhere on."""
    indices = starts[:, None] + jnp.arange(MAX_BLOCKS, dtype=jnp.int32)[None]
    return tuple(ids[(indices + i * (NUM_BLOCKS // NUM_CALLS)) % NUM_BLOCKS] for i in range(NUM_CALLS))


def run(store: Store, batches: tuple[int, ...]) -> None:
    jobs: dict[Any, Any] = {tokens: functools.partial(compile_floor, tokens) for tokens in FLOORS}
    jobs |= {(batch, way): functools.partial(compile_way, batch, way) for batch in batches for way in WAYS}
    compiled = compile_all(jobs)
    caches = tuple(random(seed, shape=CACHE.shape, dtype="bfloat16") for seed in range(2))

    def microseconds(program: Any, *arguments: Any) -> float:
        return slope_microseconds(lambda _: program(*arguments), NUM_CALLS, 0.05)

    floors = [microseconds(compiled[tokens], jnp.ones(HEAD_DIM), (caches,)) for tokens in FLOORS]
    ids = jax.device_put(np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int32))
    for batch, length, factor in itertools.product(batches, LENGTHS, FACTORS):
        sizes = np.full(batch, length, np.int32)
        sizes[batch // 2] *= factor
        if length * factor > TABLE_TOKENS or not LEAST <= sizes.sum() <= MOST:
            continue
        name = f"{batch} x {length}, one of {length * factor}"
        starts = (np.cumsum(sizes) - sizes) // BLOCK_SIZE
        q = random(7, shape=(batch, 1, HEADS, HEAD_DIM), dtype="bfloat16")
        inputs = q, *caches, cut_tables(ids, jnp.asarray(starts, jnp.int32)), jnp.asarray(sizes)
        error = worst_error(name, *(poisoned(compiled[batch, way], *inputs)[1] for way in WAYS))
        point = {"floor": float(np.interp(sizes.sum(), FLOORS, floors)), "error": error}
        point |= {way: microseconds(compiled[batch, way], *inputs) for way in WAYS}
        store.add(name, point)
        print(f"{name:<28}" + ", ".join(f"{way} {point[way] / point['floor']:.2f}" for way in WAYS), flush=True)
    for way in WAYS:
        ratios = [point[way] / point["floor"] for point in store.points.values()]
        print(f"{way}: {geometric_mean(ratios):.3f} of the floor in the mean, at most {max(ratios):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    add_output(parser)
    options = parser.parse_args()
    run(open_store("outliers", options), tuple(options.batches))


if __name__ == "__main__":
    main()
