"""A picture of some words, and below each what a model reads in it.

All lengths are inches. The same words always give the same bytes, with one version of matplotlib.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rrfp_jax.commands.training.reading import ReadWord
from rrfp_jax.observe.figure_files import DPI
from rrfp_jax.observe.output_files import replacing
from rrfp_jax.observe.style import FAINT_INK, GRID, INK, PAPER

_FONT = "DejaVu Sans Mono"
"""Tells I, l and 1 apart."""
_WRONG = "#d55e00"
_COLUMNS = 6
_INCHES_PER_PIXEL = 1 / 40
_GAP, _CAPTION, _TITLE = 0.16, 0.34, 0.42


def draw_reading(words: Sequence[ReadWord], path: str | os.PathLike[str], *, title: str) -> None:
    """Draw the words in rows of six, to a ``.png`` file: the picture, what is read in it, and where that is wrong the
    word that it shows.

    Raises ValueError, before anything is written, for another suffix and where there are no words.
    """
    if Path(path).suffix.lower() != ".png":
        raise ValueError(f"a picture cannot be written to {os.fspath(path)!r}: let the name end in .png")
    if not words:
        raise ValueError("there is no word to draw: give at least one")
    settings = {key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")}
    with matplotlib.rc_context({**settings, "font.family": _FONT}):
        figure = figure_of(words, title)
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=DPI, metadata={"Software": None})


def figure_of(words: Sequence[ReadWord], title: str) -> Figure:
    """The laid out figure, not yet written."""
    tallest, widest = (max(word.picture.shape[axis] for word in words) * _INCHES_PER_PIXEL for axis in (0, 1))
    across, down = max(widest, 1.2) + _GAP, tallest + _CAPTION + _GAP
    num_rows = -(-len(words) // _COLUMNS)
    width, height = _COLUMNS * across + _GAP, _TITLE + num_rows * down + _GAP
    figure = Figure(figsize=(width, height), facecolor=PAPER)
    FigureCanvasAgg(figure)
    figure.text(_GAP / width, 1 - _TITLE / 2 / height, title, color=INK, fontsize=10, fontweight="bold", va="center")
    for number, word in enumerate(words):
        row, column = divmod(number, _COLUMNS)
        own_height, own_width = (size * _INCHES_PER_PIXEL for size in word.picture.shape)
        left, top = _GAP + column * across, height - _TITLE - row * down
        axes = figure.add_axes((left / width, (top - own_height) / height, own_width / width, own_height / height))
        axes.imshow(word.picture, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(color=GRID, linewidth=0.8)
        _caption(figure, word, left / width, (top - tallest - 0.05) / height, (top - tallest - 0.2) / height)
    return figure


def _caption(figure: Figure, word: ReadWord, left: float, first: float, second: float) -> None:
    is_right = word.read == word.written
    read = "".join(letter if letter.isprintable() else "\ufffd" for letter in word.read) or "(nothing)"
    figure.text(left, first, read, color=INK if is_right else _WRONG, fontsize=10, va="top", parse_math=False)
    if not is_right:
        figure.text(left, second, f"not: {word.written}", color=FAINT_INK, fontsize=7, va="top", parse_math=False)
