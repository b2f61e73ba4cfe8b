"""Code shared by the kernels. `interface`, `partition_plan`, `sizes` and `merge_parts` do not import Mosaic."""
