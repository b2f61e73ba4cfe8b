"""How an attention kernel is called: with its arrays by the names of its `Refs`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import interpret


def launch(
    name: str,
    body: Callable[[Any], None],  # gets the `refs`
    refs: Callable[..., Any],  # makes the `refs`
    inputs: dict[str, Any],  # arrays and pytrees of them; None: not of this call
    out_types: dict[str, Any],
    *,
    reduction_bytes: int = 2048,  # of SMEM, for reductions across warps
    **how: Any,  # of `plgpu.kernel`
) -> Any:
    """The outputs. If `arrivals` is the last of them, it is zeros at first."""
    operands, structure = jax.tree.flatten(tuple(inputs.values()))

    def kernel(*arrays: Any, **scratch_refs: Any) -> None:
        its_inputs = jax.tree.unflatten(structure, arrays[: len(operands)])
        named = dict(zip((*inputs, *out_types), (*its_inputs, *arrays[len(operands) :]), strict=True))
        body(refs(**named, **scratch_refs))

    kernel.__name__ = name
    params = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=reduction_bytes)
    make = functools.partial(interpret.kernel, kernel, compiler_params=params, **how)
    types = tuple(out_types.values())
    if "arrivals" not in out_types:
        return make(out_type=types)(*operands)
    written = make()

    # A kernel that writes into its operands cannot be mapped (jax 0.11.2 and 0.12.0).
    @jax.custom_batching.sequential_vmap
    def one_after_the_other(operands: list[jax.Array]) -> Any:
        first = *pl.empty_like(types[:-1]), jnp.zeros_like(types[-1])
        return pl.run_state(lambda results: written(*operands, *results))(first)

    return one_after_the_other(operands)
