"""An allocator of the usual kind, to compare with: on the host, a deque and lists, one sequence after the other.

It hands out the same blocks in the same order as `jaxpaged.BlockAllocator`, so the benchmark can check each by the
other before it times either. Besides its own time it costs a way back to the host: it must know on the host which
sequences ended before it can free them, and the next step needs its tables and slots on the device.
"""

from collections import deque

import numpy as np


class HostAllocator:
    def __init__(self, num_blocks: int, block_size: int, num_seqs: int, max_blocks: int):
        self.block_size = block_size
        self.padding = num_blocks * block_size  # the slot of a token that is not there
        self.free_blocks = deque(range(num_blocks - 1, 0, -1))  # the next one last
        self.blocks: list[list[int]] = [[] for _ in range(num_seqs)]
        self.lengths = [0] * num_seqs
        self.block_tables = np.zeros((num_seqs, max_blocks), np.int32)

    def append(self) -> np.ndarray:
        """One token to every sequence: its slots, int32 [seqs]; a sequence that finds no block gets the padding."""
        slots = []
        for row, (blocks, length) in enumerate(zip(self.blocks, self.lengths, strict=True)):
            offset = length % self.block_size
            if offset == 0:
                if not self.free_blocks or len(blocks) == self.block_tables.shape[1]:
                    slots.append(self.padding)
                    continue
                block = self.free_blocks.pop()
                self.block_tables[row, len(blocks)] = block
                blocks.append(block)
            slots.append(blocks[-1] * self.block_size + offset)
            self.lengths[row] = length + 1
        return np.asarray(slots, np.int32)

    def free(self, ended: np.ndarray) -> None:
        """Gives back the blocks of the sequences `ended`, bool [seqs]."""
        for row in reversed(np.flatnonzero(ended).tolist()):
            self.free_blocks.extend(reversed(self.blocks[row]))
            self.blocks[row] = []
            self.lengths[row] = 0
            self.block_tables[row] = 0
