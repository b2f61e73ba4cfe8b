"""Attention of many query tokens over a paged cache on every NVIDIA GPU since Ampere (sm_80): a Mosaic GPU kernel.

    x_t = cap(scale q . k_t) - slope (n - t),    out = sum_t exp(x_t - lse) v_t
    lse = log(sum_t exp(x_t) + exp(sink))

It computes the same items as the prefill kernel for Hopper (`pallas_kernels.prefill`), with products whose operands are
in registers (m16n8k16) and copies of 16 bytes a thread (cp.async). A program computes one item. Each of its four warps
has 16 of every 64 rows; all warps read all keys and values:

    S [rows, tile]      = Q [rows, head_dim]  K^T [head_dim, tile]
    O [rows, head_dim] += P [rows, tile]      V [tile, head_dim]

Programs start in the order of the work list, the longest items first. Two programs share an SM if its SMEM allows: one
computes while the other waits.

| array | where it lives and how it moves |
|---|---|
| K, V | GMEM to rings of SMEM tiles by all threads, from there through registers to the products |
| Q | GMEM to SMEM, once; SMEM to registers for each tile |
| S, P, m, l, O | registers; the result of a product has the layout of the next product's left operand |
| out, lse | O through Q's SMEM to GMEM, lse directly to GMEM |

A tile's values are copied while its keys are multiplied, and the next tile's keys while its values are multiplied. Each
tile of an 8-bit cache is widened to float16 in SMEM before its product.

Keys and values that no query of an item may see are not copied; their rows in SMEM are zero.

| file | contents |
|---|---|
| `config` | the limits of the kernel, and how a call is divided |
| `kernel` | every array with its shape, a program from its start to its end, and the launch |
| `tiles` | how K and V are fetched |
| `products` | the products, and how their operands are read |
| `work_list`, `item`, `rows_of_item` of `prefill` | the items, and how their rows are read and written |
| `logits` of `prefill` | from the products of Q and K to the weights |

The kernel compiles for GPUs from sm_80 to sm_120. It has only run on a Hopper GPU.

Source: Dao, FlashAttention-2, 2023 (https://arxiv.org/abs/2307.08691).
"""

from pallas_kernels.prefill.portable.config import KERNEL as KERNEL
