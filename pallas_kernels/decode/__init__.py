"""Paged decode attention on every NVIDIA GPU since Ampere (sm_80): a Mosaic GPU kernel.

    x_t = cap(scale q . k_t) - slope (n - t),    out = sum_t exp(x_t - lse) v_t
    lse = log(sum_t exp(x_t) + exp(sink))

A program computes one partition of one sequence for one KV head. Its rows are the `group` query heads of that KV head
for each of the last `q_len` tokens; it multiplies them with tiles of 64 tokens. Each of its four warps handles 16 of a
tile's tokens in the first product, and 16 of each 64 columns of the head in the second:

    S^T [64, rows]        = K [64, head_dim]   Q^T [head_dim, rows]
    O^T [head_dim, rows] += V^T [head_dim, 64] P^T [64, rows]

The tokens are the M dimension of the products (m16n8k16), so a group of 4 is padded to 8 columns, not to 16 rows. The
same warps also start the copies: while one tile is computed, the next ones are in flight.

| array | where it lives and how it moves |
|---|---|
| K, V | GMEM to rings of SMEM tiles, from there through registers to the products |
| block tables, lengths, scalars | read from GMEM when they are needed, so all of them may be traced |
| Q | GMEM to SMEM, once; SMEM to registers once, or for each tile if there are many rows |
| S, m, l, O^T | registers, float32 |
| P | registers to SMEM and back, because a warp computes the weights of 16 tokens and needs all 64 |
| out, lse | registers to GMEM, once the partitions of a sequence are merged (`results`) |

Read the files in this order:

| file | contents |
|---|---|
| `config` | the limits of the kernel, and how a call is divided |
| `refs` | every array with its shape |
| `kernel` | a program from its start to its end, and the launch |
| `walk` | which tiles a program computes; `common.partition_plan`: how many partitions a sequence gets |
| `copies` | how Q, K and V are fetched: the only part that differs between GPUs; `common.cp_async`, `common.mlir` |
| `tiles` | how K and V of a tile become operands of the products; `common.widen`: 8-bit caches |
| `logits` | from the products of K and Q to the weights |
| `results` | how the partitions of a sequence are merged, and how rows are written |

The kernel follows only table entries of blocks with a token that some query sees, and clamps ids to the pool. For other
entries it fetches block 0 and masks it. Values that no query may see are zeroed in registers, because 0 x NaN is NaN;
only tiles with a masked token need that.

Tests run both kinds of copies on a Hopper GPU. For other GPUs the kernel is compiled but not run.

Sources: Dao et al., FlashAttention, 2022 (https://arxiv.org/abs/2205.14135) for the online softmax; Kwon et al., 2023
(https://arxiv.org/abs/2309.06180) for the blocks; Hong et al., FlashDecoding++, 2023 (https://arxiv.org/abs/2311.01282)
for padding the few rows to 8.
"""

from pallas_kernels.decode.config import KERNEL as KERNEL
