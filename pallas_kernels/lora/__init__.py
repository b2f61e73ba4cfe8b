"""Each row of a layer's input through its own low-rank adapter, on every NVIDIA GPU since Ampere: a Mosaic GPU kernel.

    out[t] = (x[t] @ A[ids[t]].T) @ B[ids[t]]

Unfinished: it is compiled for GPUs from sm_80 to sm_120, and its programs were evaluated without a GPU, thread by
thread. It has never run on one, so nobody knows its speed, and `jaxpaged.lora` uses it only if it is named.

XLA sorts the rows by adapter and cuts them into tiles of 16 rows of one adapter. A program computes one tile, in one
part of the outputs (q, k and v are three parts of one layer: each has an A of its own). It has two warpgroups of four
warps:

    H [16, rank]     = X [16, features]  A^T [features, rank]     each warp an eighth of the features
    out [16, columns] = H [16, rank]     B [rank, columns]        each warp an eighth of the columns

| array | where it lives and how it moves |
|---|---|
| A, B and rows of X | GMEM to a ring in SMEM, from there to registers, both ways by the thread that multiplies them |
| H | registers: the sums of the warps are added by way of SMEM |
| out | registers to GMEM |

A thread copies 16 bytes at a time (cp.async) and waits only for its own copies, so that the warps meet only once,
where H is added up. Copies of B begin while A is multiplied: there is one queue for both. No matrix is tiled or
swizzled in SMEM: the order in which a product's operands (m16n8k16) hold their numbers is free, as long as it is the
same in both, and a thread takes the numbers that are next to each other in GMEM.

| file | has |
|---|---|
| `config` | what the kernel takes |
| `tiles` | how rows are sorted into tiles |
| `kernel` | every array with its shape, a program from its start to its end, and the launch |
| `threads` | what a thread copies, multiplies and stores |
| `registers` | where it finds that, and how registers are operands of products |
"""
