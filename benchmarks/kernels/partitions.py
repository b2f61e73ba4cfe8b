"""What depends only on lengths: `python -m benchmarks.kernels.partitions WHICH`.

  curve  lengths 128..128k, batches of 1 and 8: one pass, fixed numbers of partitions and the default; where they cross
  sweep  batches 1..512, lengths 128..128k, by default: time must grow with the work and jump nowhere
  tail   lengths that fill their last tile against lengths that do not, the number of tiles equal: what zeroing costs

Each batch size is one program. Its block tables are as wide as memory allows and its lengths are given at run time, so
a program that is slow in wide tables shows. bfloat16, 32/8 heads, head_dim 128, blocks of 16; tables are shuffled and
rotate through the pool, so that L2 is cold. Results are compared with the reference before anything is timed.
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checks import poisoned, worst_error
from benchmarks.harness import Store, add_output, compile_all, open_store, random, read_bandwidth, slope_microseconds
from jaxpaged import paged_attention, paged_attention_reference

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
LONGEST, CHECKED_LENGTH, NUM_SETS = 131_072, 250, 8
CURVE_PARTITIONS = (1, 4, 16, 64, None)
SWEEP_BATCHES = (
    *(1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 33, 48, 64, 66, 96),
    *(128, 132, 133, 192, 256, 264, 384, 512),
)
# Same programs, same number of tiles of 64 and of 128 tokens: full, one token short, almost a tile short.
TAIL_SHAPES = {1: (512, 511, 449), 8: (8192, 8191, 8129), 64: (2048, 2047, 1985), 256: (1024, 1023, 961)}
NOISE, JUMP = 0.03, 1.3


@dataclasses.dataclass(frozen=True)
class Program:
    """`num_calls` chained calls at one batch size, of which the lengths are an argument."""

    batch: int
    num_partitions: int | None
    num_calls: int
    num_blocks: int
    max_blocks: int
    implementation: Any  # of paged_attention

    def chain(self, q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, tables: tuple, lengths: jax.Array) -> Any:
        first = None
        for table in tables:
            q = paged_attention(
                *(q, k_cache, v_cache, table, lengths),
                num_partitions=self.num_partitions,
                implementation=self.implementation,
            )
            first = q if first is None else first
        return q, first

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        return self.num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM

    def compile(self) -> Any:
        cache = jax.ShapeDtypeStruct(self.cache_shape, jnp.bfloat16)
        table = jax.ShapeDtypeStruct((self.batch, self.max_blocks), jnp.int32)
        q = jax.ShapeDtypeStruct((self.batch, HEADS, HEAD_DIM), jnp.bfloat16)
        lengths = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        return jax.jit(self.chain).lower(q, cache, cache, (table,) * self.num_calls, lengths).compile()

    def tables(self) -> list[tuple[jax.Array, ...]]:
        """Sets of tables, one table a call. Entry j of sequence i is block j * batch + i of a shuffled pool, from which
        each table starts elsewhere: what short sequences read, no other table reads."""
        ids = np.random.default_rng(0).permutation(self.num_blocks).astype(np.int32)
        indices = np.arange(self.max_blocks)[None] * self.batch + np.arange(self.batch)[:, None]
        stride = self.num_blocks // (self.num_calls * NUM_SETS)
        tables = [ids[(indices + i * stride) % self.num_blocks] for i in range(self.num_calls * NUM_SETS)]
        arrays = jax.device_put(tables)
        return [tuple(arrays[i::NUM_SETS]) for i in range(NUM_SETS)]


@dataclasses.dataclass(frozen=True)
class Bench:
    """A program with its inputs."""

    program: Program
    compiled: Any
    caches: tuple[jax.Array, jax.Array]
    seconds: float

    @functools.cached_property
    def q(self) -> jax.Array:
        return random(7, shape=(self.program.batch, HEADS, HEAD_DIM), dtype="bfloat16")

    @functools.cached_property
    def tables(self) -> list[tuple[jax.Array, ...]]:
        return self.program.tables()

    def lengths(self, length: int) -> jax.Array:
        return jnp.full(self.program.batch, length, jnp.int32)

    def microseconds(self, length: int) -> float:
        lengths = self.lengths(length)
        return slope_microseconds(
            lambda i: self.compiled(self.q, *self.caches, self.tables[i % NUM_SETS], lengths),
            self.program.num_calls,
            self.seconds,
        )

    def check(self) -> None:
        """One row at one length against the reference; raises if it is wrong."""
        lengths = self.lengths(CHECKED_LENGTH)
        _, out = poisoned(self.compiled, self.q, *self.caches, self.tables[0], lengths)
        table = self.tables[0][0][-1:, : -(-CHECKED_LENGTH // BLOCK_SIZE)]
        expected = jax.jit(paged_attention_reference)(
            self.q[-1:], *self.caches, table, jnp.full(1, CHECKED_LENGTH, jnp.int32)
        )
        worst_error(str(self.program), out[-1:], expected)


def make(options: Any, batches: tuple[int, ...], partitions: tuple[int | None, ...]) -> dict[Any, Bench]:
    """By (batch, partitions), compiled side by side, checked."""
    num_blocks = options.tokens // BLOCK_SIZE
    programs = {
        (batch, number): Program(
            batch,
            number,
            num_calls=options.calls,
            num_blocks=num_blocks,
            max_blocks=min(LONGEST // BLOCK_SIZE, num_blocks // batch),
            implementation=options.implementation,
        )
        for batch in batches
        for number in partitions
    }
    compiled = compile_all({key: program.compile for key, program in programs.items()})
    shape = next(iter(programs.values())).cache_shape
    caches = random(0, shape=shape, dtype="bfloat16"), random(1, shape=shape, dtype="bfloat16")
    benches = {key: Bench(program, compiled[key], caches, options.seconds) for key, program in programs.items()}
    for bench in benches.values():
        bench.check()
    return benches


def run_curve(options: Any, store: Store) -> None:
    batches = tuple(options.batches or (1, 8))
    benches = make(options, batches, CURVE_PARTITIONS)
    names = ["default" if number is None else str(number) for number in CURVE_PARTITIONS]
    for batch in batches:
        print(f"batch {batch}: us by number of partitions\n{'length':>8} " + " ".join(f"{name:>9}" for name in names))
        crossover = None
        capacity = benches[batch, 1].program.max_blocks * BLOCK_SIZE
        for length in (n for n in (2**i for i in range(7, 18)) if n <= capacity):
            times = {
                name: benches[batch, number].microseconds(length)
                for name, number in zip(names, CURVE_PARTITIONS, strict=True)
                if number is None or number == 1 or length >= 64 * number
            }
            store.add(f"curve {batch}x{length}", times)
            split = min((us for name, us in times.items() if name not in ("1", "default")), default=times["1"])
            if crossover is None and split < times["1"]:
                crossover = length
            print(f"{length:>8} " + " ".join(f"{times.get(name, float('nan')):9.1f}" for name in names), flush=True)
        print(f"several partitions are faster from {crossover} tokens on")


def run_sweep(options: Any, store: Store) -> None:
    batches = tuple(options.batches or SWEEP_BATCHES)
    benches = make(options, batches, (None,))
    all_lengths = sorted({round(128 * 2 ** (i / 2) / 64) * 64 for i in range(21)})
    times: dict[tuple[int, int], float] = {}
    for batch in batches:
        capacity = benches[batch, None].program.max_blocks * BLOCK_SIZE
        for length in (n for n in all_lengths if n <= capacity):
            times[batch, length] = benches[batch, None].microseconds(length)
        store.add(f"sweep {batch}", {str(n): us for (b, n), us in times.items() if b == batch})
        row = " ".join(f"{us:.1f}" for (b, _), us in times.items() if b == batch)
        print(f"batch {batch:>3}, lengths {all_lengths[0]}..: {row}", flush=True)
    found = falls_and_jumps(times)
    store.add("sweep verdict", {"found": found})
    for line in found:
        print(line)
    print(f"{len(times)} points, at {len(found)} more work takes less time, or the time jumps")


def falls_and_jumps(times: dict[tuple[int, int], float]) -> list[str]:
    """Where the time falls by more than noise although the work grows, or grows over a third faster than the work."""
    batches, lengths = sorted({b for b, _ in times}), sorted({n for _, n in times})
    steps = [((b, n), (b, m)) for b in batches for n, m in itertools.pairwise(lengths)]
    steps += [((b, n), (c, n)) for n in lengths for b, c in itertools.pairwise(batches)]
    found = []
    for before, after in steps:
        if before in times and after in times:
            ratio, work = times[after] / times[before], after[0] * after[1] / (before[0] * before[1])
            if ratio < 1 - NOISE or ratio > JUMP * work:
                found.append(
                    f"{before[0]}x{before[1]} {times[before]:.1f} us, {after[0]}x{after[1]} {times[after]:.1f} us"
                )
    return found


def run_tail(options: Any, store: Store) -> None:
    batches = tuple(options.batches or TAIL_SHAPES)
    benches = make(options, batches, (None, 1))
    for (batch, number), bench in benches.items():
        full, *short = TAIL_SHAPES[batch]
        rounds = [[bench.microseconds(length) for length in (full, *short)] for _ in range(5)]
        base = statistics.median(times[0] for times in rounds)
        for i, length in enumerate(short, start=1):
            # The median of ratios within a round: both halves of it were taken side by side.
            ratio = statistics.median(times[i] / times[0] for times in rounds)
            # `length` also reads less; by the bytes alone the ratio would be at least length / full.
            store.add(f"tail {batch}x{length} {number or 'default'}", {"full_us": base, "over_full": ratio})
            print(
                f"{batch}x{length}, partitions {number or 'default'}: {ratio:.4f} times the {base:.1f} us of {full}; "
                f"bytes {length / full:.4f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="+", choices=("curve", "sweep", "tail"))
    parser.add_argument("--batches", nargs="+", type=int, help="instead of the usual ones")
    parser.add_argument("--tokens", type=int, default=2**20, help="tokens in the pool")
    parser.add_argument("--calls", type=int, default=32, help="chained in one jit")
    parser.add_argument("--seconds", type=float, default=0.06, help="of one measurement, about")
    parser.add_argument("--implementation", choices=("mosaic_gpu", "xla"), default="mosaic_gpu")
    add_output(parser)
    options = parser.parse_args()
    store = open_store("partitions", options)
    bandwidth = read_bandwidth()
    store.add("read", {"bytes_per_s": bandwidth})
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, read {bandwidth / 1e9:.0f} GB/s", flush=True)
    for which in options.which:
        {"curve": run_curve, "sweep": run_sweep, "tail": run_tail}[which](options, store)


if __name__ == "__main__":
    main()
