"""Paged decode attention, a Mosaic GPU kernel for Hopper (sm_90a).

    x_t = cap(scale q . k_t) - slope (n - t),    out = sum_t exp(x_t - lse) v_t
    lse = log(sum_t exp(x_t) + exp(sink))

One program computes one partition of one sequence for one KV head: `group` query heads of each of the last `q_len`
tokens, together `rows` rows, against tiles of `tile` tokens. With up to 32 rows the tokens are the M dimension of both
matrix products, so that a group of 4 is padded to 8 columns, not to 64 rows:

    S^T [tile, rows]      = K [tile, head_dim]   Q^T [head_dim, rows]
    O^T [head_dim, rows] += V^T [head_dim, tile] P^T [tile, rows]

More rows of a 16-bit cache are the M dimension themselves, padded to 64, and S, P and O are not transposed.

| array | where it lives and how it moves |
|---|---|
| K, V | GMEM to a ring of SMEM tiles, one copy a cache block or quarter of a tile, by four warps in turn |
| block tables, lengths, scalars | read from GMEM when they are needed, so that all of them may be traced |
| Q | GMEM to SMEM row by row, once, and from there through registers to the layout of the products |
| P | registers to SMEM, transposed; with many rows it stays in registers |
| m, l, O^T | registers, float32; at the end to GMEM, as finished rows through SMEM or as partials (`_merge`) |

Caches of 8 bits are widened to float16 between SMEM and the products (`_widen`), and the SMEM of K and V is free as
soon as they are read. `_scales` says where their scales are used.

To be read in this order, for few rows, 16 bits and one partition the first six:

| file | has |
|---|---|
| `decode_config` | what the kernel takes, and how a call is cut up |
| `_refs` | every array with its shape, and the shared memory |
| `_kernel` | a program from its start to its end, and the launch |
| `_walk` beside this folder, `_fetch` | which tiles of its sequence a program computes, and how they are fetched |
| `_few_rows` | what is done with a tile |
| `_output` | how finished rows are written |
| `_many_rows`, `_narrow_cache` | the same for more than 32 rows, and for 8-bit caches |
| `_cluster`, `_inbox` | how the partitions of a cluster are merged |
| `_merge` beside this folder | how other partitions are merged |

`_logits`, `_softmax`, `_rows`, `_widen`, `_scales`, `_merge` and `_launch` are shared with the portable kernel.

A program has two warpgroups: warpgroup 0 computes, warpgroup 1 fetches. The copy itself pads a head_dim with zeros to a
multiple of 64: the cache is read in place. A head_dim that is not a multiple of 16 is copied in parts, each padded to
64 columns (`_sizes.num_parts`).

Only table entries of blocks with a token that some query sees are followed, and ids are clamped to the pool. Instead of
other blocks, block 0 is fetched and masked. Rows of V that no query may see are zeroed in SMEM before the product,
because 0 x NaN is NaN; only tiles with such a row need that.

Sources: Dao et al., FlashAttention, 2022 (https://arxiv.org/abs/2205.14135) for the online softmax; Hong et al.,
FlashDecoding++, 2023 (https://arxiv.org/abs/2311.01282) for padding the few rows to 8 rather than to 64; Kwon et al.,
2023 (https://arxiv.org/abs/2309.06180) for the blocks.
"""

from pallas_kernels.decode_config import Config as Config
from pallas_kernels.decode_config import check_supported as check_supported
from pallas_kernels.decode_config import default_config as default_config
from pallas_kernels.paged_decode._kernel import launch as launch
