"""The cost of drawing a token for each seat: `python -m benchmarks.engine.sampling`.

The sampler is checked before it is timed: it must draw no token that top_k or top_p removes. Times are microseconds of
device time per call. Calls rotate through several arrays of logits, so that none are in the GPU's cache. `passes` is
the time divided by the time to read the logits once. Logits are flat, as from random weights, or peaked, as from a
trained model.

`--toy` uses toy sizes, to try the program out on any machine.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checks import poisoned, require
from benchmarks.harness import (
    add_output,
    compile_all,
    open_store,
    read_bandwidth,
    slope_microseconds,
)
from jaxpaged._scheduler.records import Sampling
from jaxpaged._slice.sampling import sample

Parameters = tuple[float, float, float]  # temperature, top_k, top_p
CASES: dict[str, tuple[Parameters, Parameters]] = {  # even seats, odd seats
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
SPREADS = {"flat": 1.0, "peaked": 4.0}  # standard deviation of the logits
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


def kept(row: np.ndarray, top_k: float, top_p: float) -> np.ndarray:
    """bool [vocab], the tokens that may be drawn. Equal logits are kept or cut together."""
    best = -np.sort(-row)
    weights = np.exp(best - best[0])
    if 0 < top_k < row.size:
        weights[best < best[int(top_k) - 1]] = 0
    before = np.cumsum(weights) - weights
    least = best[(weights > 0) & (before <= top_p * weights.sum() * (1 + 1e-5))].min()
    return row >= least


def check(case: str, call: Callable[..., Any], logits: jax.Array) -> None:
    """Raises if a token that top_k or top_p cuts is drawn."""
    seats = logits.shape[0]
    drawn = np.asarray(poisoned(call, (logits,), parameters(case, seats), jnp.zeros(seats, jnp.int32)))
    for seat, row in enumerate(np.asarray(logits, np.float64)):
        temperature, top_k, top_p = CASES[case][seat % 2]
        top_k = top_k if temperature else 1
        require(kept(row, top_k, top_p)[drawn[seat]], f"{case}: a token was drawn that is cut")


def chain(logits: tuple[jax.Array, ...], sampling: Sampling, positions: jax.Array) -> jax.Array:
    tokens = jnp.zeros_like(positions)
    for each in logits:
        tokens, *_ = sample(each, sampling, positions + (tokens & 1), jnp.bool_(False))
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

    def compiled(num_calls: int) -> Any:
        return jax.jit(chain).lower(logits["flat"][:num_calls], sampling, positions).compile()

    programs = compile_all({n: functools.partial(compiled, n) for n in (1, copies)})
    once = nbytes / bandwidth * 1e6
    for spread in SPREADS:
        for case in CASES:
            check(case, programs[1], logits[spread][0])
            call = functools.partial(programs[copies], logits[spread], parameters(case, seats))
            us = slope_microseconds(functools.partial(call_at, call, positions), copies, options.seconds)
            name = f"{seats} x {vocab} {dtype}, {spread}, {case}"
            print(f"{name:<72} {us:8.1f} us, {us / once:5.1f} passes", flush=True)
            store.add(name, {"once": once, "product": us})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rotated", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.1, help="of a measurement")
    parser.add_argument("--toy", action="store_true")
    add_output(parser)
    options = parser.parse_args(arguments)
    store = open_store("sampling", options)
    bandwidth = read_bandwidth()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {bandwidth / 1e9:.0f} GB/s")
    for shape in TOY_SHAPES if options.toy else SHAPES:
        measure(shape, options, store, bandwidth)


if __name__ == "__main__":
    main()
