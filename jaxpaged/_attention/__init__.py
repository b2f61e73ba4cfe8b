"""The attention function. The way of a call to a kernel:

1. `public` takes the arguments, `call` checks them (`options` the options), and they become a `Call`.
2. `choose` says which kernel computes it, in which configuration, or why none does: it reads shapes only.
   `plan` says when partitions follow the lengths. `decide` asks it for this machine's GPU, on which the kernels must be
   right: a self-test tells where nobody has (`kernel_cases`).
3. `run` makes two calls of one with prefix groups (`shared_prefix`, `merge`), makes the plan, and says what `jit`,
   `vmap` and `grad` make of a kernel. `_by_kernel` beside this folder decides when a call is lowered.
4. `launch` makes the operands of the kernel. `runs` cuts the query tokens for it and joins the results.

`xla` computes what no kernel does, over `xla_tiles`; `reference` is the definition. `explain` takes the first two steps
only.
"""
