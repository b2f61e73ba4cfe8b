"""Continuous batching for a model that the caller brings: many steps in one jit, and the host beside them. The way of a
request:

1. `engine` takes it. `requests` checks it and makes a row of each completion, which waits in `books`: the host's
   account of what waits, what is under way and what is on the device.
2. `runner` sends a slice and reads the one before it. `books.send` picks the rows that go with it, and
   `requests.make_inbox` makes an `Inbox` of them (`state`), which crosses as one array (`packing`).
3. `slices.run_slice` is the program, compiled by `program`: it submits the rows to the scheduler
   (`jaxpaged/_scheduler`) and runs steps. Before each, `kinds` says how wide it is, and `drafting` what is guessed. In
   the step, `step_attention` is what the model calls, `prefix_groups` finds what is read once, and `scoring` and
   `sampling` make tokens of logits.
4. The `Report` comes back as one array, while the next slice runs. `books.take_places` and `take_tokens` enter it,
   `counting` counts, and `requests.make_output` makes what `step` returns.

`options` are the settings of an engine, `defaults` chooses those that are None, and `inputs` checks weights and caches.
`host_tier` keeps the account of blocks in host memory, `host_copies` moves them. `room` keeps room on a GPU for what
comes and goes, `rollouts` leaves tokens on the device, `on_mesh` is for several devices, `interrupts` for Ctrl-C, and
`generate` is an engine for one call.
"""
