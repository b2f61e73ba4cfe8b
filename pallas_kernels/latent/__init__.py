"""Paged decode attention over latents for many heads on Hopper: a Mosaic GPU kernel with warpgroup products.

    x_t = scale q . k_t,    out = sum_t exp(x_t - lse) v_t,    v_t = the first value_dim numbers of k_t

With 64 heads or more, each latent is multiplied so often that the products bound the time, not the memory. The decode
kernel keeps its sums in the registers of 128 threads, so it has room for 32 heads a program and reads each latent again
for the next heads. Here a program has 64 rows and two warpgroups:

| array | where it is |
|---|---|
| O [64, value_dim], float32 | registers, half of the columns in each warpgroup |
| Q [64, head_dim] | SMEM, for the whole program |
| latents, tiles of 64 tokens | SMEM, two stages of three parts: two halves of the values, and the last 64 columns |
| P [64, 64], the weights of a tile | SMEM, in place of the last columns of its keys, which are no longer needed |

Tile i belongs to warpgroup i % 2, which computes its S = Q K^T and its weights. Both warpgroups multiply the weights
with their half of the tile's values, and each copies its half of a later tile over the half that it has just read. No
warp is set aside for copies.

`config` has the limits of the kernel, and `kernel` the body. XLA merges the partitions of a sequence.

Source for the division into warpgroups: FlashMLA (https://github.com/deepseek-ai/FlashMLA).
"""

from pallas_kernels.latent.config import KERNEL as KERNEL
