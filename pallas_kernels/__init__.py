"""Raw Pallas (Mosaic GPU) kernels. Never imports jaxpaged or flax.

| folder | kernel | computes | GPUs |
|---|---|---|---|
| `decode` | `paged_decode` | attention of one or a few query tokens a sequence, over a paged cache | sm_80 and newer |
| `latent` | `paged_latent` | the same on latents, for 64 heads or more | sm_90a, Hopper |
| `prefill` | `paged_prefill` | attention of prompts, packed, from a paged cache | sm_90a, Hopper |
| `prefill.portable` | `portable_prefill` | the same | sm_80 and newer |
| `copy_blocks` | `copy_blocks` | copies of blocks within a cache | sm_90a, Hopper |
| `common` | | code shared by these kernels | |

Each kernel's `__init__` documents its equation, its arrays and the order to read its files in, and exports one object,
`KERNEL` (see `common.interface`). `config` has the kernel's limits and divides a call into programs; it does not import
Mosaic. `kernel` has the body and `launch`.
"""
