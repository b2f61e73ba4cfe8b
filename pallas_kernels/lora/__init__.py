"""Adapters of each token (LoRA): two Triton kernels over blocks of rows that take the same adapter.

    h[t]   = x[t] @ a[ids[t]].T        lora_down, each part and some of the features in a program
    out[t] = h[t] @ b[ids[t]]          lora_up, some of the columns in a program

Rows are sorted by adapter, and those of one adapter cut in blocks of 16, the fewest that Triton's products take. So an
adapter is read once for 16 of its rows, and multiplied only with them. What else is read several times are rows of x
and h.
"""
