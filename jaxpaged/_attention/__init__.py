"""The attention of a step, and the path of a call to a kernel:

1. `attention_step` has the `AttentionStep` that models use. Its `attend` writes k and v to the cache, records the write
   (`writes`), and passes the cache, tables and plan to `attend`. `dense_step` replaces it for calls without a cache.
2. `public` has `paged_attention`. `call` checks its arguments and makes a `Call`.
3. `run` splits a call with prefix groups into two (`shared_prefix`, `merge`). For each, it chooses a kernel or XLA on
   this machine. If the kernel follows a plan of partitions and the step has none, it makes one.
4. `kernels` has the ranked table of kernels and launches one. `runs` splits the query tokens into runs and joins the
   results.

`jaxpaged/_by_kernel` chooses from such a table by shapes only, and defines a kernel's behaviour under `jit`, `vmap`,
`grad` and lowering. `jaxpaged/_selftest` tests the kernels on an untested GPU.

`xla` computes calls without a kernel, over the tiles of `xla_tiles`. `reference` is the definition. `explain` does only
steps 2 and 3. `tree` makes tree masks, and `context_parallel` attends over several devices.
"""
