"""Copies blocks to other blocks of the same pools, in place: a Mosaic GPU kernel for Hopper (sm_90a).

    new[destinations[i]] = old[sources[i]],    in every pool and every layer

The copy engine moves rows of a block from GMEM to a ring in SMEM and from there to the destination, so each byte is
read once and written once. A pair is direct if its destination is no source and its source no destination. Direct pairs
can be copied in any order, and all programs share their tiles. The other pairs must all be read before any is written.
They are divided into slices across blocks: a program copies the same slice of all their blocks to its own rows of a
buffer in GMEM, and then from the buffer to the destinations. Programs never wait for each other, and a call with only
direct pairs does not touch the buffer.

| array | where it lives and how it moves |
|---|---|
| pools | GMEM; tiles of their blocks to a ring in SMEM and back |
| pairs | GMEM, read as scalars |
| buffer of slices | GMEM, through the same ring; not touched if every pair is direct |
"""

from pallas_kernels.copy_blocks.config import KERNEL as KERNEL
