"""Checks attention on this machine against the reference: `python -m jaxpaged.selftest`.

On an NVIDIA GPU since Ampere it checks the kernels, and times them if all are right: about half a minute. Elsewhere it
checks what XLA computes. It prints the versions, a table or two, and a line to report. Exit codes: 0, every result is
right; 1, a result is wrong or a kernel failed.
"""

import argparse
import functools
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from jaxpaged import __version__, _device
from jaxpaged._attention import kernel_cases
from jaxpaged._attention.choose import Implementation
from jaxpaged._attention.decide import keep_fault
from jaxpaged._attention.public import paged_attention
from pallas_kernels.decode import config as decode_config

POINTS = {"64 x 2048": (64, 2048), "8 x 8192": (8, 8192)}  # sequences, tokens of each: 32/8 heads of 128, bfloat16


def case_names(compute_capability: float) -> list[str]:
    """The cases that the kernels of a GPU take."""
    return [
        name
        for name, shape in kernel_cases.CASES.items()
        if compute_capability >= 8.9 or shape.get("cache_dtype") != jnp.float8_e4m3fn
    ]


def microseconds(run: Callable[[], Any], repetitions: int = 10) -> float:
    """Device time of a call, from the slope between few calls and many: fixed costs cancel."""

    def seconds(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            result = run()
        jax.block_until_ready(result)
        return time.perf_counter() - start

    seconds(2)
    slopes = [(seconds(4 * repetitions) - seconds(repetitions)) / (3 * repetitions) for _ in range(5)]
    return statistics.median(slopes) * 1e6


def time_point(seqs: int, length: int, implementations: tuple[Implementation, ...]) -> dict[str, float]:
    """Microseconds of each implementation, and of XLA summing the same keys and values, under "read"."""
    shape = seqs * length // 16 + 1, 16, 8, 128
    k_key, v_key, q_key = jax.random.split(jax.random.key(0), 3)
    k_cache, v_cache = (jax.random.normal(key, shape, jnp.bfloat16) for key in (k_key, v_key))
    q = jax.random.normal(q_key, (seqs, 32, 128), jnp.bfloat16)
    ids = np.random.default_rng(0).permutation(shape[0] - 1) + 1
    tables, lengths = jnp.asarray(ids.reshape(seqs, -1), jnp.int32), jnp.full(seqs, length, jnp.int32)
    read = jax.jit(lambda *caches: [cache.sum(dtype=jnp.float32) for cache in caches])
    times = {"read": microseconds(lambda: read(k_cache, v_cache))}
    for implementation in implementations:
        attend = jax.jit(lambda *arrays, name=implementation: paged_attention(*arrays, implementation=name))
        times[implementation] = microseconds(lambda: attend(q, k_cache, v_cache, tables, lengths))  # noqa: B023
    return times


def report(
    device: str,
    implementation: Implementation,
    names: Iterable[str],
    points: dict[str, tuple[int, int]] = POINTS,
) -> bool:
    """Prints the tables and the line to report; returns whether every result is right."""
    names = list(names)
    attend: Any = functools.partial(paged_attention, implementation=implementation, return_lse=True)
    with ThreadPoolExecutor() as threads:  # nearly all of the time is compilation
        results = dict(zip(names, threads.map(lambda name: kernel_cases.check(name, attend), names), strict=True))
    print(f"{'case':<40} worst error of a row over its largest number, at most {kernel_cases.TOLERANCE}")
    for name, (text, is_right) in results.items():
        print(f"{name:<40} {text} {'' if is_right else 'WRONG'}".rstrip())
    num_right = sum(is_right for _, is_right in results.values())
    summary = [f"{num_right} of {len(names)} cases right"]
    if points and num_right == len(names):
        print(f"\n{'sequences x length':<20} {'implementation':<16} {'us':>8} {'GB/s':>6} {'of reading':>10}")
        for point, (seqs, length) in points.items():
            times = time_point(seqs, length, tuple(dict.fromkeys((implementation, "xla"))))
            num_bytes = 2 * seqs * length * 8 * 128 * 2
            for way, us in times.items():
                print(f"{point:<20} {way:<16} {us:8.1f} {num_bytes / us / 1e3:6.0f} {times['read'] / us:10.2f}")
            us = times[implementation]
            summary.append(f"{point} {us:.0f} us, {times['read'] / us:.2f} of reading")
    print(f"\nPlease report this line: {versions()}, {device}, {implementation}: {'; '.join(summary)}")
    return num_right == len(names)


def versions() -> str:
    return (
        f"jaxpaged {__version__}, jax {jax.__version__}, jaxlib {jaxlib.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )


def find_gpu() -> _device.Gpu:
    """This machine's GPU. Raises `NotImplementedError` if the kernels do not run on it, or there is none."""
    gpu, least = _device.gpu(), decode_config.LEAST_COMPUTE_CAPABILITY
    if gpu.compute_capability < least:
        raise NotImplementedError(
            f"the kernels need compute capability {least} or higher; {gpu.name} has {gpu.compute_capability}."
        )
    return gpu


def main(arguments: list[str] | None = None) -> int:
    how = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser("python -m jaxpaged.selftest", description=__doc__, formatter_class=how).parse_args(
        arguments
    )
    print(versions())
    try:
        gpu = find_gpu()
    except NotImplementedError as reason:
        print(f"XLA is checked, not the kernels: {reason}\n")
        return 0 if report(_device.kind(), "xla", kernel_cases.CASES, {}) else 1
    device = f"{gpu.name} {gpu.compute_capability}"
    is_right = report(device, "mosaic_gpu", case_names(gpu.compute_capability))
    keep_fault(gpu, "" if is_right else "not every case is right")  # calls that name no implementation go by it
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
