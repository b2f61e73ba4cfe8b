"""The block allocator and the prefix cache."""
