"""The host tier: blocks of the prefix cache in host memory, which come back once the pool has lost them.

`tier` decides what leaves and what comes back, `copies` moves it. The runner calls the tier at three points of a slice:
`before_send`, `run` and `after_report`.
"""
