"""Continuous batching on the device: everything that an engine traces. Nothing here runs between steps on the host.

A slice is one call of a compiled program: many steps of the model, with scheduling and allocation between them.

| file | has |
|---|---|
| `options` | an engine's options, static here |
| `state` | `State`, kept on the device; `Inbox` and `Report`, which cross to it and back |
| `run_slice` | the program: submit requests, run steps, report |
| `step` | one step: plan, run the model, draw tokens, commit |
| `model` | the user's `apply` and `head`, with checks of what they return |
| `kinds` | the static shapes of steps, and which the next step has |
| `prefix_groups` | sequences that share blocks, which attention then reads once |
| `drafting` | guesses of the next tokens, and how often they are right |
| `scoring`, `sampling` | which rows need logits; tokens and logprobs from logits |
| `host_pages` | blocks copied to host memory and back, in programs of their own |
| `packing`, `pytrees` | many small arrays as one; checks that two pytrees are alike |
"""
