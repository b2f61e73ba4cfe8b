"""The attention of a step, and the path of a call to a kernel:

1. `attention_step` has the `AttentionStep` that models attend with. Its `attend` writes k and v to the cache, notes
   the write (`writes`), and passes the cache, tables and plan on to `attend`. `dense_step` stands in for it without a
   cache.
2. `public` has `paged_attention`, and `call` checks its arguments (`options` the options). They become a `Call`.
3. `run` splits a call with prefix groups into two (`shared_prefix`, `merge`) and asks `decide` for each how it is
   computed on this machine. It makes a plan of partitions if the call follows one and its step made none (`plan`).
4. `kernels` has the ranked table of the kernels and gives a call to one: `runs` cuts its query tokens and joins the
   results.

`jaxpaged/_by_kernel` chooses from such a table by shapes only, and defines what a kernel computes under `jit`, `vmap`
and `grad`, and when it is lowered. `jaxpaged/_selftest` tests the kernels on an untested GPU.

`xla` computes calls without a kernel, over `xla_tiles`; `reference` is the definition. `explain` does steps 2 and 3
only. `tree` makes tree masks, and `context_parallel` attends over several devices.
"""
