"""Paged decode attention on every NVIDIA GPU since Ampere (sm_80), a Mosaic GPU kernel.

    x_t = cap(scale q . k_t) - slope (n - t),    out = sum_t exp(x_t - lse) v_t
    lse = log(sum_t exp(x_t) + exp(sink))

One program computes one partition of one sequence for one KV head: the `group` query heads that read it, of each of the
last `q_len` tokens, together `rows` rows, against tiles of 64 tokens. Each of its four warps multiplies 16 of a tile's
tokens, and 16 of each 64 columns of the head:

    S^T [64, rows]        = K [64, head_dim]   Q^T [head_dim, rows]
    O^T [head_dim, rows] += V^T [head_dim, 64] P^T [64, rows]

The tokens are the M dimension of the products (m16n8k16), so that a group of 4 is padded to 8 columns, not to 16 rows.
The same warps copy: while a tile is worked on, the next ones are on their way.

| array | where it lives and how it moves |
|---|---|
| K, V | GMEM to rings of SMEM tiles, from there through registers to the products |
| block tables, lengths, scalars | read from GMEM when they are needed, so that all of them may be traced |
| Q | GMEM to SMEM, once; to registers once, or with many rows for each tile |
| S, m, l, O^T | registers, float32 |
| P | registers to SMEM and back, because a warp has the weights of 16 tokens and needs all 64 |
| out, lse | registers to GMEM, once the partitions of a sequence are merged (`results`) |

To be read in this order:

| file | has |
|---|---|
| `config` | the limits of the kernel, and how a call is cut up |
| `refs` | every array with its shape |
| `kernel` | a program from its start to its end, and the launch |
| `walk` | which tiles a program computes; `common.partition_plan`: how partitions are shared out by length |
| `copies` | how Q, K and V are fetched: the only part that differs between GPUs; `common.cp_async`, `common.mlir` |
| `tiles` | where K and V of a tile are, and what the products read; `common.widen`: 8-bit caches |
| `logits` | from the products of K and Q to the weights |
| `results` | how the partitions of a sequence are merged, and the rows written |

Only table entries of blocks with a token that some query sees are followed, and ids are clamped to the pool. Instead of
other blocks, block 0 is fetched and masked. Values that no query may see are zeroed in registers, because 0 x NaN is
NaN; only tiles with such a token need that.

Its tests run both forms of the copies on a Hopper GPU. For other GPUs it is compiled, not run.

Sources: Dao et al., FlashAttention, 2022 (https://arxiv.org/abs/2205.14135) for the online softmax; Kwon et al., 2023
(https://arxiv.org/abs/2309.06180) for the blocks; Hong et al., FlashDecoding++, 2023 (https://arxiv.org/abs/2311.01282)
for padding the few rows to 8.
"""

from pallas_kernels.decode.config import KERNEL as KERNEL
