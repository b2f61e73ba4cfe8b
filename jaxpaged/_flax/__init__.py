"""Code that `jaxpaged.nnx` and `jaxpaged.linen` share: settings, checks, computation. It imports no Flax.

`attention` has `AttentionSettings` and all of a module between its input and the output projection.
`latent_attention` is the same for multi-head latent attention. `lora` adds low-rank adapters to a linear layer.
"""
