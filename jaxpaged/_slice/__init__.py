"""Continuous batching on the device: the code that an engine traces. Nothing here runs on the host between steps.

A slice is one call of a compiled program. It runs many steps of the model, and schedules and allocates between them.

| file | contents |
|---|---|
| `options` | an engine's options; static |
| `state` | `State`, kept on the device; `Inbox` and `Report`, exchanged with the host |
| `run_slice` | the program: submit requests, run steps, report |
| `step` | one step: plan, run the model, draw tokens, commit |
| `model` | the user's `apply` and `head`, with checks of their results |
| `kinds` | the static shapes of steps, and the choice for the next step |
| `prefix_groups` | sequences with shared blocks, which attention reads once |
| `drafting` | drafts of the next tokens, and their acceptance rates |
| `scoring`, `sampling` | the rows that need logits; tokens and logprobs from logits |
| `prompt_aux` | `aux` of all rows, and the cached blocks that requests begin with |
| `host_pages` | copies of blocks to host memory and back, in separate programs |
| `packing`, `pytrees` | many small arrays as one; comparison of pytrees |
"""
