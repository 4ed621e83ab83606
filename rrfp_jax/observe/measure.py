"""How wide text is on paper, without drawing it."""

from bisect import bisect
from functools import lru_cache

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

FONT = "DejaVu Sans"
"""Comes with matplotlib, so pictures look the same on every machine."""


@lru_cache(maxsize=4096)
def text_width(text: str, points: float, *, bold: bool = False) -> float:
    """Width in inches of one line of ``text`` at a font size in points."""
    font = FontProperties(family=FONT, size=points, weight="bold" if bold else "normal")
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width) / 72


def shortened(text: str, points: float, room: float, *, bold: bool = False) -> str:
    """``text``, cut and ended with an ellipsis where it is wider than ``room`` inches."""
    if text_width(text, points, bold=bold) <= room:
        return text
    lengths = range(1, len(text) + 1)
    fitting = bisect(lengths, room, key=lambda length: text_width(text[:length] + "…", points, bold=bold))
    return text[:fitting].rstrip() + "…"
