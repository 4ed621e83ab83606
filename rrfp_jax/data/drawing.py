"""Words drawn by Pillow with the DejaVu faces that matplotlib ships.

The width of a picture is known without drawing it: the advances of its letters, and a margin on each side for slanted
ones. Letters are placed one after another without kerning's help, so what is drawn is never wider.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import ImageFont

MARGIN = 1
"""Pixels that stay free on both sides of a word."""
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@lru_cache(maxsize=64)
def _font(face: str, size: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    try:
        # The basic layout is the same with every build of Pillow.
        return ImageFont.truetype(folder / f"{face}.ttf", size, layout_engine=ImageFont.Layout.BASIC)
    except OSError:
        known = sorted(path.stem for path in folder.glob("DejaVu*.ttf"))
        raise ValueError(f"there is no face {face!r} beside matplotlib: give some of {', '.join(known)}") from None


@lru_cache(maxsize=64)
def rows_of_ink(face: str, size: int) -> tuple[int, int]:
    """Where the highest letter begins and the lowest ends, in pixels from the top of the line."""
    _, top, _, bottom = _font(face, size).getbbox(_LETTERS)
    return int(top), int(bottom)


def widths(words: Sequence[str], face: str, size: int) -> NDArray[np.int64]:
    """The pixels that each word takes across, margins included."""
    advances = np.zeros(128)
    font = _font(face, size)
    for letter in _LETTERS:
        advances[ord(letter)] = font.getlength(letter)
    longest = max(map(len, words))
    letters = np.array([word.ljust(longest, "\0").encode("ascii") for word in words], dtype=f"S{longest}")
    codes = letters.view(np.uint8).reshape(len(words), longest)
    return np.ceil(advances[codes].sum(axis=1)).astype(np.int64) + 2 * MARGIN


@lru_cache(maxsize=1 << 16)
def ink(word: str, face: str, size: int) -> tuple[NDArray[np.uint8], int]:
    """How much each pixel is covered, uint8 ``[height, width]``, and how far its top is below the highest letter's."""
    mask, (_, top) = _font(face, size).getmask2(word, mode="L")
    width, height = mask.size
    return np.frombuffer(bytes(mask), np.uint8).reshape(height, width), int(top) - rows_of_ink(face, size)[0]
