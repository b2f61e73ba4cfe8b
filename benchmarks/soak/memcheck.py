"""A few small calls through every path of the kernels, for compute-sanitizer:

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m benchmarks.soak.memcheck

Each array has its own allocation, so that a read past its end is an error and not a neighbour's bytes. CUDA graphs are
off. Inputs are made and results are checked on the CPU, so the sanitizer sees only the kernels.
"""

import argparse
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged import paged_attention
from tests.cases import OPTIONS, make_case, within_budget

CALLS: tuple[tuple[str, dict[str, Any], int | None], ...] = (  # name, shape, partitions
    ("single pass", {}, 1),
    ("partitions", {}, 3),
    ("chosen partitions", {}, None),
    ("chosen partitions, uneven", {"lengths": (1, 300, 0), "max_blocks": 20}, None),
    ("head_dim 64", {"head_dim": 64}, 2),
    ("head_dim 80", {"head_dim": 80}, 1),
    ("head_dim 256", {"head_dim": 256}, 2),
    ("block 8", {"block_size": 8, "max_blocks": 12}, 2),
    ("block 64", {"block_size": 64, "max_blocks": 3}, 2),
    ("block 256", {"block_size": 256, "max_blocks": 3}, 1),
    ("4 queries", {"q_len": 4}, 2),
    ("16 queries", {"q_len": 16}, 1),
    ("16 queries, partitions", {"q_len": 16, "options": OPTIONS["all"]}, 3),
    ("all options", {"options": OPTIONS["all"]}, 1),
    ("all options, partitions", {"options": OPTIONS["all"]}, 3),
    ("float16", {"dtype": jnp.float16}, 2),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", choices=("mosaic_gpu", "xla"), default="mosaic_gpu")
    options = parser.parse_args()
    os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"  # before JAX initialises its devices
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    device, cpu = jax.devices()[0], jax.devices("cpu")[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {options.implementation}", flush=True)
    bad = []
    for seed, (name, shape, num_partitions) in enumerate(CALLS):  # different seeds: no two calls have the same result
        start = time.monotonic()
        with jax.default_device(cpu):
            settings: dict[str, Any] = {"head_dim": 128, "dtype": jnp.bfloat16} | shape
            case = make_case(seed, **settings)
        with jax.default_device(device):
            out = paged_attention(
                *jax.device_put(case.arrays, device),
                num_partitions=num_partitions,
                implementation=options.implementation,
                **case.options,
            )
            found = np.asarray(out, np.float32)
        with jax.default_device(cpu):
            good = bool(within_budget(case, found).all())
        bad += [] if good else [name]
        print(f"{name:<24} {'right' if good else 'WRONG'} {time.monotonic() - start:5.1f} s", flush=True)
    if bad:
        raise SystemExit(f"over the error budget: {', '.join(bad)}")


if __name__ == "__main__":
    main()
