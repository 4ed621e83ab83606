"""Figures as files: one look whatever the user's settings are, the same bytes for the same figure, widths of text."""

import os
from bisect import bisect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from rrfp_jax.observe.output_files import replacing

FONT = "DejaVu Sans"
"""The font of all pictures. It comes with matplotlib, so they look the same on every machine."""
DPI = 160
_FORMATS: Mapping[str, dict[str, Any]] = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}
"""Metadata by format. Entries that change from run to run are left out."""


@contextmanager
def plain_look() -> Iterator[None]:
    """Within the block figures look the same on every machine."""
    defaults = {key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")}
    with matplotlib.rc_context({**defaults, "font.family": FONT, "hatch.linewidth": 0.6, "svg.hashsalt": "rrfp"}):
        yield


def check_format(path: str | os.PathLike[str]) -> None:
    """Raises ValueError unless the name has the suffix of a picture."""
    if Path(path).suffix.lower() not in _FORMATS:
        raise ValueError(f"a picture cannot be written to {os.fspath(path)!r}: let the name end in .png or .svg")


def write_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes a figure, within :func:`plain_look`. Raises ValueError as :func:`check_format`."""
    check_format(path)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=DPI, metadata=_FORMATS[Path(path).suffix.lower()])


@lru_cache(maxsize=4096)
def text_width(text: str, points: float, *, bold: bool = False) -> float:
    """Returns the width in inches of one line of ``text`` at a font size in points, without drawing it."""
    font = FontProperties(family=FONT, size=points, weight="bold" if bold else "normal")
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width) / 72


def shortened(text: str, points: float, most: float, *, bold: bool = False) -> str:
    """Returns ``text``, cut and ended with an ellipsis if it is wider than ``most`` inches."""
    if text_width(text, points, bold=bold) <= most:
        return text
    lengths = range(1, len(text) + 1)
    fitting = bisect(lengths, most, key=lambda length: text_width(text[:length] + "…", points, bold=bold))
    return text[:fitting].rstrip() + "…"
