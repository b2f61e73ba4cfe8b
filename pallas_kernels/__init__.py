"""Raw Pallas (Mosaic GPU) kernels, one a file. Never imports jaxpaged or flax."""
