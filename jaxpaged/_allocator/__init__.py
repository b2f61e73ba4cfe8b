"""The block allocator and the prefix cache.

`block_pool` knows which blocks are free and how many rows hold each; `block_allocator` which row holds which. `state`
has its fields, and grants and takes back blocks, those behind a window too. `sharing` is fork and rollback,
`inspection` the invariants, `plot` a picture.

`prefix_cache` finds full blocks again by their tokens. A block that it lists and that nothing holds waits among the
free blocks, and is listed until it is taken. `listing` is what it knows of each: tokens, and a hash table over
`block_hashes`. `prefix_match` says with how many of the blocks found a sequence begins. `layer_groups` says which
layers of a model share a table.
"""
