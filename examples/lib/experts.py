"""The products of a mixture of experts, for all experts or grouped by expert.

Each token has k experts, `chosen`, and adds their outputs with the weights `shares`:

    out = sum over its experts e of share_e * (down_e(activate(gate_up_e x + bias_e)) + down_bias_e)

`all_experts` multiplies every token by every expert, and by a share of 0 where the expert is not chosen. It reads each
weight once, so it is the faster way for a step of few tokens. `grouped_experts` sorts the pairs of token and expert by
expert, and multiplies each only by its own expert's weights. Both need the weights in the same layout, in which XLA
copies none of them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

GROUPED_ABOVE = 128  # tokens of a step
LARGE_EXPERT = 8e6  # numbers in its `gate_up`; gpt-oss has 17 million, Qwen3-30B-A3B 3 [h200/experts.json]
STAGE = 64  # the kernel's block_k, which must divide the inputs; 128 does not divide gpt-oss's 2,880
ROWS = 8  # the kernel's number of rows must be a multiple

Activation = Callable[[jax.Array], jax.Array]  # [..., 2 * hidden features] -> [..., hidden features]


class ExpertWeights(NamedTuple):
    gate_up: jax.Array  # [experts, 2 * hidden features, features]
    down: jax.Array  # [experts, hidden features, features]
    gate_up_bias: jax.Array | None = None  # [experts, 2 * hidden features]
    down_bias: jax.Array | None = None  # [experts, features]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tile sizes of JAX's kernel for grouped products, with its names."""

    block_m: int  # rows
    block_n: int  # outputs
    block_k: int = STAGE  # inputs
    max_concurrent_steps: int = 4  # stages of the pipeline
    grid_block_n: int = 16  # tiles of outputs that are computed one after another for the same rows


def compute_experts(
    x: jax.Array,  # [tokens, features]
    chosen: jax.Array,  # int32 [tokens, k], k different experts
    shares: jax.Array,  # [tokens, k]
    weights: ExpertWeights,
    activate: Activation,
    *,
    grouped_above: int | None = None,
) -> jax.Array:
    """Returns [tokens, features]. Steps of more than `grouped_above` tokens are grouped.

    The default is `GROUPED_ABOVE` where JAX's kernel for grouped products runs. Elsewhere no step is grouped: XLA's own
    grouped products are slower than all experts.
    """
    tokens, k = chosen.shape
    tiles = choose_tiles(tokens * k, weights)
    if grouped_above is None:
        grouped_above = tokens if tiles is None else GROUPED_ABOVE
    if tokens <= grouped_above:
        return all_experts(x, chosen, shares, weights, activate)
    return grouped_experts(x, chosen, shares, weights, activate, tiles=tiles)


def all_experts(
    x: jax.Array, chosen: jax.Array, shares: jax.Array, weights: ExpertWeights, activate: Activation
) -> jax.Array:
    by_expert = _shares_by_expert(chosen, shares.astype(x.dtype), weights)
    # One matrix for all experts: only then does XLA add the bias inside the product on a GPU.
    gate_up = jnp.einsum("tf,of->to", x, weights.gate_up.reshape(-1, x.shape[-1]))
    if weights.gate_up_bias is not None:
        gate_up += weights.gate_up_bias.reshape(1, -1)
    gate_up = gate_up.reshape(len(x), len(weights.gate_up), -1)
    out = jnp.einsum("teh,ehf->tf", activate(gate_up) * by_expert[..., None], weights.down)
    return out if weights.down_bias is None else out + by_expert @ weights.down_bias


