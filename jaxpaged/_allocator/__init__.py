"""The block allocator and the prefix cache.

`block_pool` knows which blocks are free and how many rows hold each; `block_allocator` which row holds which. `state`
has its fields, grants blocks and gets them back, also those a window has passed. `sharing` is fork and rollback,
`inspection` the invariants, `plot` a picture.

`prefix_cache` finds full blocks again by their tokens. A listed block without a holder waits among the free blocks, and
is listed until it is handed out. `listing` has the tokens of each and a hash table that finds them. `prefix_match` is
the longest prefix that a sequence can begin with. `layer_groups` says which layers of a model share a table.
"""
