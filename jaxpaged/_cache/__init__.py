"""The KV cache: its arrays, and writes, copies and transfers of blocks."""
