"""The host side of continuous batching: requests, and the slices (`jaxpaged/_slice`) that run them. Nothing here is
traced.

A request takes this path:

1. `engine` accepts it, and `requests` checks it. Each completion becomes a `CompletionState` and waits in `books`,
   which knows what waits, what has been sent and what is on the device.
2. `runner` sends a slice and reads the one before it. `books.send` picks the rows, and `requests.make_inbox` makes the
   inbox, which crosses as one array.
3. The slice runs on the device: see `jaxpaged/_slice`. `program` has compiled it.
4. The report comes back as one array while the next slice runs. `books` enters the tokens, `counting` updates the
   stats, and `requests.make_output` makes what `step` returns.

| file | has |
|---|---|
| `generate` | an engine for one call |
| `records` | `SamplingParams`, `RequestOutput` and the other public records |
| `defaults`, `inputs` | options left at None; checks of weights and caches |
| `rollouts` | tokens that stay on the device, for a learner |
| `host_tier` | cached blocks in host memory: `tier` keeps account, `copies` moves them |
| `on_mesh`, `room` | several devices; memory reserved for arrays in transit |
| `interrupts`, `progress_bar` | Ctrl-C; `progress=True` |
"""
