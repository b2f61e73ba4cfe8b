"""Which layers of a model share a block table, and which share a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxpaged._allocator.state import checked_windows, most_blocks


@dataclasses.dataclass(frozen=True)
class LayerGroups:
    """The groups of a model's layers, from `layer_groups`.

    Attributes:
        windows: the window of each group, or None: the argument of `BlockAllocator.create` and `Engine`.
        num_caches: the caches that the model needs, one for each layer of a group.
        layers: (index of the cache, index of the group) of each layer.
    """

    windows: tuple[int | None, ...]
    num_caches: int
    layers: tuple[tuple[int, int], ...]

    def num_blocks(self, length: int, *, block_size: int, chunk_tokens: int = 1) -> int:
        """The most blocks that a sequence holds in all groups while it grows to `length` tokens.

        Args:
            length: its tokens in the cache at the end.
            block_size: tokens in a block.
            chunk_tokens: the most tokens that are appended to it at a time.
        """
        return most_blocks(self.windows, -(-length // block_size), block_size, chunk_tokens)


def layer_groups(windows: Sequence[int | None]) -> LayerGroups:
    """Divides the layers of a model into groups of one window each, so that windows give their blocks back.

    A block belongs to one group, and holds its tokens' keys and values for all layers of the group, so all groups
    have the same number of layers, that of the rarest window (or None). The last group of a window may have fewer.
    Layers of several groups share a cache, in which they use different blocks.

    Args:
        windows: for each layer its `sliding_window`, or None.

    Raises:
        ValueError: there is no layer, or a window is no int or below 1.

    Example:
        >>> import jaxpaged
        >>> gemma_3_27b = jaxpaged.layer_groups(([1024] * 5 + [None]) * 10 + [1024] * 2)
        >>> gemma_3_27b.num_caches, gemma_3_27b.windows
        (10, (None, 1024, 1024, 1024, 1024, 1024, 1024))
        >>> gemma_3_27b.layers[4:7]  # the fifth and the sixth of the windows, and the first without one before it
        ((4, 1), (0, 0), (5, 1))
    """
    windows = checked_windows(windows)
    if not windows:
        raise ValueError("windows must have one entry for each layer; got none.")
    kinds = sorted(set(windows), key=lambda window: (window is not None, window or 0))
    num_caches = min(windows.count(kind) for kind in kinds)
    of_groups: list[int | None] = []
    layers: dict[int, tuple[int, int]] = {}
    for kind in kinds:
        of_kind = [layer for layer, window in enumerate(windows) if window == kind]
        for index, layer in enumerate(of_kind):
            layers[layer] = (index % num_caches, len(of_groups) + index // num_caches)
        of_groups += [kind] * -(-len(of_kind) // num_caches)
    return LayerGroups(tuple(of_groups), num_caches, tuple(layers[i] for i in range(len(windows))))
