"""What drawing a token for each seat costs beside taking the most likely ones: `python -m benchmarks.engine.sampling`.

Every way is checked before it is timed: none of its tokens is one that top_k or top_p cuts, and how often it takes the
tokens of 64 groups is within chance of their probabilities. Times are microseconds of device time a call, over logits
that are rotated so that none of them are in the cache of the GPU; `passes` are they over the time of reading the logits
once. Two kinds of logits: flat ones, as random weights give, and peaked ones, as a trained model does.

`--ways` measures only these, `--toy` takes toy sizes, to see on any machine that it runs.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.checks import poisoned, require
from benchmarks.harness import (
    add_output,
    compile_all,
    kernel_times,
    open_store,
    read_bandwidth,
    slope_microseconds,
)
from jaxpaged._engine.sampling import COLDEST, noise_of, sample
from jaxpaged._scheduler.records import Sampling

Way = Callable[[jax.Array, Sampling, jax.Array], jax.Array]
CASES: dict[
    str, tuple[tuple[float, float, float], ...]
] = {  # temperature, top_k, top_p of the even seats; of the odd ones
    "greedy": ((0, 0, 1),) * 2,
    "temperature": ((1, 0, 1),) * 2,
    "top_p 0.95": ((1, 0, 0.95),) * 2,
    "top_p 0.5": ((1, 0, 0.5),) * 2,
    "top_p 1e-6": ((1, 0, 1e-6),) * 2,
    "top_k 50": ((1, 50, 1),) * 2,
    "top_k 50, top_p 0.95": ((1, 50, 0.95),) * 2,
    "top_k 500, top_p 0.95": ((1, 500, 0.95),) * 2,
    "half greedy, top_k 50, top_p 0.95": ((0, 0, 1), (1, 50, 0.95)),
}
CHECKED = tuple(CASES)[1:-1]
SPREADS = {"flat": 1.0, "peaked": 4.0}  # standard deviation of the logits
GROUPS = 64


def bit_by_bit(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:
    """Noise for every token of the vocabulary, made as the product's; the least kept logit is found in 31 passes."""
    logits = logits.astype(jnp.float32)
    scaled = (logits.max(axis=-1, keepdims=True) - logits) / jnp.maximum(sampling.temperature, COLDEST)[:, None]
    bits, weights = lax.bitcast_convert_type(scaled, jnp.int32), jnp.exp(-scaled)
    by_k, by_p = sampling.top_k > 0, sampling.top_p < 1
    least = jnp.maximum(sampling.top_p, jnp.finfo(jnp.float32).tiny) * weights.sum(axis=-1)

    def try_bit(i: jax.Array, distance: jax.Array) -> jax.Array:
        further = distance | (jnp.int32(1) << (30 - i))
        is_better = bits < further[:, None]
        fits = ~by_k | (is_better.sum(axis=-1, dtype=jnp.int32) < sampling.top_k)
        fits &= ~by_p | (jnp.where(is_better, weights, 0).sum(axis=-1) < least)
        return jnp.where(fits, further, distance)

    is_cut = (by_k | by_p).any()
    start = jnp.where(is_cut, jnp.zeros_like(sampling.top_k), jnp.iinfo(jnp.int32).max)
    furthest = lax.fori_loop(0, jnp.where(is_cut, 31, 0), try_bit, start)
    noise = noise_of(sampling.seed, positions, jnp.zeros(1, jnp.int32), scaled.shape[1])[:, 0]
    drawn = jnp.where(bits <= furthest[:, None], noise - scaled, -jnp.inf)
    return jnp.where(sampling.temperature > 0, drawn.argmax(axis=-1), logits.argmax(axis=-1)).astype(jnp.int32)


def product(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> jax.Array:
    return sample(logits, sampling, positions, jnp.bool_(False))[0]


WAYS: dict[str, Way] = {"bit by bit": bit_by_bit, "product": product}
SHAPES = ((256, 128_256, "bfloat16"), (256, 128_256, "float32"), (64, 128_256, "bfloat16"), (256, 50_257, "bfloat16"))
TOY_SHAPES = ((8, 1000, "bfloat16"), (8, 300, "float32"))


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def random_logits(seed: Any, spread: Any, *, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape, jnp.float32) * spread).astype(dtype)


def parameters(case: str, seats: int) -> Sampling:
    even_odd = np.asarray(CASES[case], np.float32)[np.arange(seats) % 2]
    temperature, top_k, top_p = (jnp.asarray(column) for column in even_odd.T)
    seed = jnp.arange(seats, dtype=jnp.int32).astype(jnp.uint32)
    adapter = jnp.full(seats, -1, jnp.int32)
    return Sampling(temperature=temperature, top_k=top_k.astype(jnp.int32), top_p=top_p, seed=seed, adapter=adapter)


