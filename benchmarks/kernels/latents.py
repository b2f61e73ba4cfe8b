"""Paged decode attention over latents of 512 + 64 numbers: times beside the bytes of the latents.

Every point is checked against the reference before it is timed. Times are microseconds a call on the device:

  us       of calls chained in one jit, everything between the kernels included; each call reads other blocks if it can
  kernels  by CUPTI, of one call
  floor    the bytes of the latents at the rate of a kernel that only reads, in the same run

A point is `heads sequences x tokens`, and may name a cache's dtype and an implementation. With "two", rotary numbers
are stored in two.

    python -m benchmarks.kernels.latents
    python -m benchmarks.kernels.latents --points '16 64x4096' '16 64x4096 xla' '16 64x8192 float8_e4m3fn'
    python -m benchmarks.kernels.latents --flashinfer  # beside FlashInfer's kernel, in a CUDA graph; with 0.6.13
"""

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.checks import poisoned, worst_error
from benchmarks.harness import (
    add_output,
    by_kernel,
    compile_all,
    kernel_times,
    open_store,
    random,
    read_bandwidth,
    slope_microseconds,
)
from benchmarks.kernels.peers import attempt, error, graph_microseconds, to_torch, workspace
from jaxpaged import paged_attention, paged_attention_reference

LATENT, ROTARY, BLOCK_SIZE, SCALE = 512, 64, 64, 192**-0.5
LEAST_BYTES = 300_000_000  # of a pool: several times the L2 cache
POINTS = (
    "16 64x4096",
    "16 8x32768",
    "16 1x8192",
    "32 64x4096",
    "128 64x4096",
    "16 64x4096 xla",
    "16 64x8192",
    "16 64x8192 float8_e4m3fn",
    "16 64x8192 int8 two",
)


