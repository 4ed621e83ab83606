"""Images cut into patches and put together again."""

import numpy as np
import pytest

from rrfp_jax.data.images import processor_grid
from rrfp_jax.data.packing import Grid, Text, make_sample, patches_of, places_of


def pixels_of(patches, grid, patch, merge):
    """Puts patches together to the image ``[height, width, channels]`` again."""
    blocks = patches.reshape(grid.rows // merge, grid.columns // merge, merge, merge, -1, patch, patch)
    return blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(grid.rows * patch, grid.columns * patch, -1)


@pytest.mark.parametrize(("patch", "merge", "channels"), [(8, 2, 1), (4, 1, 3), (2, 3, 3), (1, 2, 1)])
def test_patches_hold_the_pixels_of_their_places(patch, merge, channels):
    grid = Grid(2 * merge, 3 * merge)
    pixels = np.random.default_rng(0).random((grid.rows * patch, grid.columns * patch, channels))
    patches = patches_of(pixels, patch, merge)
    assert patches.shape == (grid.num_patches, channels * patch**2)
    for values, row, column in zip(patches, *places_of(grid, merge), strict=True):
        of_place = pixels[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
        assert np.array_equal(values.reshape(channels, patch, patch), of_place.transpose(2, 0, 1))
    assert np.array_equal(pixels_of(patches, grid, patch, merge), pixels)


def test_the_patches_of_a_block_are_consecutive():
    rows, columns = places_of(Grid(4, 4), 2)
    assert rows.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
    assert columns.tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 0, 1, 0, 1, 2, 3, 2, 3]
    assert places_of(Grid(2, 2), 1).tolist() == [[0, 0, 1, 1], [0, 1, 0, 1]]


def test_features_have_a_row_and_a_column_and_text_goes_on_behind_them():
    parts = [Text(b"ab", 1), Grid(4, 6), Text(b"c", 1), Grid(2, 2), Grid(6, 2), Text(b"de", 1)]
    sample = make_sample(parts, merge=2)
    expected = [[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]]
    expected += [[5, 5, 5], [6, 6, 6], [7, 7, 7], [7, 8, 7], [7, 9, 7], [10, 10, 10]]  # the last token is a target
    assert sample.grid_positions(2).tolist() == expected


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((9, 5), (4, 6)),
        ((60, 21), (6, 16)),
        ((300, 4), (2, 36)),
        ((8, 8), (4, 4)),
        ((41, 39), (10, 10)),
        ((12, 20), (4, 4)),
    ],
)
def test_sizes_are_those_of_qwens_processor(size, grid):
    """Expected are those of ``smart_resize``; a half is rounded to the even number."""
    assert processor_grid(*size, patch=4, merge=2, min_patches=16, max_patches=120) == grid
    with pytest.raises(ValueError, match=r"is 402 x 2 pixels, more than 200 times as long as wide"):
        processor_grid(402, 2, patch=4, merge=2, min_patches=16, max_patches=120)
