"""Compiles kernels on a machine without a GPU, to the end: what ptxas says of each.

    python -m tests.kernels.resources sm_90 '[{"head_dim": 128}, {"head_dim": 256, "group": 8}]'

prints a list of {kernel: {"registers", "spill_bytes", "smem_bytes"}}, in JSON. A process of its own, since JAX must be
told before it starts; it needs the wheels that `make test-ptxas` installs.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {smem}
  threads_per_core_limit: {threads}
  core_count: {sms}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: {program_smem}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  runtime_version: "13.0.0"
  driver_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{name}"
"""
H100 = "sm_90"
WITHOUT_A_GPU = {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
# Bytes of SMEM are from the CUDA programming guide's table of compute capabilities.
GPUS = {
    "sm_80": dict(name="NVIDIA A100-SXM4-80GB", sms=108, threads=2048, smem=164 * 1024, bandwidth=2039 * 10**9),
    "sm_86": dict(name="NVIDIA GeForce RTX 3090", sms=82, threads=1536, smem=100 * 1024, bandwidth=936 * 10**9),
    "sm_89": dict(name="NVIDIA L4", sms=58, threads=1536, smem=100 * 1024, bandwidth=300 * 10**9),
    "sm_90": dict(name="NVIDIA H100 80GB HBM3", sms=132, threads=2048, smem=228 * 1024, bandwidth=3352 * 10**9),
    "sm_100": dict(name="NVIDIA B200", sms=148, threads=2048, smem=228 * 1024, bandwidth=8000 * 10**9),
    "sm_120": dict(name="NVIDIA GeForce RTX 5090", sms=170, threads=1536, smem=100 * 1024, bandwidth=1792 * 10**9),
}


def compute_capability(gpu: str) -> float:
    return int(gpu.removeprefix("sm_")) / 10


def program_smem(gpu: str) -> int:
    """Bytes of shared memory that a program can have."""
    return GPUS[gpu]["smem"] - 1024


def target_config(gpu: str) -> str:
    major, minor = divmod(int(gpu.removeprefix("sm_")), 10)
    features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    numbers = GPUS[gpu] | dict(major=major, minor=minor, features=features, program_smem=program_smem(gpu))
    return GPU.format(**numbers)


def compiled(gpu: str, shapes: dict[str, dict]) -> dict[str, dict[str, dict[str, int]]]:
    """What `main` prints, by the names of the shapes."""
    command = [sys.executable, "-m", "tests.kernels.resources", gpu, json.dumps(list(shapes.values()))]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    return dict(zip(shapes, json.loads(done.stdout), strict=True))


def installed() -> bool:
    """Whether JAX's CUDA plugin and ptxas are there."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return False
    nvidia = importlib.util.find_spec("nvidia")
    folders = [] if nvidia is None else list(nvidia.submodule_search_locations or [])
    return any(Path(folder).glob("**/bin/ptxas") for folder in folders)


def main() -> None:
    gpu, shapes = sys.argv[1], json.loads(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= WITHOUT_A_GPU | {
            "MOSAIC_GPU_DUMP_TO": folder,
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            "MOSAIC_GPU_DUMP_RESOURCES": "1",
        }
        print(json.dumps([compile_one(Path(folder), gpu, **shape) for shape in shapes]))


def make_mesh(gpu: str) -> Any:
    """A mesh of one GPU that is not there."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="cuda", target_config=target_config(gpu), topology="1x1x1")
    return topologies.make_mesh(topology, (1,), ("x",))


def compile_one(
    folder: Path, gpu: str, *, dtype: str = "bfloat16", kernel: str = "decode", **shape
) -> dict[str, dict[str, int]]:
    import jax
    import jax.numpy as jnp

    from tests.kernels.lowering import mosaic_for, traced_decode, traced_latent, traced_prefill

    mesh = make_mesh(gpu)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for file in folder.iterdir():
        file.unlink()
    how = shape | dict(dtype=jnp.dtype(dtype), sharding=sharding)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), mosaic_for(compute_capability(gpu)):
        if kernel == "prefill":
            trace = traced_prefill(**how)
        elif kernel == "latent":
            trace = traced_latent(**how)
        elif kernel == "portable_prefill":
            trace = traced_prefill(**how, portable_for=compute_capability(gpu))
        else:
            trace, _ = traced_decode(**how, compute_capability=compute_capability(gpu))
        trace.lower().compile()
    return {re.sub(r"_\d+$", "", file.stem): figures(file) for file in sorted(folder.glob("*.ptxas"))}


def figures(ptxas: Path) -> dict[str, int]:
    text, resources = ptxas.read_text(), ptxas.with_suffix(".resources.txt").read_text()

    def number(pattern: str, text: str) -> int:
        return int(re.search(pattern, text)[1])

    counts = re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", resources)
    barriers = sum(int(in_array) * int(arrays) for in_array, arrays in counts)
    return {
        "registers": number(r"Used (\d+) registers", text),
        "spill_bytes": number(r"(\d+) bytes spill stores", text) + number(r"(\d+) bytes spill loads", text),
        "smem_bytes": number(r"smem_scratch_bytes=(\d+)", resources) + 8 * barriers,
    }


if __name__ == "__main__":
    main()
