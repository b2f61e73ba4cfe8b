"""The report of `python -m jaxpaged.selftest`: every case against the reference, and times."""

import functools
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from jaxpaged import __version__, _device
from jaxpaged._attention.public import paged_attention, planned_attention
from jaxpaged._by_kernel import Implementation
from jaxpaged._selftest import cases
from pallas_kernels.common.sizes import LEAST_COMPUTE_CAPABILITY

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # timed calls, in bfloat16
SIDE = 4096  # side of the matrices of the timed product
# Sequences, tokens per sequence, and new tokens among these.
POINTS = {
    "64 x 2048, one token": (64, 2048, 1),
    "8 x 8192, one token": (8, 8192, 1),
    "8 x 1024, prompts": (8, 1024, 1024),
    "1 x 8192, a prompt": (1, 8192, 8192),
}


def case_names(compute_capability: float) -> list[str]:
    """The cases that the kernels support on a GPU."""
    return [
        name
        for name, shape in cases.CASES.items()
        if compute_capability >= 8.9 or shape.get("cache_dtype") != jnp.float8_e4m3fn
    ]


def microseconds(run: Callable[[], Any]) -> float:
    """Device time of a call, from the slope between few and many calls, in which fixed costs cancel."""

    def seconds(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            result = run()
        jax.block_until_ready(result)
        return time.perf_counter() - start

    seconds(1)
    few = max(1, min(10, int(0.03 / seconds(1))))
    return statistics.median((seconds(4 * few) - seconds(few)) / (3 * few) for _ in range(5)) * 1e6


def time_point(seqs: int, length: int, q_len: int, implementations: tuple[Implementation, ...]) -> dict[str, float]:
    """Microseconds of each implementation, and as "limit" the time that this GPU needs at best: for single tokens, XLA
    summing the same keys and values; for prompts, a matrix product with the same number of operations."""
    shape = seqs * length // 16 + 1, 16, KV_HEADS, HEAD_DIM
    k_key, v_key, q_key = jax.random.split(jax.random.key(0), 3)
    k_cache, v_cache = (jax.random.normal(key, shape, jnp.bfloat16) for key in (k_key, v_key))
    q = jax.random.normal(q_key, (seqs, q_len, HEADS, HEAD_DIM), jnp.bfloat16)
    ids = np.random.default_rng(0).permutation(shape[0] - 1) + 1
    tables, lengths = jnp.asarray(ids.reshape(seqs, -1), jnp.int32), jnp.full(seqs, length, jnp.int32)
    if q_len == 1:
        read = jax.jit(lambda *caches: [cache.sum(dtype=jnp.float32) for cache in caches])
        times = {"limit": microseconds(lambda: read(k_cache, v_cache))}
    else:
        x = jax.random.normal(q_key, (SIDE, SIDE), jnp.bfloat16)
        product = jax.jit(jnp.matmul)
        times = {"limit": microseconds(lambda: product(x, x)) * num_operations(seqs, length) / (2 * SIDE**3)}
    for implementation in implementations:
        attend = jax.jit(functools.partial(paged_attention, implementation=implementation))
        times[implementation] = microseconds(functools.partial(attend, q, k_cache, v_cache, tables, lengths))
    return times


def num_operations(seqs: int, length: int) -> int:
    """Operations of both products of whole prompts."""
    return 4 * HEADS * HEAD_DIM * seqs * length * (length + 1) // 2


def print_times(points: dict[str, tuple[int, int, int]], implementation: Implementation) -> list[str]:
    """Prints a table. Returns summaries of its rows for the report."""
    print("\n| call | by | us | rate | of the limit |\n|---|---|---|---|---|")
    summaries = []
    for name, (seqs, length, q_len) in points.items():
        times = time_point(seqs, length, q_len, tuple(dict.fromkeys((implementation, "xla"))))
        for way, us in times.items():
            rate = f"{4 * seqs * length * KV_HEADS * HEAD_DIM / us / 1e3:.0f} GB/s"
            if q_len > 1:
                rate = f"{num_operations(seqs, length) / us / 1e6:.1f} TFLOP/s"
            by = way if way != "limit" else "limit: reading" if q_len == 1 else "limit: a matrix product"
            print(f"| {name} | {by} | {us:.1f} | {rate} | {times['limit'] / us:.2f} |")
        us = times[implementation]
        summaries.append(f"{name} {us:.0f} us, {times['limit'] / us:.2f} of the limit, {times['xla'] / us:.1f} x XLA")
    return summaries


def report(
    device: str,
    implementation: Implementation,
    names: Iterable[str],
    points: dict[str, tuple[int, int, int]] = POINTS,
) -> bool:
    """Prints the tables and the line to report. Returns whether every result is right."""
    names = list(names)
    attend: Any = functools.partial(planned_attention, implementation=implementation, return_lse=True)
    with ThreadPoolExecutor() as threads:  # most of the time is compilation
        results = dict(zip(names, threads.map(lambda name: cases.check(name, attend), names), strict=True))
    print(f"| case | worst error of a row over its largest number, at most {cases.TOLERANCE} |\n|---|---|")
    for name, (text, is_right) in results.items():
        print(f"| {name} | {text}{'' if is_right else ' WRONG'} |")
    num_right = sum(is_right for _, is_right in results.values())
    summary = [f"{num_right} of {len(names)} cases right"]
    if points and num_right == len(names):
        summary += print_times(points, implementation)
    print(f"\nPlease report this line: {versions()}, {device}, {implementation}: {'; '.join(summary)}")
    return num_right == len(names)


def versions() -> str:
    return (
        f"jaxpaged {__version__}, jax {jax.__version__}, jaxlib {jaxlib.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )


def find_gpu() -> _device.Gpu:
    """This machine's GPU. Raises `NotImplementedError` without a GPU, or if the kernels do not run on it."""
    gpu, least = _device.gpu(), LEAST_COMPUTE_CAPABILITY
    if gpu.compute_capability < least:
        raise NotImplementedError(
            f"the kernels need compute capability {least} or higher; {gpu.name} has {gpu.compute_capability}."
        )
    return gpu
