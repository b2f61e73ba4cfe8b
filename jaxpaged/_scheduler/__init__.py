"""Which tokens of which request are computed in each step, as a pytree, inside jit."""
