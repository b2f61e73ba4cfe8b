"""Continuous batching for a model that the caller brings: many steps in one jit, and the host around them.

A request takes this path:

1. `engine` accepts it. `requests` checks it and makes a row of each completion, which waits in `books`: the host's
   account of what waits, what has been sent and what is on the device.
2. `runner` sends a slice and reads the one before it. `books.send` picks the rows that go with it, and
   `requests.make_inbox` makes an `Inbox` of them (`state`), which is sent as one array (`packing`).
3. `slices.run_slice` is the program, compiled by `program`: it submits the rows to the scheduler
   (`jaxpaged/_scheduler`) and runs steps. Before each, `kinds` chooses its width and `drafting` its drafts.
   `prefix_groups` finds blocks that the step reads once.
4. `slices.one_step` makes an `AttentionStep` (`jaxpaged/_attention/attention_step`) and calls the model's `apply`,
   which returns hidden states of all tokens. `scoring` chooses the rows that need logits, `slices.apply_head` calls the
   model's `head` on them, and `sampling` draws tokens.
5. The `Report` comes back as one array, while the next slice runs. `books.take_places` and `take_tokens` enter it,
   `counting` counts, and `requests.make_output` makes what `step` returns.

`options` has the settings of an engine, `defaults` chooses those that are None, and `inputs` and `pytrees` check
weights and caches. `host_tier` keeps the account of blocks in host memory, `host_copies` moves them. `room` reserves
memory on a GPU for arrays in transit, `rollouts` leaves tokens on the device, `on_mesh` is for several devices,
`interrupts` for Ctrl-C, `progress_bar` for `progress=True`, and `generate` is an engine for one call.
"""
