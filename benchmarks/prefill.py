"""Attention of prompts, through the kernels and without them: `python -m benchmarks.prefill`.

A point is one of benchmarks/points.py whose q_len is what is new of each sequence: `32/8 8x2304 q_len=256` is 256 new
tokens after 2048. Every method is checked against the reference before it is timed, on tokens at the start, in the
middle and at the end. Times are microseconds a call on the device, of calls chained in one jit.

  xla, mosaic_gpu    paged_attention; mosaic_gpu/48 with runs of at most 48 rows, where the library takes 64
  cudnn              jax.nn.dot_product_attention on contiguous keys and values: whole fresh prompts alone
  gather, cudnn      the same, with the gather from the cache that it then needs

What is in the output file already is left out. `--points` takes also windows, other heads and 8-bit caches.
"""

import argparse
import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarks.decode import chain, check, checked_rows, options_of, with_scales
from benchmarks.harness import add_output, open_store, slope_microseconds
from benchmarks.points import Inputs, Point, make_inputs, parse
from jaxpaged import paged_attention, paged_attention_reference
from jaxpaged._attention import query_runs

POINTS = (
    *("32/8 1x2048 q_len=2048", "32/8 1x8192 q_len=8192", "32/8 8x1024 q_len=1024"),
    *("32/8 8x2304 q_len=256", "32/8 1x8448 q_len=256"),
)
TOY_POINTS = ("6/2 2x48 q_len=48 head_dim=32", "6/2 2x48 q_len=32 head_dim=32")
METHODS = ("xla", "mosaic_gpu", "cudnn", "gather, cudnn")
CHECKED_TOKENS = 64  # of a sequence, at each of three places


@dataclasses.dataclass(frozen=True)
class Prompt(Point):
    num_calls = 4  # enough to hide their dispatch, and for "xla" not too long
    num_sets = 1

    @property
    def flops(self) -> int:
        """Of both products, for what is visible."""
        seen = (np.minimum(np.arange(n - self.q_len, n) + 1, self.window or n).sum() for n in self.lengths)
        return 4 * self.heads * self.head_dim * int(sum(seen))

    def takes(self, method: str) -> bool:
        if method.startswith("mosaic_gpu"):
            return jax.default_backend() == "gpu"
        fresh = all(n == self.q_len and n % self.block_size == 0 for n in self.lengths)
        return method == "xla" or (fresh and not self.window and not self.cache)


def prompt(name: str) -> Prompt:
    return Prompt(**vars(parse(name)))


def contiguous(cache: jax.Array, block_tables: jax.Array) -> jax.Array:  # [seqs, tokens, kv_heads, head_dim]
    return cache[block_tables].reshape(len(block_tables), -1, *cache.shape[2:])


def dense(q: jax.Array, k: jax.Array, v: jax.Array, block_tables: jax.Array, _: jax.Array, *, gather: bool) -> Any:
    if gather:
        k, v = contiguous(k, block_tables), contiguous(v, block_tables)
    implementation: Any = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)


def compile_chain(point: Prompt, method: str, inputs: Inputs) -> Any:
    """A call without arguments, which starts a chain and returns the last output and the first."""
    name, _, rows = method.partition("/")
    caches = inputs.caches[0]
    if "cudnn" in name:
        attend: Any = functools.partial(dense, gather=name != "cudnn")
        if name == "cudnn":
            caches = tuple(tuple(contiguous(c, inputs.block_tables) for c in pair) for pair in caches)
    else:
        attend = functools.partial(with_scales, paged_attention, implementation=name, **options_of(point))
    args = inputs.q, caches, inputs.block_tables, inputs.lengths
    jax.clear_caches()  # what was traced with other rows
    with mock.patch.object(query_runs, "MAX_ROWS", int(rows or query_runs.MAX_ROWS)):
        return functools.partial(jax.jit(functools.partial(chain, point, attend)).lower(*args).compile(), *args)


def expected_tokens(point: Prompt, inputs: Inputs) -> dict[slice, jax.Array]:
    """The reference's output for some tokens of some sequences: each place as if the sequence ended there."""
    reference = jax.jit(functools.partial(with_scales, paged_attention_reference, **options_of(point)))
    rows, count = np.asarray(checked_rows(point)), min(CHECKED_TOKENS, point.q_len)
    pair, tables, lengths = inputs.caches[0][0], inputs.block_tables[rows], inputs.lengths[rows]
    places = [slice(end - count, end) for end in (count, (count + point.q_len) // 2, point.q_len)]
    return {at: reference(inputs.q[rows][:, at], *pair, tables, lengths - (point.q_len - at.stop)) for at in places}


def measure(point: Prompt, method: str, inputs: Inputs, expected: dict[slice, jax.Array]) -> dict[str, float]:
    run = compile_chain(point, method, inputs)
    first = run()[1][np.asarray(checked_rows(point))]
    error = max(check(point, first[:, at], tokens) for at, tokens in expected.items())
    us = slope_microseconds(lambda _: run(), point.num_calls)
    return {"us": us, "teraflops_per_second": point.flops / us / 1e6, "error": error}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", help="names of points, see benchmarks/points.py")
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="METHOD")
    parser.add_argument("--toy", action="store_true", help="small, for trying this script out")
    add_output(parser)
    options = parser.parse_args(arguments)
    store = open_store("prefill", options)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    for name in options.points or (TOY_POINTS if options.toy else POINTS):
        point = prompt(name)
        methods = [method for method in options.methods if point.takes(method)]
        if any(f"{name} {method}" not in store.points for method in methods):
            inputs = make_inputs(point)
            expected = expected_tokens(point, inputs)
        for key, method in ((f"{name} {method}", method) for method in methods):
            if key not in store.points:
                store.add(key, measure(point, method, inputs, expected))
            result = store.points[key]
            speed = f"{result['us']:10.1f} us {result['teraflops_per_second']:7.1f} TFLOP/s"
            print(f"{name:<26} {method:<14} {speed}, error {result['error']:.1e}", flush=True)


if __name__ == "__main__":
    main()