def grouped_experts(
    x: jax.Array,
    chosen: jax.Array,
    shares: jax.Array,
    weights: ExpertWeights,
    activate: Activation,
    *,
    tiles: Tiles | None,
) -> jax.Array:
    (tokens, k), shares = chosen.shape, shares.astype(x.dtype)
    pairs, indices = chosen.reshape(-1), jnp.arange(tokens * k, dtype=jnp.int32)
    experts, order = lax.sort((pairs, indices), num_keys=1)
    sizes = jax.nn.one_hot(pairs, len(weights.down), dtype=jnp.int32).sum(axis=0)
    places = jnp.zeros_like(order).at[order].set(indices, unique_indices=True)
    # Rows of padding are past the last group. Their outputs are never read.
    experts, order = (jnp.pad(each, (0, -len(each) % ROWS)) for each in (experts, order))

    gate_up = grouped_product(x[order // k], weights.gate_up, sizes, transposed=True, tiles=tiles)
    if weights.gate_up_bias is not None:
        gate_up += weights.gate_up_bias[experts]
    hidden = activate(gate_up) * shares.reshape(-1)[order][:, None]
    parts = grouped_product(hidden, weights.down, sizes, transposed=False, tiles=tiles)
    # A token gathers its k parts, so the order of the sum is fixed. A scatter would add in any order.
    out = parts[places].reshape(tokens, k, -1).sum(axis=1, dtype=jnp.float32).astype(x.dtype)
    return out if weights.down_bias is None else out + _shares_by_expert(chosen, shares, weights) @ weights.down_bias


@functools.partial(jax.jit, static_argnames=("transposed", "tiles"))  # so that all layers share one lowered kernel
def grouped_product(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, transposed: bool, tiles: Tiles | None
) -> jax.Array:
    """The products of the first `sizes[0]` rows and `weights[0]`, of the next `sizes[1]` rows and `weights[1]`, ...

    The weights are [groups, in, out], or [groups, out, in] if `transposed`. Without tiles, XLA computes it, and the
    gradient in any case. Rows past the last group are undefined.
    """

    def by_xla(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        return lax.ragged_dot(rows, weights.swapaxes(1, 2) if transposed else weights, sizes)

    if tiles is None:
        return by_xla(rows, weights, sizes)
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu  # slow to import

    @jax.custom_batching.sequential_vmap
    def by_kernel(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        how = dict(group_sizes=sizes, transpose_rhs=transposed, **dataclasses.asdict(tiles))
        return ragged_dot_mgpu.ragged_dot(rows, weights, **how)

    @jax.custom_batching.sequential_vmap
    def gradients(rows: jax.Array, weights: jax.Array, sizes: jax.Array, out: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(lambda rows, weights: by_xla(rows, weights, sizes), rows, weights)[1](out)

    product = jax.custom_vjp(by_kernel)
    product.defvjp(
        lambda *arrays: (by_kernel(*arrays), arrays),
        lambda arrays, out: (*gradients(*arrays, out), None),
    )
    return product(rows, weights, sizes)


def choose_tiles(num_pairs: int, weights: ExpertWeights) -> Tiles | None:
    """Tiles for this number of pairs of token and expert; None where the kernel does not run."""
    num_experts, hidden, features = weights.down.shape
    if not is_hopper() or weights.down.dtype.itemsize != 2 or hidden % STAGE or features % STAGE:
        return None
    return tiles_of(num_pairs, num_experts, hidden, features)


def tiles_of(num_pairs: int, num_experts: int, hidden: int, features: int) -> Tiles:
    if 2 * hidden * features > LARGE_EXPERT:
        return Tiles(block_m=128, block_n=192, grid_block_n=1)  # a part of the weights meets all rows of its expert
    return Tiles(block_m=64 if num_pairs < 64 * num_experts else 128, block_n=192)


def is_hopper() -> bool:
    return jax.default_backend() == "gpu" and jax.local_devices()[0].compute_capability == "9.0"


def _shares_by_expert(chosen: jax.Array, shares: jax.Array, weights: ExpertWeights) -> jax.Array:
    """[tokens, experts], 0 for experts that are not chosen."""
    return (jax.nn.one_hot(chosen, len(weights.down), dtype=shares.dtype) * shares[..., None]).sum(axis=1)
