"""What kernels share. `sizes`, `options` and `merge_parts` do not import Mosaic."""
