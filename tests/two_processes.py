"""One of two processes with a device each. tests/test_several_devices.py runs both, on a CPU.

On two GPUs: `CUDA_VISIBLE_DEVICES=0 python -m tests.two_processes 12345 0`, and with 1 in place of both zeros.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpaged import _device, paged_attention
from jaxpaged.ops import context_parallel_attention
from tests.cases import make_case


def compare(ours: jax.Array, theirs: jax.Array) -> None:
    """Compares this process's part of an array on both devices with the same part of the whole."""
    (shard,) = ours.addressable_shards
    np.testing.assert_allclose(
        np.asarray(shard.data, np.float32), np.asarray(theirs, np.float32)[shard.index], atol=0.02
    )


def main() -> None:
    port, process = sys.argv[1:]
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(process))
    assert _device.device().process_index == int(process)
    mesh = jax.make_mesh((2,), ("devices",))
    case = make_case(lengths=(0, 40, 200), block_size=32, max_blocks=8, heads=8, kv_heads=4, dtype=jnp.bfloat16)
    expected = paged_attention(*case.arrays)

    def put(*specs: P) -> list[jax.Array]:  # not device_put: it compares the processes' values, and NaN is not NaN
        return [
            jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), np.asarray(x).__getitem__)
            for x, spec in zip(case.arrays, specs, strict=True)
        ]

    pool = P(None, None, "devices")
    compare(paged_attention(*put(P(None, "devices"), pool, pool, P(), P())), expected)

    specs = P(), P(None, "devices"), P(None, "devices"), P(), P()
    attend = functools.partial(context_parallel_attention, axis_name="devices")
    merged, _ = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))(*put(*specs))
    compare(merged, expected)


if __name__ == "__main__":
    main()
