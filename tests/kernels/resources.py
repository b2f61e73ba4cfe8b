"""Compiles kernels for an H100 on a machine without a GPU, to the end: what ptxas says of each.

    python -m tests.kernels.resources '[{"head_dim": 128}, {"head_dim": 256, "group": 8}]'

prints a list of {kernel: {"registers", "spill_bytes", "smem_bytes"}}, in JSON. A process of its own, since JAX must be
told before it starts; it needs the wheels that `make test-ptxas` installs.
"""

import importlib.util
import json
import os
import re
import sys
import tempfile
from pathlib import Path

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def installed() -> bool:
    """Whether JAX's CUDA plugin and ptxas are there."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return False
    nvidia = importlib.util.find_spec("nvidia")
    folders = [] if nvidia is None else list(nvidia.submodule_search_locations or [])
    return any(Path(folder).glob("**/bin/ptxas") for folder in folders)


def main() -> None:
    shapes = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "CUDA_VISIBLE_DEVICES": "-1",
            "JAX_PLATFORMS": "cpu",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "MOSAIC_GPU_DUMP_TO": folder,
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            "MOSAIC_GPU_DUMP_RESOURCES": "1",
        }
        print(json.dumps([compile_one(Path(folder), **shape) for shape in shapes]))


def compile_one(folder: Path, *, dtype: str = "bfloat16", prefill: bool = False, **shape) -> dict[str, dict[str, int]]:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from tests.kernels.lowering import traced, traced_prefill

    topology = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for file in folder.iterdir():
        file.unlink()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        how = dict(dtype=jnp.dtype(dtype), sharding=sharding)
        trace = traced_prefill(**shape, **how) if prefill else traced(**shape, **how)[0]
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
