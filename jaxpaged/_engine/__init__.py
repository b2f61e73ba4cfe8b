"""Continuous batching for a model that the caller brings: many steps in one jit, and the host beside them."""
