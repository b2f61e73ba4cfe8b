"""Copies blocks over other blocks of the same pools, in place, a Mosaic GPU kernel for Hopper (sm_90a).

    new[destinations[i]] = old[sources[i]],    in every pool and every layer

The copy engine moves rows of a block from GMEM to a ring in SMEM and from there to the destination: each byte is read
once and written once. A pair is direct if its destination is no source and its source no destination. Direct pairs
can be copied at any time, and all programs share their tiles. The other pairs must all be read before one of them is
written. They are cut across: one program moves the same slice of all their blocks, first to its own rows of a buffer in
GMEM, and when all of it is there, to the destinations. Programs never wait for each other, and without such pairs
nothing is paid for them.

| array | where it lives and how it moves |
|---|---|
| pools | GMEM; tiles of their blocks to a ring in SMEM and back |
| pairs | GMEM, read as scalars |
| slices set aside | GMEM, through the same ring; not touched if every pair is direct |
"""

from pallas_kernels.copy_blocks.config import KERNEL as KERNEL
