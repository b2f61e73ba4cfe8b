"""Which layers share a block table, and which share a cache."""

import pytest

from jaxpaged import layer_groups


def test_layers_with_equal_windows_form_a_group():
    assert layer_groups([None] * 3).layers == ((0, 0), (1, 0), (2, 0))
    assert layer_groups([7, 7]).windows == (7,)


@pytest.mark.parametrize(
    ("windows", "num_caches", "of_groups"),
    [
        (([1024] * 5 + [None]) * 10 + [1024] * 2, 10, (None, *[1024] * 6)),  # Gemma 3 27B
        (([1024] * 5 + [None]) * 5 + [1024] * 4, 5, (None, *[1024] * 6)),  # Gemma 3 4B
        ([128, None] * 12, 12, (None, 128)),  # gpt-oss-20b
        ([4096, None, 8, None, 8], 1, (None, None, 8, 8, 4096)),
    ],
)
def test_each_layer_has_its_own_cache_within_its_group(windows, num_caches, of_groups):
    groups = layer_groups(windows)
    assert (groups.num_caches, groups.windows) == (num_caches, of_groups)
    assert len(set(groups.layers)) == len(windows)
    for window, (cache, group) in zip(windows, groups.layers, strict=True):
        assert 0 <= cache < num_caches
        assert groups.windows[group] == window


def test_a_sequence_holds_blocks_for_its_window_and_chunk():
    groups = layer_groups([None, 9, 9])
    assert groups.num_blocks(40, block_size=4) == 10 + 2 * 3
    assert groups.num_blocks(7, block_size=4) == 3 * 2
    assert groups.num_blocks(40, block_size=4, chunk_tokens=9) == 10 + 2 * 5


@pytest.mark.parametrize("windows", [[], [0], [None, 1.5], 8])
def test_invalid_windows_are_refused(windows):
    with pytest.raises(ValueError, match="window"):
        layer_groups(windows)
