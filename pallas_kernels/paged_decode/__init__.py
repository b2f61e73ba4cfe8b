"""Paged decode attention, a Mosaic GPU kernel for Hopper (sm_90a).

    x_t = cap(scale q . k_t) - slope (n - t),    out = sum_t exp(x_t - lse) v_t
    lse = log(sum_t exp(x_t) + exp(sink))

One program computes one partition of one sequence for one KV head: `group` query heads of each of the last `q_len`
tokens, together 33 to 64 rows, against tiles of `tile` tokens. The rows are the M dimension of both matrix products,
padded to 64:

    S [64, tile]      = Q [64, head_dim]  K^T [head_dim, tile]
    O [64, head_dim] += P [64, tile]      V [tile, head_dim]

Fewer rows, of which most would be padding, and 8-bit caches are left to the portable kernel.

| array | where it lives and how it moves |
|---|---|
| K, V | GMEM to a ring of SMEM tiles, one copy a cache block or quarter of a tile, by four warps in turn |
| block tables, lengths, scalars | read from GMEM when they are needed, so that all of them may be traced |
| Q | GMEM to SMEM row by row, once, and from there through registers to the layout of the products |
| P | stays in registers |
| m, l, O | registers, float32; at the end to GMEM, as finished rows through SMEM or as partials (`_merge`) |

To be read in this order:

| file | has |
|---|---|
| `decode_config` | what the kernel takes, and how a call is cut up |
| `_refs` | every array with its shape, and the shared memory |
| `_kernel` | a program from its start to its end, and the launch |
| `_walk` beside this folder, `_fetch` | which tiles of its sequence a program computes, and how they are fetched |
| `_many_rows` | what is done with a tile |
| `_output` | how finished rows are written |
| `_merge` beside this folder | how the partitions of a sequence are merged |

`_walk`, `_logits`, `_softmax`, `_rows`, `_merge` and `_launch` are shared with the portable kernel.

A program has two warpgroups: warpgroup 0 computes, warpgroup 1 fetches. The copy itself pads a head_dim with zeros to a
multiple of 64: the cache is read in place. A head_dim that is not a multiple of 16 is copied in parts, each padded to
64 columns (`_sizes.num_parts`).

Only table entries of blocks with a token that some query sees are followed, and ids are clamped to the pool. Instead of
other blocks, block 0 is fetched and masked. Rows of V that no query may see are zeroed in SMEM before the product,
because 0 x NaN is NaN; only tiles with such a row need that.

Sources: Dao et al., FlashAttention, 2022 (https://arxiv.org/abs/2205.14135) for the online softmax; Kwon et al., 2023
(https://arxiv.org/abs/2309.06180) for the blocks.
"""

from pallas_kernels.decode_config import Config as Config
from pallas_kernels.decode_config import check_supported as check_supported
from pallas_kernels.decode_config import default_config as default_config
from pallas_kernels.paged_decode._kernel import launch as launch
