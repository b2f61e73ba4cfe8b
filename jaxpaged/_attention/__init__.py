"""The attention of a step, and the path of a call to a kernel:

1. `attention_step` has the `AttentionStep` that models attend with. Its `attend` writes k and v to the cache, notes
   the write (`writes`), and passes the cache, tables and plan on to `attend`. `dense_step` stands in for it without a
   cache.
2. `public` has `paged_attention`, and `call` checks its arguments (`options` the options). They become a `Call`.
3. `choose` picks the kernel and its configuration, or says why there is none: it reads shapes only. `plan` says when
   partitions follow the lengths, and makes the plan of a step. `decide` calls `choose` for this machine's GPU. On an
   untested GPU a self-test runs first (`kernel_cases`).
4. `run` splits a call with prefix groups into two (`shared_prefix`, `merge`), makes the plan if the step has none, and
   defines a kernel under `jit`, `vmap` and `grad`. `jaxpaged/_by_kernel` decides when a call is lowered.
5. `launch` makes the operands of the kernel. `runs` cuts the query tokens for it and joins the results.

`xla` computes calls without a kernel, over `xla_tiles`; `reference` is the definition. `explain` does steps 2 and 3
only. `tree` makes tree masks, and `context_parallel` attends over several devices.
"""