@functools.cache
def groups_of(case: str, spread: float, shape: tuple[int, int], dtype: str) -> tuple[np.ndarray, ...]:
    """The group of each token of the row that is checked, -1 if it is cut; and the probability of each group."""
    row = np.asarray(random_logits(7, spread, shape=shape[1:], dtype=dtype), np.float64)
    _, top_k, top_p = CASES[case][0]
    order = np.argsort(-row, kind="stable")
    row = row[order]
    weights = np.exp(row - row[0])
    if 0 < top_k < row.size:
        weights[row < row[int(top_k) - 1]] = 0
    before = (np.cumsum(weights) - weights)[np.searchsorted(-row, -row)]  # equal ones are kept together
    weights[before > top_p * weights.sum() * (1 + 1e-5)] = 0
    probabilities = weights / weights.sum()
    group = np.minimum((np.cumsum(probabilities) * GROUPS).astype(int), GROUPS - 1)
    of_token = np.empty_like(order)
    of_token[order] = np.where(weights > 0, group, -1)
    return of_token, np.bincount(group, probabilities, GROUPS)


def check(case: str, call: Callable[..., Any], spread: float, shape: tuple[int, int], dtype: str) -> None:
    """Raises if a token is drawn that is cut, or if the groups are off by more than 5 deviations of chi-square."""
    logits = (jnp.tile(random_logits(7, spread, shape=shape[1:], dtype=dtype), (shape[0], 1)),)
    of_token, probabilities = groups_of(case, spread, shape, dtype)
    sampling, drawn = parameters(case, shape[0]), []
    for i in range(max(1, 8192 // shape[0])):
        arguments = logits, sampling, jnp.full(shape[0], i, jnp.int32)
        drawn.append(of_token[np.asarray(poisoned(call, *arguments) if i == 0 else call(*arguments))])
    require((np.concatenate(drawn) >= 0).all(), f"{case}: a token was drawn that is cut")
    found = np.bincount(np.concatenate(drawn), minlength=GROUPS)
    expected = probabilities * found.sum()
    used = expected > 5
    degrees = max(1, int(used.sum()) - 1)
    off = (((found - expected)[used] ** 2 / expected[used]).sum() - degrees) / (2 * degrees) ** 0.5
    require(off < 5, f"{case}: what is drawn is {off:.1f} standard deviations of chi-square from its probabilities")


def chain(way: Way, logits: tuple[jax.Array, ...], sampling: Sampling, positions: jax.Array) -> jax.Array:
    tokens = jnp.zeros_like(positions)
    for each in logits:
        tokens = way(each, sampling, positions + (tokens & 1))
    return tokens


def call_at(call: Callable[[jax.Array], Any], positions: jax.Array, i: int) -> Any:
    return call(positions + i)


def measure(shape: tuple[int, int, str], options: argparse.Namespace, store: Any, bandwidth: float) -> None:
    seats, vocab, dtype = shape
    logits = {
        name: tuple(random_logits(i, spread, shape=(seats, vocab), dtype=dtype) for i in range(options.rotated))
        for name, spread in SPREADS.items()
    }
    nbytes = logits["flat"][0].nbytes
    copies = options.rotated
    sampling, positions = parameters("greedy", seats), jnp.zeros(seats, jnp.int32)
    ways = {name: WAYS[name] for name in options.ways}

    def compiled(way: Way, num_calls: int) -> Any:
        return jax.jit(functools.partial(chain, way)).lower(logits["flat"][:num_calls], sampling, positions).compile()

    jobs: dict[Any, Callable[[], Any]] = {
        (name, n): functools.partial(compiled, way, n) for name, way in ways.items() for n in (1, copies)
    }
    programs = compile_all(jobs)
    once = nbytes / bandwidth * 1e6
    for spread in SPREADS:
        for case in CASES:
            point: dict[str, Any] = {"once": once}
            for name in ways:
                if case in CHECKED and not (name == "bit by bit" and "," in case):
                    check(case, programs[name, 1], SPREADS[spread], (seats, vocab), dtype)
                sampling = parameters(case, seats)
                call = functools.partial(programs[name, copies], logits[spread][:copies], sampling)
                point[name] = slope_microseconds(functools.partial(call_at, call, positions), copies, options.seconds)
                text = f"{seats} x {vocab} {dtype}, {spread}, {case:<34} {name:<18}"
                print(f"{text} {point[name]:8.1f} us, {point[name] / once:5.1f} passes", flush=True)
            store.add(f"{seats} x {vocab} {dtype}, {spread}, {case}", point)
    for case in options.kernels if jax.default_backend() == "gpu" and "product" in ways else ():
        call = functools.partial(programs["product", 1], logits["flat"][:1], parameters(case, seats), positions)
        times = kernel_times(call)
        print(f"\n{seats} x {vocab} {dtype}, flat, {case}: {sum(t for _, t in times):.0f} us in {len(times)} kernels")
        for kernel, microseconds in times:
            print(f"{microseconds:8.1f} us  {kernel[:90]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=tuple(WAYS))
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="so many of the shapes")
    parser.add_argument(
        "--kernels", nargs="*", default=[], choices=tuple(CASES), help="print the kernels of the product"
    )
    parser.add_argument("--rotated", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.1, help="of a measurement")
    parser.add_argument("--toy", action="store_true")
    add_output(parser)
    options = parser.parse_args()
    store = open_store("sampling", options)
    bandwidth = read_bandwidth()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {bandwidth / 1e9:.0f} GB/s")
    for shape in TOY_SHAPES if options.toy else SHAPES[: options.shapes]:
        measure(shape, options, store, bandwidth)


if __name__ == "__main__":
    main()
