"""A plot of the pool."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxpaged._allocator.block_allocator import BlockAllocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_MARKS = 4096  # shared blocks with a dot; more dots would hide the colours


def plot_blocks(allocator: BlockAllocator, *, axes: Axes | None = None) -> Axes:
    """Plots the pool as a grid with one cell per block, coloured by the sequence that holds the block.

    Free blocks are white, free blocks with a cached prefix light grey, and the null block black. A shared block has a
    dot, and the colour of the first sequence that holds it. Runs on the host and needs matplotlib:
    `pip install "jaxpaged[plot]"`.

    Args:
        allocator: the allocator to plot.
        axes: `matplotlib.axes.Axes` to draw on. None: a new figure.

    Returns:
        The axes. `axes.figure.savefig("blocks.png")` saves the plot.
    """
    import matplotlib
    import matplotlib.pyplot as plt
    from matplotlib.colors import to_rgb

    owners, shared = block_owners(allocator)
    columns = math.ceil(math.sqrt(allocator.num_blocks * 2))  # twice as wide as high
    num_rows = -(-allocator.num_blocks // columns)
    num_seqs = allocator.lengths.shape[0]
    palette = matplotlib.colormaps["hsv"](np.arange(num_seqs) * 0.618034 % 1)[:, :3] * 0.85 + 0.1
    special = np.array([to_rgb(name) for name in ("white", "lightgrey", "black")])
    cells = np.ones((num_rows * columns, 3))
    cells[: allocator.num_blocks] = np.concatenate([palette, special])[owners]  # below 0: from the end
    if axes is None:
        _, axes = plt.subplots(figsize=(10, 10 * num_rows / columns + 1))
    image: Any = cells.reshape(num_rows, columns, 3)
    axes.imshow(image, interpolation="nearest", aspect="equal")
    marked = np.flatnonzero(shared)[:MOST_MARKS]
    axes.plot(marked % columns, marked // columns, "o", color="black", markersize=max(1, 150 / columns), linestyle="")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(str(allocator).splitlines()[0].removeprefix("BlockAllocator: "), fontsize=9)
    return axes


FREE, WAITING, NULL = -3, -2, -1  # in the order of `special`


def block_owners(allocator: BlockAllocator) -> tuple[np.ndarray, np.ndarray]:
    """For each block: the first row that holds it, or FREE, WAITING or NULL; and whether it is shared."""
    tables, is_entry = np.asarray(allocator.rows), np.asarray(allocator.is_entry(allocator.lengths))
    holders = np.asarray(allocator.pool.num_holders())
    cached = np.asarray(allocator.pool.is_cached(jnp.arange(allocator.num_blocks, dtype=jnp.int32)))
    owners = np.where(cached, WAITING, FREE)
    for row in reversed(range(len(tables))):
        owners[tables[row][is_entry[row]]] = row % len(allocator.lengths)
    owners[0] = NULL
    return owners, holders > 1