@dataclasses.dataclass(frozen=True)
class Point:
    name: str
    heads: int
    seqs: int
    length: int
    dtype: str
    width: int
    implementation: Any

    @staticmethod
    def parse(name: str) -> "Point":
        heads, shape, *others = name.split()
        seqs, length = map(int, shape.split("x"))
        dtype = next((other for other in others if other not in ("xla", "two")), "bfloat16")
        width = LATENT + ROTARY * (2 if "two" in others else 1)
        return Point(name, int(heads), seqs, length, dtype, width, "xla" if "xla" in others else "mosaic_gpu")

    @property
    def num_bytes(self) -> int:
        return self.seqs * self.length * self.width * jnp.dtype(self.dtype).itemsize

    @property
    def num_calls(self) -> int:
        return 16 if self.seqs == 1 else 4

    @property
    def operations(self) -> int:
        return 2 * self.seqs * self.length * self.heads * (self.width + LATENT)

    def tables(self) -> list[np.ndarray]:
        """Of each call, int32 [seqs, blocks], on a pool of `blocks` and the null block."""
        needed = self.seqs * self.length // BLOCK_SIZE
        order = np.random.default_rng(0).permutation(self.blocks) + 1
        shape = self.seqs, self.length // BLOCK_SIZE
        return [np.resize(np.roll(order, -i * needed), shape).astype(np.int32) for i in range(self.num_calls)]

    @property
    def blocks(self) -> int:
        block_bytes = BLOCK_SIZE * self.width * jnp.dtype(self.dtype).itemsize
        return max(self.seqs * self.length // BLOCK_SIZE, LEAST_BYTES // block_bytes)


def options_of(point: Point, scales: Any) -> dict[str, Any]:
    return dict(scale=SCALE, latent_values=LATENT) | ({} if point.dtype == "bfloat16" else dict(k_scale=scales))


def chain(point: Point, q: Any, cache: Any, scales: Any, tables: Any, lengths: Any) -> Any:
    """The last query and the first output: a part of an output is the next query."""
    first = None
    attend = functools.partial(paged_attention, implementation=point.implementation, **options_of(point, scales))
    for table in tables:
        out = attend(q, cache, None, table, lengths)
        first = out if first is None else first
        q = jnp.concatenate([out, q[..., LATENT:]], axis=-1)
    return q, first


def make_inputs(point: Point) -> Any:
    cache = random(0, shape=(point.blocks + 1, BLOCK_SIZE, 1, point.width), dtype="bfloat16").astype(point.dtype)
    scales = None if point.dtype == "bfloat16" else jnp.full(cache.shape[:3], 0.5, jnp.float32)
    q = random(1, shape=(point.seqs, point.heads, point.width), dtype="bfloat16")
    return q, cache, scales, list(map(jnp.asarray, point.tables())), jnp.full(point.seqs, point.length, jnp.int32)


def flashinfer(point: Point, inputs: Any, expected: Any) -> dict[str, Any]:
    """FlashInfer's calls on the same blocks; its plans, one for each table, are not counted."""
    import torch
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    jax.block_until_ready((inputs, expected))
    q, cache, _, tables, _ = inputs
    q, cache = to_torch(q), to_torch(cache)[:, :, 0]
    starts = torch.arange(point.seqs + 1, dtype=torch.int32)
    lengths = torch.full((point.seqs,), point.length, dtype=torch.int32)

    def planned(table: Any) -> Any:
        wrapper = BatchMLAPagedAttentionWrapper(workspace("flashinfer"))
        ids = torch.from_numpy(np.asarray(table).ravel())
        sizes = point.heads, LATENT, ROTARY, BLOCK_SIZE
        wrapper.plan(starts, starts * table.shape[1], ids, lengths, *sizes, False, SCALE, q.dtype, cache.dtype)
        return wrapper

    wrappers, out = [planned(table) for table in tables], torch.full_like(q[..., :LATENT], np.nan)
    operands = [part for x in (q, cache) for part in (x[..., :LATENT], x[..., LATENT:])]

    def run(i: int) -> None:
        wrappers[i % len(wrappers)].run(*operands, out=out)

    run(0)
    torch.cuda.synchronize()
    worst = error(out.float().cpu().numpy(), expected)
    return {"us": graph_microseconds(run, point.num_calls, 20), "error": worst}


def measure(point: Point, compiled: Any, bandwidth: float, *, with_flashinfer: bool) -> dict[str, Any]:
    inputs = make_inputs(point)
    q, cache, scales, tables, lengths = inputs
    _, first = poisoned(compiled, *inputs)
    rows = slice(0, 1)  # the reference gathers in float32
    expected = paged_attention_reference(
        q[rows], cache, None, tables[0][rows], lengths[rows], **options_of(point, scales)
    )
    floor = point.num_bytes / bandwidth * 1e6
    us = slope_microseconds(lambda _: compiled(*inputs), point.num_calls)
    result: dict[str, Any] = {
        "bytes": point.num_bytes,
        "calls": point.num_calls,
        "error": worst_error(point.name, first[rows], expected),
        "floor": floor,
        "us": us,
        "over_floor": us / floor,
        "teraflops": point.operations / us / 1e6,
    }
    if jax.default_backend() == "gpu":
        found = by_kernel(kernel_times(lambda: compiled(*inputs)), point.num_calls)
        result["by_kernel"] = {name[:40]: times[0] for name, times in list(found.items())[:4]}
    if with_flashinfer and point.dtype == "bfloat16" and point.width == LATENT + ROTARY:
        result["flashinfer"] = attempt(lambda: flashinfer(point, inputs, first))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", default=POINTS)
    parser.add_argument("--flashinfer", action="store_true", help="bfloat16 latents by FlashInfer too")
    add_output(parser)
    options = parser.parse_args()
    store = open_store("latents", options)
    points = [Point.parse(name) for name in options.points]

    def compile_point(point: Point) -> Any:
        shapes = jax.eval_shape(functools.partial(make_inputs, point))
        return jax.jit(functools.partial(chain, point)).lower(*shapes).compile()

    programs = compile_all({point: functools.partial(compile_point, point) for point in points})
    bandwidth = read_bandwidth()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, reads {bandwidth / 1e12:.3f} TB/s", flush=True)
    print(f"{'':<26} {'us':>8} {'floor':>8} {'ratio':>6} {'TFLOP/s':>8} {'error':>8}")
    for point in points:
        result = measure(point, programs[point], bandwidth, with_flashinfer=options.flashinfer)
        store.add(point.name, result)
        kernels = "  ".join(f"{name} {us:.1f}" for name, us in result.get("by_kernel", {}).items())
        print(
            f"{point.name:<26} {result['us']:8.1f} {result['floor']:8.1f} {result['over_floor']:6.3f} "
            f"{result['teraflops']:8.1f} {result['error']:8.1e}  {kernels}  {result.get('flashinfer', '')}",
            flush=True,
        )


if __name__ == "__main__":
    main()
