"""The key/value cache: its form, writes, copies and transfers of blocks."""
