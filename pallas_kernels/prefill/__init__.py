"""Attention of many query tokens over a paged cache: a Mosaic GPU kernel for Hopper (sm_90a).

    x_t = cap(scale q . k_t) - slope (n - t),    out = sum_t exp(x_t - lse) v_t
    lse = log(sum_t exp(x_t) + exp(sink))

The query tokens are packed: each sequence has any number of them, and one sequence directly follows another. An
item is a run of `item_tokens` tokens of one sequence with some query heads of one KV head, up to 128 rows: row r is
head r // item_tokens, token r % item_tokens. A work list, made on the device, holds the items, the longest first. Each
SM runs one program, which computes its share of the items with three warpgroups:

    warpgroups 0, 1   64 rows each:  S [64, tile]      = Q [64, head_dim]  K^T [head_dim, tile]
                                     O [64, head_dim] += P [64, tile]      V [tile, head_dim]
    warpgroup 2       fetches K and V, without a pause between items

| array | where it lives and how it moves |
|---|---|
| K, V | GMEM to rings of SMEM tiles; a copy is a cache block or a quarter of a tile; the four warps alternate |
| Q | GMEM to SMEM by asynchronous copies of 16 bytes, while the previous item is written |
| S, P, m, l, O | registers; O through SMEM to GMEM, lse directly to GMEM |

Tiles of an 8-bit cache are copied unchanged. A fourth warpgroup widens them to float16 in SMEM, where the products read
them (`widener` has the cost). Q is converted to float16 in place.

Without a causal mask (`Config.causal`) every query token sees the whole sequence, for example a prefix that many
sequences share.

A call with few query tokens has fewer items than there are SMs. Then several programs share an item, each with a part
of its tiles (`num_parts`). They write O in float32, and XLA merges the parts.

The softmax of a tile runs while the tensor cores multiply the previous tile's weights with its values. The copies pad
head_dim to a multiple of 64 with zeros.

The kernel follows only table entries of blocks with a token that some query of the item sees, and clamps ids to the
pool. For other entries it fetches block 0 and masks it. Rows of V that no query may see are zeroed in SMEM before the
product, because 0 x NaN is NaN; only tiles with a masked row need that.

| file | contents |
|---|---|
| `config` | the limits of the kernel, and how a call is divided |
| `refs` | every array with its shape, and the shared memory |
| `kernel` | a program from its start to its end |
| `launch` | the launch of both prefill kernels; `common.merge_parts`: the merge of an item's parts |
| `work_list`, `item` | the items, and an item inside the kernel |
| `fetch` | how K and V are fetched |
| `widener`, `scales` | how an 8-bit cache is widened and its scales are fetched; `common.scales`: their use |
| `steps` | the steps of the computation for each tile |
| `products` | the work of the tensor cores |
| `logits` | from the products of Q and K to the weights |
| `rows_of_item` | how Q is read and O and lse are written |

Source: Shah et al., FlashAttention-3, 2024 (https://arxiv.org/abs/2407.08608).
"""

from pallas_kernels.prefill.config import KERNEL as KERNEL
