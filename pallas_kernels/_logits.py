"""From the products of queries and keys to the logits: scale, soft cap, ALiBi, mask."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._rows import LOG2E, LOWEST, ROWS, Orientation
from pallas_kernels._scales import of_head
from pallas_kernels._walk import Walk

# The sum e + 1 is rounded, and the cap multiplies its error: 7e-4 of a logit here. Larger caps, which mean no cap
# (infinity comes as 1e30), are lowered to this one. It changes a logit of 30 by 5e-4 and one of 100 by 0.02, less than
# the rounding of q and k to 16 bits.
LARGEST_CAP = 4096.0


@dataclasses.dataclass(frozen=True)
class Logits:
    """The logits of one program's sequence and KV head, traced inside the decode kernel."""

    walk: Walk
    first_query: jax.Array  # int32 [], where it stands
    scale: jax.Array  # f32 []
    cap: jax.Array | None  # f32 []
    slopes: jax.Array | None  # f32 [rows]
    group: int
    orientation: Orientation  # of the products
    tree_bits: list[jax.Array] | None = None  # int32 [rows] each: the newest tokens that a row sees, 32 a word

    @classmethod
    def of(cls, refs: Any, walk: Walk, group: int, orientation: Orientation, tree_bits: Any | None = None) -> "Logits":
        """`refs`: with the options of the kernel; `tree_bits`: GMEM, int32 [seqs, words, rows]."""
        kv_head = walk.partition.kv_head
        scale = refs.scale[0]
        cap = None if refs.logits_soft_cap is None else refs.logits_soft_cap[0]
        slopes = None if refs.alibi_slopes is None else orientation.load(refs.alibi_slopes.at[kv_head])
        k_scale = of_head(refs.k_scale, kv_head)
        if k_scale is not None:
            scale = scale * k_scale
        trees = None
        if tree_bits is not None:
            trees = [orientation.load(tree_bits.at[walk.seq, word]) for word in range(tree_bits.shape[1])]
        return cls(walk, walk.first_query, scale, cap, slopes, group, orientation, trees)

    def __call__(self, products: jax.Array, tile: jax.Array, masked: bool) -> tuple[jax.Array, jax.Array | None]:
        """f32 [tile, rows], or by the orientation [rows, tile] -> logits in units of log2, and which of them are
        visible; None: all.
        """
        walk, shape, orientation = self.walk, products.shape, self.orientation
        if self.cap is None:
            logits = products * (self.scale * LOG2E)
        else:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1): the hardware's own tanh is good to 2^-11 only.
            cap = jnp.minimum(self.cap, LARGEST_CAP)
            e = jnp.exp2(products * (self.scale / cap * (2 * LOG2E)))
            logits = (cap * LOG2E) * (1.0 - 2.0 / (e + 1.0))
        if not masked and self.slopes is None:
            return logits, None
        tokens = plgpu.broadcasted_iota(jnp.int32, shape, 1 - orientation.axis, layout=ROWS) + tile * walk.tile
        in_call = orientation.tokens(shape, self.group) if walk.q_len > 1 else jnp.int32(0)
        distance = self.first_query + in_call - tokens
        if self.slopes is not None:
            logits -= orientation.over(self.slopes * LOG2E, shape) * distance.astype(jnp.float32)
        if not masked:
            return logits, None
        visible = distance >= 0
        if walk.window is not None:
            visible = jnp.logical_and(visible, distance < walk.window)
        if self.tree_bits is not None:
            place = tokens - self.first_query  # among the newest; negative before them
            bit_of = jnp.bitwise_and(place, 31)
            word_of = lax.shift_right_arithmetic(place, jnp.full(shape, 5, jnp.int32))
            for word, bits in enumerate(self.tree_bits):
                bit = jnp.bitwise_and(lax.shift_right_logical(orientation.over(bits, shape), bit_of), 1)
                visible = jnp.logical_and(visible, jnp.logical_or(word_of != word, bit == 1))
        return jnp.where(visible, logits, jnp.full(shape, LOWEST, jnp.float32)), visible
