"""Raw Pallas (Mosaic GPU) kernels. Never imports jaxpaged or flax.

| kernel | computes | GPUs |
|---|---|---|
| `paged_decode` | attention of one query token of each sequence, or of few, from a paged cache | Hopper (sm_90a) |
| `portable_decode` | the same | Ampere (sm_80) and newer |
| `paged_prefill` | attention of prompts, packed, from a paged cache | Hopper (sm_90a) |
| `copy_blocks` | copies of blocks within a cache | Hopper (sm_90a) |

The folder of a kernel has an equation, a picture and an order of reading in its `__init__`. What a kernel takes and how
a call is cut up stands in a file beside it that does not import Mosaic: `decode_config`, `portable_config`,
`prefill_config`, `copy_config`. Files with an underscore here are shared by kernels.
"""
