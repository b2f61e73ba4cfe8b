"""Paged decode attention over latents for many heads, on Hopper: a Mosaic GPU kernel with warpgroup products.

    x_t = scale q . k_t,    out = sum_t exp(x_t - lse) v_t,    v_t = the first value_dim numbers of k_t

With 64 heads or more a latent is read once and multiplied often: the products bound the time, not the bytes. The decode
kernel, whose sums are in the registers of 128 threads, has room for 32 heads a program and reads each latent again for
the next ones. Here a program has 64 rows and two warpgroups:

| array | where it is |
|---|---|
| O [64, value_dim], float32 | registers, half of the columns in each warpgroup |
| Q [64, head_dim] | SMEM, for the whole program |
| latents, tiles of 64 tokens | SMEM: two stages, in three parts: two halves of the values, and the 64 columns behind |
| P [64, 64], the weights of a tile | SMEM, over the last columns of its keys, which are no longer needed |

Tile i belongs to warpgroup i % 2, which computes its S = Q K^T and its weights. Both multiply these with their half of
the tile's values, and each fetches its half of the next tile into the place that it has just read: no warp only copies.

`config` has the limits of the kernel, `kernel` the rest. Partitions of a sequence are merged by XLA.

Source of the division: FlashMLA (https://github.com/deepseek-ai/FlashMLA).
"""

from pallas_kernels.latent.config import KERNEL as KERNEL
