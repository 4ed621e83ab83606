"""Images cut into patches, in the order in which an encoder with a merge reads them.

The patches of a ``merge x merge`` block are consecutive, row by row within the block, and so are the blocks within the
image; with a merge of 1 that is row by row. The values of a patch are in the order channel, row, column, as in the
kernel of a convolution ``[width, channels, patch, patch]`` with its last three axes in one.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.samples import Grid


def patches_of(pixels: NDArray[Any], patch: int, merge: int) -> NDArray[Any]:
    """Cut ``pixels`` ``[height, width, channels]`` into ``[patches, channels * patch**2]``.

    Height and width must be multiples of ``patch * merge``.
    """
    height, width, channels = pixels.shape
    blocks = pixels.reshape(
        height // (patch * merge), merge, patch, width // (patch * merge), merge, patch, channels
    ).transpose(0, 3, 1, 4, 6, 2, 5)
    return blocks.reshape(-1, channels * patch**2)


@lru_cache(maxsize=4096)
def places_of(grid: Grid, merge: int) -> NDArray[np.int32]:
    """Row and column of each patch in its image, ``[2, patches]``, in the order of ``patches_of``."""
    rows, columns = np.meshgrid(np.arange(grid.rows), np.arange(grid.columns), indexing="ij")
    pixels = np.stack([rows, columns], axis=-1).astype(np.int32)
    places = np.ascontiguousarray(patches_of(pixels, 1, merge).T)
    places.flags.writeable = False
    return places
