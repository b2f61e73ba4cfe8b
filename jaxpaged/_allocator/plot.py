"""The pool as a picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxpaged._allocator.block_allocator import BlockAllocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_MARKS = 4096  # shared blocks; beyond that marks would hide the colours


def plot_blocks(allocator: BlockAllocator, *, axes: Axes | None = None) -> Axes:
    """Draws the pool, one cell a block: coloured by the sequence that holds it, shared blocks with a dot.

    Free blocks are white, those where a cached prefix waits light grey, the null block black. A shared block has the
    colour of the first sequence that names it. Runs on the host, and needs matplotlib: `pip install "jaxpaged[plot]"`.

    Args:
        allocator: whose pool.
        axes: where to draw, a `matplotlib.axes.Axes`; None: on a new figure.

    Returns:
        The axes; `axes.figure.savefig("blocks.png")` writes the picture.
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


FREE, WAITING, NULL = -3, -2, -1  # in the order of the colours


def block_owners(allocator: BlockAllocator) -> tuple[np.ndarray, np.ndarray]:
    """(for each block the first row that names it or one of the numbers above, whether it is shared)."""
    tables, is_entry = np.asarray(allocator.rows), np.asarray(allocator.is_entry(allocator.lengths))
    holders = np.asarray(allocator.pool.num_holders())
    cached = np.asarray(allocator.pool.is_cached(jnp.arange(allocator.num_blocks, dtype=jnp.int32)))
    owners = np.where(cached, WAITING, FREE)
    for row in reversed(range(len(tables))):
        owners[tables[row][is_entry[row]]] = row % len(allocator.lengths)
    owners[0] = NULL
    return owners, holders > 1
