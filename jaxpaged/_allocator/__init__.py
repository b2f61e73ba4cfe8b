"""The block allocator and the prefix cache.

`block_pool` tracks the free blocks and the number of holders of each block. `block_allocator` tracks the blocks of
each sequence; `state` has its fields, and grants and releases blocks. `sharing` has fork and rollback, `inspection`
the invariants, and `plot` a picture of the pool. `layer_groups` divides a model's layers into groups that share a
block table.

`prefix_cache` finds full blocks by their tokens. `cached_blocks` stores the tokens of each cached block and a hash
table over them. A cached block without a holder waits among the free blocks, and stays cached until it is handed out.
`prefix_match` finds the longest cached prefix of a sequence. `prefix_groups` finds sequences that share a prefix.
"""
