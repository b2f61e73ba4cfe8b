"""Divides a model's layers into groups that share a block table, and assigns their caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxpaged._allocator.state import checked_windows, most_blocks


@dataclasses.dataclass(frozen=True)
class LayerGroups:
    """Layer groups of a model, made by `layer_groups`.

    Attributes:
        windows: sliding window of each group in tokens, or None; the `windows` of `BlockAllocator.create` and `Engine`.
        num_caches: number of caches that the model needs, one for each layer of a group.
        layers: (cache index, group index) of each layer.
    """

    windows: tuple[int | None, ...]
    num_caches: int
    layers: tuple[tuple[int, int], ...]

    def num_blocks(self, length: int, *, block_size: int, chunk_tokens: int = 1) -> int:
        """Maximum number of blocks that a sequence holds in all groups together while it grows to `length` tokens.

        Args:
            length: cached tokens at the end.
            block_size: tokens per block.
            chunk_tokens: maximum number of tokens appended at once.
        """
        return most_blocks(self.windows, -(-length // block_size), block_size, chunk_tokens)


def layer_groups(windows: Sequence[int | None]) -> LayerGroups:
    """Divides the layers of a model into groups with one sliding window each, so that passed blocks can be reused.

    A block belongs to one group, and holds the keys and values of its tokens for all layers of the group. All groups
    therefore have the same number of layers: the number of layers with the rarest window (or None). The last group of
    a window may have fewer. Layers of different groups share a cache, in which they use different blocks.

    Args:
        windows: sliding window of each layer in tokens, or None for full attention.

    Returns:
        The windows for the allocator, the number of caches, and the cache and group of each layer.

    Raises:
        ValueError: `windows` is empty, or a window is not an int or below 1.

    Example:
        >>> import jaxpaged
        >>> gemma_3_27b = jaxpaged.layer_groups(([1024] * 5 + [None]) * 10 + [1024] * 2)
        >>> gemma_3_27b.num_caches, gemma_3_27b.windows
        (10, (None, 1024, 1024, 1024, 1024, 1024, 1024))
        >>> gemma_3_27b.layers[4:7]  # a layer with a window, the first layer without one, and the next with a window
        ((4, 1), (0, 0), (5, 1))
    """
    windows = checked_windows(windows)
    if not windows:
        raise ValueError("windows must have one entry for each layer; got none.")
    kinds = sorted(set(windows), key=lambda window: (window is not None, window or 0))
    num_caches = min(windows.count(kind) for kind in kinds)
    group_windows: list[int | None] = []
    layers: dict[int, tuple[int, int]] = {}
    for kind in kinds:
        same_window = [layer for layer, window in enumerate(windows) if window == kind]
        for index, layer in enumerate(same_window):
            layers[layer] = (index % num_caches, len(group_windows) + index // num_caches)
        group_windows += [kind] * -(-len(same_window) // num_caches)
    return LayerGroups(tuple(group_windows), num_caches, tuple(layers[i] for i in range(len(windows))))
