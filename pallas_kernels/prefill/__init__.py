"""Attention of many query tokens over a paged cache, a Mosaic GPU kernel for Hopper (sm_90a).

    x_t = cap(scale q . k_t) - slope (n - t),    out = sum_t exp(x_t - lse) v_t
    lse = log(sum_t exp(x_t) + exp(sink))

The query tokens are packed: each sequence has any number of them, right after the sequence before. An item is a run of
`item_tokens` tokens of one sequence and some query heads of one KV head, together up to 128 rows: row r is head
r // item_tokens, token r % item_tokens. A work list, made on the device, holds the items, the longest first. A program
on each SM computes its share of them, one after the other, with three warpgroups:

    warpgroups 0, 1   64 rows each:  S [64, tile]      = Q [64, head_dim]  K^T [head_dim, tile]
                                     O [64, head_dim] += P [64, tile]      V [tile, head_dim]
    warpgroup 2       fetches K and V of its items, without a stop between two of them

| array | where it lives and how it moves |
|---|---|
| K, V | GMEM to rings of SMEM tiles, one copy a cache block or quarter of a tile, by four warps in turn |
| Q | GMEM to SMEM by asynchronous copies of 16 bytes, while the item before is written |
| S, P, m, l, O | registers; O through SMEM to GMEM, lse directly to GMEM |

An 8-bit cache is fetched as it is. A fourth warpgroup widens its tiles to float16 in SMEM, where the products read
them; `widener` says at what cost. Q becomes float16 in place.

Without a causal mask (`Config.causal`) every query token sees the whole sequence: the queries of many sequences, for
example, and the blocks that all of them begin with.

Few query tokens make fewer items than there are SMs. Then several programs compute an item, each a part of its tiles
(`num_parts`). They write O in float32, and XLA merges the parts.

The softmax of a tile runs while the tensor cores multiply the weights of the tile before with its values. The copy
itself pads a head_dim with zeros to a multiple of 64.

Only table entries of blocks with a token that some query of an item sees are followed, and ids are clamped to the pool.
Instead of other blocks, block 0 is fetched and masked. Rows of V that no query may see are zeroed in SMEM before the
product, because 0 x NaN is NaN; only tiles with such a row need that.

| file | has |
|---|---|
| `config` | the limits of the kernel, and how a call is cut up |
| `refs` | every array with its shape, and the shared memory |
| `kernel` | a program from its start to its end |
| `launch` | how both prefill kernels are called; `common.merge_parts`: the parts of an item, put together |
| `work_list`, `item` | the items, and an item inside the kernel |
| `fetch` | how K and V are fetched |
| `widener`, `scales` | how an 8-bit cache is widened, and its scales fetched; `common.scales`: where they are used |
| `steps` | what is done with a tile |
| `products` | the work of the tensor cores |
| `logits`, `softmax` | from the products of Q and K to the weights |
| `rows_of_item` | how Q is read and O and lse are written |

Source: Shah et al., FlashAttention-3, 2024 (https://arxiv.org/abs/2407.08608).
"""

from pallas_kernels.prefill.config import KERNEL as KERNEL
