"""Image files: their size without decoding them, and their pixels as patches.

Only plain raster formats are opened, and nothing is decoded that is larger than a limit.
"""

import errno
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from rrfp_jax.data.samples import Grid

Image.MAX_IMAGE_PIXELS = None
"""Pillow's own limit is off, because at first it only warns, and data threads cannot each switch a warning off for
themselves; the limit here is our own."""
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N", "I")
"""Modes of grey with values up to 65535."""
_ORIENTATION = 0x0112
_ON_ITS_SIDE = (5, 6, 7, 8)
"""Values of a photograph's orientation that swap width and height."""


def size_of_image(path: Path, max_pixels: int) -> tuple[int, int]:
    """(width, height) as the image is to be seen, from the head of the file.

    Raises ValueError, in words that follow the name of the file, where it cannot be opened or is too large.
    """
    with _opened(path, max_pixels, "cannot be opened as an image") as image:
        width, height = image.size
        if _is_photograph(image) and image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE:
            width, height = height, width
    return width, height


def _is_photograph(image: Image.Image) -> bool:
    """Whether a camera may have noted which side is up; of other formats that would mean to decode them."""
    return image.format in {"JPEG", "MPO"}


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits in 8; ``convert`` would make white of all but the darkest."""
    if image.mode not in _SIXTEEN_BITS:
        return image
    return Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 0xFFFF) // 257).astype(np.uint8))


@contextmanager
def _opened(path: Path, max_pixels: int, failure: str) -> Iterator[Image.Image]:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would block
            raise OSError(errno.EINVAL, "it is no file")
        with Image.open(path, formats=_FORMATS) as image:
            if image.mode == "F" or (image.mode == "I" and image.format not in {"PNG", "PPM"}):
                raise ValueError(f"pixels of 32 bits, mode {image.mode}, whose range is not known")
            if image.width * image.height > max_pixels:
                raise Image.DecompressionBombError(f"{image.width} x {image.height} pixels")
            yield image
    except Image.DecompressionBombError as error:
        raise ValueError(
            f"is larger than max_pixels, {max_pixels} ({error}): make it smaller, or raise the limit"
        ) from error
    except Exception as error:  # decoders raise whatever comes up in a broken file
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).split("\n")[0]
        raise ValueError(f"{failure} ({reason}): mend or remove it") from error


def fitting_grid(width: int, height: int, *, block: int, merge: int, max_patches: int) -> Grid:
    """The patches of an image whose sides are changed to multiples of ``block`` pixels, ``merge`` patches.

    At most ``max_patches``, the shape of the image being kept as far as that allows.
    """
    most = max_patches // merge**2
    down, across = max(1.0, height / block), max(1.0, width / block)
    rows, columns = round(down), round(across)
    if rows * columns > most:
        scale = math.sqrt(most / (down * across))
        rows = min(most, max(1, math.floor(down * scale)))
        columns = min(most // rows, max(1, math.floor(across * scale)))
        rows = min(most // columns, rows)
    return Grid(rows * merge, columns * merge)


def read_bytes(path: Path, grid: Grid, *, patch_size: int, channels: int, max_pixels: int) -> NDArray[np.uint8]:
    """The image in the size of ``grid``, ``[height, width, channels]`` from 0 to 255, grey or RGB.

    Raises ValueError, in words that follow the name of the file, where it cannot be decoded or is too large.
    """
    size = (grid.columns * patch_size, grid.rows * patch_size)
    with _opened(path, max_pixels, "cannot be decoded") as image:
        image.draft(None, size)  # a large JPEG is decoded at a fraction of its size
        resized = _colours(image, channels).resize(size, Image.Resampling.BICUBIC)
    return np.asarray(resized, np.uint8).reshape(size[1], size[0], channels)


def read_colours(path: Path, *, channels: int, max_pixels: int) -> Image.Image:
    """The image in its own size, upright, grey or RGB; raises ValueError likewise."""
    with _opened(path, max_pixels, "cannot be decoded") as image:
        return _colours(image, channels)


def _colours(image: Image.Image, channels: int) -> Image.Image:
    upright = ImageOps.exif_transpose(image) if _is_photograph(image) else _in_8_bits(image)
    return upright.convert("L" if channels == 1 else "RGB")
