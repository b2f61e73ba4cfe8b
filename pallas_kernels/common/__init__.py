"""What kernels share. `sizes`, `shapes`, `options` and `merge_parts` do not import Mosaic."""
