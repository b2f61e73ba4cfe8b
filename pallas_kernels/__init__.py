"""Raw Pallas (Mosaic GPU) kernels, one a file. Never imports jaxpaged or flax. Empty until the decode kernel lands."""
