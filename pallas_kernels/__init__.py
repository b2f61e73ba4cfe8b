"""Raw Pallas (Mosaic GPU) kernels. Never imports jaxpaged or flax.

| kernel | computes | GPUs |
|---|---|---|
| `portable_decode` | attention of one or a few query tokens a sequence, over a paged cache | since Ampere (sm_80) |
| `paged_prefill` | attention of prompts, packed, from a paged cache | Hopper (sm_90a) |
| `copy_blocks` | copies of blocks within a cache | Hopper (sm_90a) |

The folder of a kernel has an equation, a picture and an order of reading in its `__init__`. What a kernel takes and how
a call is cut up stands in a file beside it that does not import Mosaic: `portable_config`, `prefill_config`,
`copy_config`. Files with an underscore here are shared by kernels.
"""
