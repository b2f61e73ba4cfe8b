"""Code that `jaxpaged.nnx` and `jaxpaged.linen` share: settings, checks and computation. It does not import Flax.

`attention` has `AttentionSettings` and everything in a module except its parameters. `latent_attention` is the same
for multi-head latent attention. `lora` adds low-rank adapters to a linear layer.
"""
