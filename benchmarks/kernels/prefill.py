"""Attention of prompts, against other libraries: `python -m benchmarks.kernels.prefill --peers fa3 cudnn`.

Points are named as in points.py; q_len is the number of new tokens of each sequence: `32/8 8x2304 q_len=256` is 256 new
tokens after 2048, and with `q_len=all` all tokens are new. A plus joins different sequences, whose tokens are packed:
`32/8 60x4096 + 4x4608 q_len=512`. Every method is compared with the reference before it is timed, on tokens at the
start, in the middle and at the end. Times are device microseconds per call, for calls chained in one jit.

  mosaic_gpu, xla    paged_attention
  cudnn              jax.nn.dot_product_attention on contiguous keys and values; only whole fresh prompts
  gather, cudnn      the same, including the gather from the cache
  fa3 paged          FlashAttention-3 through flash-attn3-jax, on the same cache
  fa3                the same on contiguous keys and values; only whole fresh prompts

Points that the output file already has are left out. `--points` may also name windows, other heads and 8-bit caches.
Kernels alone are timed last, by CUPTI.
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checks import poisoned, worst_error
from benchmarks.harness import add_output, compile_all, open_store, slope_microseconds
from benchmarks.kernels.decode import chain, checked_rows, make_options, measure_kernels, with_scales
from benchmarks.kernels.peers import fa3_attend, installed
from benchmarks.kernels.points import Inputs, Point, input_shapes, make_inputs, parse
from jaxpaged import paged_attention, paged_attention_reference

POINTS = (
    *("32/8 1x512 q_len=all", "32/8 1x2048 q_len=all", "32/8 1x8192 q_len=all", "32/8 1x32768 q_len=all"),
    *("32/8 8x1024 q_len=all", "32/8 64x128 q_len=all", "32/8 16x2048 q_len=all"),
    *("32/8 8x2304 q_len=256", "32/8 1x8448 q_len=256", "32/8 1x34816 q_len=2048", "32/8 64x2064 q_len=16"),
    *("32/32 8x1024 q_len=all", "64/8 8x1024 q_len=all"),
    *(f"32/8 {shape} q_len=all head_dim={n}" for n in (64, 256) for shape in ("8x1024", "1x8192")),
    *(
        f"32/8 {shape} cache=float8_e4m3fn scale={scale}"
        for scale in ("head", "token_head")
        for shape in ("8x2304 q_len=256", "1x8192 q_len=all")
    ),
    "32/8 64xragged1024 q_len=all",
    "32/8 64x2112 q_len=64",
    *("32/8 60x4096", "32/8 4x4608 q_len=512", "32/8 60x4096 + 4x4608 q_len=512"),
)
TOY_POINTS = (
    *("6/2 2x48 q_len=all head_dim=32", "6/2 2x48 q_len=32 head_dim=32"),
    "6/2 2x48 head_dim=32 + 1x40 q_len=8",
)
PEERS = {"fa3": ("fa3 paged", "fa3"), "cudnn": ("cudnn", "gather, cudnn")}
FA3_SPLITS = (1, 4, 16)
AT_ONCE = 12  # points that are compiled together
CHECKED_TOKENS = 64  # tokens per sequence at each of three positions


@dataclasses.dataclass(frozen=True)
class Prompt(Point):
    num_calls = 4  # enough to hide the dispatch, and not too long for "xla"
    num_sets = 1
    counts: tuple[int, ...] = ()  # new tokens of each sequence

    @property
    def packed(self) -> bool:
        return len(set(self.counts)) > 1

    @property
    def q_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        leading = (sum(self.counts),) if self.packed else (len(self.counts), self.counts[0])
        return *leading, self.heads, self.head_dim

    @property
    def starts(self) -> np.ndarray:
        """int32 [seqs + 1], in the tokens of q."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32)

    @property
    def flops(self) -> int:
        """Operations of both products, counting only unmasked pairs."""
        pairs = zip(self.lengths, self.counts, strict=True)
        seen = (np.minimum(np.arange(n - new, n) + 1, self.window or n).sum() for n, new in pairs)
        return 4 * self.heads * self.head_dim * int(sum(seen))

    def takes(self, method: str) -> bool:
        if method == "xla":
            return True
        if method == "mosaic_gpu":
            return jax.default_backend() == "gpu"
        if self.packed or self.window or self.cache or self.tree or ("fa3" in method and self.head_dim > 128):
            return False
        fresh = self.counts == self.lengths and self.lengths[0] % self.block_size == 0
        return method == "fa3 paged" or fresh


