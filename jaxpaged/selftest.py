"""Checks attention on this machine against the reference: `python -m jaxpaged.selftest`.

On an NVIDIA GPU since Ampere it checks the kernels, and times them if all are right: about half a minute. Elsewhere it
checks what XLA computes. It prints the versions, a table or two, and a line to report. Exit codes: 0, every result is
right; 1, a result is wrong or a kernel failed.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from jaxpaged import __version__, _device
from jaxpaged._attention.choose import Implementation
from jaxpaged._attention.plan import plan_partitions
from jaxpaged._attention.public import paged_attention
from jaxpaged._attention.reference import paged_attention_reference
from jaxpaged._attention.tree import tree_mask
from pallas_kernels.decode import config as decode_config
from pallas_kernels.decode.partition_plan import PartitionPlan

TOLERANCE = 2e-2  # bfloat16 rounds weights and output, each by 2^-9 or less; a wrong token is worse by far
LENGTHS = (0, 1, 15, 16, 700, 1024)

CASES: dict[str, dict[str, Any]] = {
    "bfloat16": dict(),
    "float16, head_dim 64, blocks of 32": dict(dtype=jnp.float16, head_dim=64, block_size=32),
    "head_dim 80, one head a KV head": dict(head_dim=80, heads=2),
    "head_dim 256, 3 partitions": dict(head_dim=256, num_partitions=3),
    "4 query tokens of 16 heads a KV head": dict(q_len=4, heads=32),
    "16 query tokens of 4 heads a KV head": dict(q_len=16),
    "64 heads a KV head": dict(heads=64, kv_heads=1),
    "a tree of 8 query tokens": dict(q_len=8, with_tree=True),
    "window, soft cap, ALiBi, sinks": dict(with_options=True),
    "a plan": dict(with_plan=True),
    "int8": dict(cache_dtype=jnp.int8),
    "int8, a scale a token and head": dict(cache_dtype=jnp.int8, with_token_scales=True),
    "float8_e4m3fn": dict(cache_dtype=jnp.float8_e4m3fn),
}
POINTS = {"64 x 2048": (64, 2048), "8 x 8192": (8, 8192)}  # sequences, tokens of each: 32/8 heads of 128, bfloat16


class Call(NamedTuple):
    arrays: tuple[jax.Array, ...]  # q, caches, tables, lengths
    options: dict[str, Any]
    num_partitions: int | None
    plan: PartitionPlan | None


def make_call(
    *,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 128,
    block_size: int = 16,
    q_len: int = 1,
    dtype: Any = jnp.bfloat16,
    cache_dtype: Any = None,
    with_token_scales: bool = False,
    with_options: bool = False,
    with_plan: bool = False,
    with_tree: bool = False,
    num_partitions: int | None = None,
) -> Call:
    """Blocks in random order, and NaN in every slot and scale that no sequence owns."""
    rng, lengths = np.random.default_rng(0), LENGTHS
    held = [-(-length // block_size) for length in lengths]
    ids = rng.permutation(sum(held)) + 1
    tables = np.full((len(lengths), max(held)), -1, np.int32)  # never followed past a sequence's end
    owned = np.zeros((sum(held) + 1, block_size), bool)
    for row, count, end, length in zip(tables, held, np.cumsum(held), lengths, strict=True):
        row[:count] = ids[end - count : end]
        for i, block_id in enumerate(row[:count]):
            owned[block_id, : length - i * block_size] = True

    def cache() -> jax.Array:
        values = rng.normal(size=(*owned.shape, kv_heads, head_dim)).astype(np.float32)
        if cache_dtype == jnp.int8:
            return jnp.asarray(np.clip(np.round(values * 40), -127, 127), jnp.int8)
        return jnp.asarray(np.where(owned[..., None, None], values, np.nan)).astype(cache_dtype or dtype)

    options: dict[str, Any] = {}
    if cache_dtype is not None:
        factor = np.where(owned[..., None], 1, np.nan) if with_token_scales else np.ones(())
        scales = np.broadcast_to(factor, (*factor.shape[:-1], kv_heads)).astype(np.float32)
        options |= dict(k_scale=jnp.asarray(scales / 40), v_scale=jnp.asarray(scales / 10))
    if with_options:
        options |= dict(sliding_window=300, logits_soft_cap=5.0)
        options |= dict(alibi_slopes=jnp.linspace(0.01, 0.5, heads), sinks=jnp.linspace(-2.0, 2.0, heads))
    if with_tree:
        parents = np.tile((np.arange(q_len) - 1) // 2, (len(lengths), 1))  # each has two children
        options["tree_mask"] = tree_mask(jnp.asarray(parents, jnp.int32))
    q = jnp.asarray(rng.normal(size=(len(lengths), q_len, heads, head_dim)), jnp.float32).astype(dtype)
    arrays = q, cache(), cache(), jnp.asarray(tables), jnp.asarray(lengths, jnp.int32)
    plan = plan_partitions(arrays[-1], num_kv_heads=kv_heads, q_len=q_len) if with_plan else None
    return Call(arrays, options, num_partitions, plan)


def worst_error(call: Call, implementation: Implementation) -> float:
    """The worst error of a row, divided by its largest number; NaN or infinity if a result is not finite."""
    out, lse = jax.jit(
        lambda arrays, options: paged_attention(
            *arrays,
            **options,
            num_partitions=call.num_partitions,
            plan=call.plan,
            implementation=implementation,
            return_lse=True,
        )
    )(call.arrays, call.options)
    expected, expected_lse = jax.jit(
        lambda arrays, options: paged_attention_reference(*arrays, **options, return_lse=True)
    )(call.arrays, call.options)
    largest = jnp.maximum(jnp.abs(expected).max(axis=-1), 1e-6)
    of_rows = jnp.abs(out.astype(jnp.float32) - expected).max(axis=-1) / largest
    seen = expected_lse > -jnp.inf
    of_lse = jnp.where(seen, jnp.abs(lse - expected_lse), jnp.where(lse == expected_lse, 0.0, jnp.inf))
    return float(jnp.maximum(of_rows.max(), of_lse.max()))


def check(name: str, implementation: Implementation) -> tuple[str, bool]:
    """The error of a case as text, or why it failed; and whether it is right."""
    try:
        error = worst_error(make_call(**CASES[name]), implementation)
    except Exception as failure:  # of any kind: the other cases are checked too
        return f"{type(failure).__name__}: {str(failure).partition('\n')[0][:80]}", False
    return f"{error:.1e}", error < TOLERANCE


def case_names(compute_capability: float) -> list[str]:
    """The cases that the kernels of a GPU take."""
    return [
        name
        for name, shape in CASES.items()
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
    with ThreadPoolExecutor() as threads:  # nearly all of the time is compilation
        results = dict(zip(names, threads.map(lambda name: check(name, implementation), names), strict=True))
    print(f"{'case':<40} worst error of a row over its largest number, at most {TOLERANCE}")
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
        return 0 if report(_device.kind(), "xla", CASES, {}) else 1
    device = f"{gpu.name} {gpu.compute_capability}"
    return 0 if report(device, "mosaic_gpu", case_names(gpu.compute_capability)) else 1


if __name__ == "__main__":
    sys.exit(main())
