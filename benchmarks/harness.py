"""Timing for the benchmarks: device time of calls chained in one jit, kernel times, and the floor."""

import argparse
import contextlib
import datetime
import functools
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Event = tuple[float, float, str]  # on a GPU: begin and end in us, name

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SAME_RUN = ("device", "driver", "jax", "commit", "settings")  # equal for all points of one file
COLD_BYTES = 600_000_000  # total size of the rotated inputs: 12 times the L2 cache of an H100


def compile_all(jobs: dict[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """Runs compile jobs in threads: XLA releases Python's lock while it compiles."""
    with ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as threads:
        futures = {key: threads.submit(job) for key, job in jobs.items()}
        return {key: future.result() for key, future in futures.items()}


def slope_microseconds(dispatch: Callable[[int], Any], num_calls: int, seconds: float = 0.25) -> float:
    """Device time of one call, where `dispatch(i)` starts the i-th chain of `num_calls` calls.

    Measures the slope between two numbers of dispatches, so that fixed costs drop out (the first start and the final
    wait: 1.4 ms on a virtual machine). Returns the median of five slopes, which together last about `seconds`. Measures
    again with more dispatches if the slope is not positive.
    """

    def run(repetitions: int) -> float:
        start = time.perf_counter()
        for i in range(repetitions):
            result = dispatch(i)
        jax.block_until_ready(result)
        return time.perf_counter() - start

    run(1)
    once = max((run(5) - run(1)) / 4, 1e-6) if num_calls < 1000 else run(1)
    few = max(1, min(400, int(seconds / 25 / once)))
    while (slope := statistics.median((run(4 * few) - run(few)) / (3 * few) for _ in range(5))) <= 0:
        few *= 2  # other work on the machine disturbed the measurement
    return slope / num_calls * 1e6


def kernel_times(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """(name, microseconds) of every kernel that runs because of `run`, in order, from CUPTI. GPU only.

    `profiler.measure` would call twice with the same arguments, which donated state does not allow.
    """
    from jax.experimental.mosaic.gpu import profiler

    cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        jax.block_until_ready(run())
    finally:
        times = cupti._cupti_get_timings(False)  # False: keep CUPTI loaded for the next call
    return [(name, milliseconds * 1e3) for name, milliseconds in times or ()]


@contextlib.contextmanager
def traced(events: list[Event]) -> Iterator[None]:
    """Adds the events of the first GPU inside the context, in order, by JAX's profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            yield
        data = jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
        streams = {
            plane.name: lines
            for plane in data.planes
            if "GPU" in plane.name and (lines := [line for line in plane.lines if line.name.startswith("Stream")])
        }
        events += sorted(
            (event.start_ns / 1e3, (event.start_ns + event.duration_ns) / 1e3, event.name)
            for line in streams.get(min(streams, default=""), [])
            for event in line.events
        )


def by_kernel(times: list[tuple[str, float]], num_steps: int) -> dict[str, list[float]]:
    """Microseconds and launches per step, by kernel names without their numbers; the longest first."""
    total: dict[str, list[float]] = {}
    for name, microseconds in times:
        entry = total.setdefault(re.sub(r"[_.]?\d+$", "", name)[:60], [0.0, 0.0])
        entry[0] += microseconds / num_steps
        entry[1] += 1 / num_steps
    return dict(sorted(total.items(), key=lambda item: -item[1][0]))


READ_STAGES, READ_BYTES = 6, 16384  # ring of 6 x 16 KiB, a stage is 64 rows of 128 numbers; two programs per SM


@functools.partial(jax.jit, static_argnames="slots")
def read_only(k_cache: jax.Array, v_cache: jax.Array, token: jax.Array, *, slots: int) -> jax.Array:
    """Reads the first `slots` slots of both caches into shared memory and does nothing else: the floor.

    `token` f32 [128] is passed through, so that calls can be chained. On a CPU, a sum replaces the kernel.
    """
    if jax.default_backend() != "gpu":
        return token + k_cache.sum(dtype=jnp.float32) + v_cache.sum(dtype=jnp.float32)
    k_rows, v_rows = (cache.reshape(-1, cache.shape[-1]) for cache in (k_cache, v_cache))
    kv_heads, head_dim = k_cache.shape[2:]
    tile = READ_BYTES // (head_dim * k_cache.dtype.itemsize)
    num_tiles = max(1, slots * kv_heads // tile)  # a tile of K and one of V
    programs = min(2 * int(jax.devices()[0].core_count), num_tiles)

    def kernel(k_gmem, v_gmem, token_gmem, out_gmem, ring_smem, token_smem, full, token_full):  # type: ignore[no-untyped-def]
        program = lax.axis_index("program")
        mine = lax.div(num_tiles - program + programs - 1, jnp.int32(programs)) * 2

        def fetch(i: jax.Array) -> None:
            row = (program + lax.div(i, jnp.int32(2)) * programs) * tile
            for which, source in enumerate((k_gmem, v_gmem)):

                @pl.when(lax.rem(i, jnp.int32(2)) == which)
                def _copy(source: Any = source) -> None:
                    stage = lax.rem(i, jnp.int32(READ_STAGES))
                    plgpu.copy_gmem_to_smem(source.at[pl.ds(row, tile)], ring_smem.at[stage], full.at[stage])

        for i in range(READ_STAGES):

            @pl.when(i < mine)
            def _start(i: int = i) -> None:
                fetch(jnp.int32(i))

        def step(i: jax.Array, _: None) -> None:
            plgpu.barrier_wait(full.at[lax.rem(i, jnp.int32(READ_STAGES))])

            @pl.when(i + READ_STAGES < mine)
            def _next() -> None:
                fetch(i + READ_STAGES)

        lax.fori_loop(0, mine, step, None)

        @pl.when(program == 0)
        def _hand_through() -> None:
            plgpu.copy_gmem_to_smem(token_gmem, token_smem, token_full)
            plgpu.barrier_wait(token_full)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(token_smem, out_gmem)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(token.shape, token.dtype),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=(
            plgpu.SMEM((READ_STAGES, tile, head_dim), k_cache.dtype),
            plgpu.SMEM(token.shape, token.dtype),
            plgpu.Barrier(num_barriers=READ_STAGES),
            plgpu.Barrier(),
        ),
    )(k_rows, v_rows, token)


def read_chain(token: jax.Array, caches: tuple, *, slots: int, num_calls: int) -> jax.Array:
    for i in range(num_calls):
        token = read_only(*caches[i % len(caches)][:2], token, slots=slots)
    return token


@functools.cache
def read_bandwidth(seconds: float = 0.3) -> float:
    """Bytes per second of a kernel that only reads 4 GiB: the read ceiling of the card."""
    slots = 2**20 if jax.default_backend() == "gpu" else 2**10
    cache = random(0, shape=(slots // 16, 16, 8, 128), dtype="bfloat16")
    caches = ((cache, random(1, shape=cache.shape, dtype="bfloat16")),)
    chain = jax.jit(functools.partial(read_chain, slots=slots, num_calls=4))
    token = jnp.ones(128)
    return 2 * cache.nbytes / slope_microseconds(lambda _: chain(token, caches), 4, seconds) * 1e6


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "sharding"))
def random(seed: Any, *, shape: tuple[int, ...], dtype: str, sharding: Any = None) -> jax.Array:
    numbers = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16, out_sharding=sharding)
    return (numbers * 40 if dtype == "int8" else numbers).astype(dtype)


class Store:
    """The points of a benchmark by name, in a JSON file whose form `benchmarks/results/README.md` describes.

    The file is written whenever a point is added, so an interrupted run loses nothing and the next run continues it.
    With `path=None` points are kept in memory only. `device` names the GPU if JAX does not use it. `settings` apply to
    all points.
    """

    def __init__(self, path: Path | None, *, device: str | None = None, **settings: Any):
        self.path = path
        self.header = header(device) | ({"settings": settings} if settings else {})
        self.points: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            kept = json.loads(path.read_text())
            if any(kept.get(key) != self.header.get(key) for key in SAME_RUN):
                raise SystemExit(
                    f"{path} was measured on another machine, version or commit, or with other settings; "
                    "remove it to start over, or name another file with --output."
                )
            self.points = kept.pop("points")
            self.header = kept

    def add(self, name: str, point: dict[str, Any]) -> None:
        self.points[name] = point
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps({**self.header, "points": self.points}, indent=1) + "\n")
            part.replace(self.path)


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        help="the JSON file of the points, written one by one; by default in benchmarks/results/, none with --toy",
    )


class _Dict(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, dict(text.split("=", 1) for text in values))


def add_xla(parser: argparse.ArgumentParser) -> None:
    """`--xla NAME=VALUE ...`, as a dict for `compiler_options`; None if it is not given."""
    parser.add_argument("--xla", nargs="*", action=_Dict, metavar="NAME=VALUE", help="options to compile with")


def open_store(benchmark: str, options: argparse.Namespace, *, device: str | None = None, **settings: Any) -> Store:
    """The store at `--output`, by default `benchmarks/results/<gpu>/<benchmark>.json`."""
    path = options.output
    if path is None and not getattr(options, "toy", False):
        name = device or jax.devices()[0].device_kind
        path = RESULTS / name.lower().removeprefix("nvidia ").split()[0] / f"{benchmark.replace('.', '')}.json"
    return Store(path, device=device, **settings)


def header(device: str | None = None) -> dict[str, Any]:
    """All fields of a result file except its points: machine, versions, commit, date. None if unknown or missing."""
    if device is None and jax.default_backend() == "gpu":
        device = jax.devices()[0].device_kind
    changed = _read_output("git", "status", "--porcelain", "--untracked-files=no", ":/", ":!/benchmarks/results")
    commit = _read_output("git", "rev-parse", "--short=7", "HEAD")
    arguments = [word for at, word in enumerate(sys.argv) if at and "--output" not in sys.argv[at - 1 : at + 1]]
    module = getattr(sys.modules["__main__"], "__spec__", None)
    return {
        "device": device or f"{platform.machine()}, {os.cpu_count()} cores",
        "driver": _read_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if device else None,
        "jax": jax.__version__,
        "commit": f"{commit} and changes" if commit and changed else commit,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", module.name if module else sys.argv[0], *arguments]),
    }


def _read_output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(iter(done.stdout.splitlines()), None)