def prompt(name: str) -> Prompt:
    first, *others = name.split(" + ")
    heads = first.split()[0]
    point, counts = _part(first)
    for other in others:
        more, more_counts = _part(f"{heads} {other}")
        point = dataclasses.replace(point, lengths=point.lengths + more.lengths)
        counts += more_counts
    return Prompt(**vars(point) | {"name": name, "counts": counts})


def _part(name: str) -> tuple[Point, tuple[int, ...]]:
    words = name.split()
    point = parse(" ".join(word for word in words if word != "q_len=all"))
    return point, point.lengths if "q_len=all" in words else (point.q_len,) * len(point.lengths)


def contiguous(cache: jax.Array, block_tables: jax.Array) -> jax.Array:  # [seqs, tokens, kv_heads, head_dim]
    return cache[block_tables].reshape(len(block_tables), -1, *cache.shape[2:])


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, block_tables: jax.Array, _: jax.Array, *, gather: bool) -> Any:
    if gather:
        k, v = contiguous(k, block_tables), contiguous(v, block_tables)
    implementation: Any = "cudnn" if jax.default_backend() == "gpu" else "xla"
    with jax.numpy_dtype_promotion("standard"):  # jax.nn on a CPU
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)


def fa3(q: jax.Array, k: jax.Array, v: jax.Array, *_: jax.Array) -> Any:
    from flash_attn3_jax import flash_mha

    return flash_mha(q, k, v, is_causal=True)


def variants(point: Prompt, method: str) -> dict[str, Any]:
    """Functions of (q, k_cache, v_cache, block_tables, lengths); the method's result is the fastest of them."""
    if method == "fa3":
        return {"": fa3}
    if method == "fa3 paged":
        fresh = point.counts == point.lengths
        return {
            str(n): functools.partial(fa3_attend, n, is_causal=True) for n in (FA3_SPLITS[:1] if fresh else FA3_SPLITS)
        }
    if "cudnn" in method:
        return {"": functools.partial(cudnn, gather=method != "cudnn")}
    options = make_options(point) | ({"query_starts": jnp.asarray(point.starts)} if point.packed else {})
    attend = functools.partial(paged_attention, implementation=method)
    return {"": functools.partial(with_scales, attend, **options)}


def caches_for(method: str, caches: tuple, block_tables: jax.Array) -> tuple:
    """`caches`, made contiguous for methods that need it."""
    if method not in ("cudnn", "fa3"):
        return caches
    return tuple(tuple(contiguous(cache, block_tables) for cache in pair) for pair in caches)


def compile_point(point: Prompt, methods: list[str]) -> dict[Any, Any]:
    """Jobs for `compile_all`, by (name, method, variant)."""
    shapes = input_shapes(point)

    def job(method: str, attend: Any) -> Any:
        caches = jax.eval_shape(functools.partial(caches_for, method), shapes.caches[0], shapes.block_tables)
        args = shapes.q, caches, shapes.block_tables, shapes.lengths
        return jax.jit(functools.partial(chain, point, attend)).lower(*args).compile()

    return {
        (point.name, method, variant): functools.partial(job, method, attend)
        for method in methods
        for variant, attend in variants(point, method).items()
    }


