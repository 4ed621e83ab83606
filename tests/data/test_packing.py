"""Images cut into patches and put together again."""

import numpy as np
import pytest

from rrfp_jax.data.packing import Grid, patches_of, places_of


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