def expected_tokens(point: Prompt, inputs: Inputs) -> Iterator[tuple[slice, jax.Array]]:
    """Tokens of q, and the reference's output for each as if its sequence ended there."""
    reference = jax.jit(functools.partial(with_scales, paged_attention_reference, **make_options(point)))
    packed = inputs.q.reshape(-1, point.heads, point.head_dim)
    for row in checked_rows(point):
        count = min(CHECKED_TOKENS, point.counts[row])
        for end in sorted({count, (count + point.counts[row]) // 2, point.counts[row]}):
            tokens = slice(point.starts[row] + end - count, point.starts[row] + end)
            lengths = inputs.lengths[row : row + 1] - (point.counts[row] - end)
            table = inputs.block_tables[row : row + 1]
            yield tokens, reference(packed[tokens][None], *inputs.caches[0][0], table, lengths)[0]


def _again(run: Any, _: int) -> Any:
    return run()


def measure(
    point: Prompt, method: str, programs: dict[str, Any], inputs: Inputs, expected: list[tuple[slice, jax.Array]]
) -> dict[str, Any]:
    caches = caches_for(method, inputs.caches[0], inputs.block_tables)
    worst, times = 0.0, {}
    for variant, program in programs.items():
        run = functools.partial(program, inputs.q, caches, inputs.block_tables, inputs.lengths)
        first = poisoned(run)[1].reshape(-1, point.heads, point.head_dim)
        worst = max(worst, *(worst_error(point.name, first[tokens], wanted) for tokens, wanted in expected))
        times[variant] = slope_microseconds(functools.partial(_again, run), point.num_calls)
    best = min(times, key=lambda variant: times[variant])
    result: dict[str, Any] = {"us": times[best], "teraflops_per_second": point.flops / times[best] / 1e6}
    return result | {"error": worst} | ({"splits": int(best)} if best else {})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", help="names of points")
    parser.add_argument("--methods", nargs="+", choices=("mosaic_gpu", "xla"), help="by default the first that can be")
    parser.add_argument(
        "--peers", nargs="*", default=[], choices=tuple(PEERS), help="what is not installed is left out"
    )
    parser.add_argument("--toy", action="store_true", help="small, for trying this script out")
    add_output(parser)
    options = parser.parse_args(arguments)
    store = open_store("prefill", options)
    methods = options.methods or ["mosaic_gpu" if jax.default_backend() == "gpu" else "xla"]
    peers = [name for name in options.peers if name != "fa3" or installed(name)]
    methods += [method for peer in peers for method in PEERS[peer]]
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    names = options.points or (TOY_POINTS if options.toy else POINTS)
    for batch in itertools.batched(map(prompt, names), AT_ONCE):
        todo = {
            point: [m for m in methods if point.takes(m) and f"{point.name} {m}" not in store.points] for point in batch
        }
        compiled = compile_all({key: job for point in batch for key, job in compile_point(point, todo[point]).items()})
        for point in batch:
            if todo[point]:
                inputs = make_inputs(point)
                expected = list(expected_tokens(point, inputs))
            for method in todo[point]:
                programs = {
                    v: program for (name, m, v), program in compiled.items() if (name, m) == (point.name, method)
                }
                store.add(f"{point.name} {method}", measure(point, method, programs, inputs, expected))
            print_row(point.name, {m: store.points.get(f"{point.name} {m}") for m in methods})
        # Last: CUPTI may change what the process does afterwards.
        for point in (point for point in batch if "mosaic_gpu" in todo[point]):
            name = f"{point.name} mosaic_gpu"
            found = measure_kernels(point, compiled[point.name, "mosaic_gpu", ""], make_inputs(point))
            store.add(name, store.points[name] | found)
            print(f"{name:<60} kernels {found['kernels']:.1f} us {found['by_kernel']}", flush=True)


def print_row(name: str, results: dict[str, Any]) -> None:
    found = (
        f"{method} {p['us']:.1f} us, {p['teraflops_per_second']:.0f} TFLOP/s" for method, p in results.items() if p
    )
    print(f"{name:<36} {'; '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
