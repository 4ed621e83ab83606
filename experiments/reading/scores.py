"""The words that a trained model reads in held-out pictures, how many of them are right, and a picture of some.

Words are read as ``rrfp sample`` reads a prompt: greedily, one byte after the other, on one device.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from rrfp_jax.commands.sampling.generating import Drawing, Generator
from rrfp_jax.commands.sampling.prompts import prompt_with_images
from rrfp_jax.data.config import ImageTextConfig
from rrfp_jax.models.vision_config import VisionLanguageConfig
from rrfp_jax.observe.output_files import DPI, replacing
from rrfp_jax.observe.style import FAINT_INK, GRID, INK, PAPER

_LONGEST_WORD = 16
"""Number of bytes after which a model that does not end its word is stopped."""


class ReadWord(NamedTuple):
    """A picture, and the word that a model reads in it."""

    picture: NDArray[np.uint8]
    """Grey, 0 to 255, ``[height, width]``."""
    written: str
    """The word that the picture shows."""
    read: str
    """The word that the model wrote."""


class Scores(NamedTuple):
    """How well words were read."""

    num_words: int
    exact_match: float
    """The fraction of words without a fault."""
    character_error_rate: float
    """Edits per character that was drawn, over all words together; above 1 if much more is read than was drawn."""


def read_words(
    model: VisionLanguageConfig, params: Mapping[str, Any], data: ImageTextConfig, held_out: Path, num_words: int
) -> list[ReadWord]:
    """Has a model read the pictures of a data set of held-out words.

    Args:
        model: the shape of the model.
        params: all parameters of the model by layer name.
        data: the section of the data that the model was trained on; it says how pictures become patches.
        held_out: the file ``held_out.jsonl`` of ``experiments.reading.draw``.
        num_words: number of words to read, from the first on; fewer if the file has fewer.

    Raises ValueError if the file cannot be read or has no words.
    """
    try:
        lines = [json.loads(line) for line in held_out.read_text().splitlines()[:num_words]]
    except OSError as error:
        raise ValueError(
            f"cannot read {held_out} ({error.strerror}): give a run that was trained on samples of "
            "experiments.reading.draw"
        ) from None
    generator, drawing, words = Generator(model, params), Drawing(max_tokens=_LONGEST_WORD), []
    for line in lines:
        [file] = [held_out.parent / name for name in line["images"]]
        prompt = prompt_with_images(line["prompt"], [file], data, model)
        read = generator.tokens(prompt, drawing, stops=[ord("\n")]).astype(np.uint8).tobytes().decode("latin-1")
        with Image.open(file) as picture:
            words.append(ReadWord(np.asarray(picture), line["target"].rstrip("\n"), read))
    return words


def scores_of(words: Sequence[ReadWord]) -> Scores:
    """Returns the scores of some words; raises ValueError if there are none."""
    if not words:
        raise ValueError("there is nothing to score: give at least one word")
    num_right = sum(word.read == word.written for word in words)
    num_edits = sum(edit_distance(word.read, word.written) for word in words)
    return Scores(len(words), num_right / len(words), num_edits / sum(len(word.written) for word in words))


def edit_distance(read: str, written: str) -> int:
    """Returns the least number of characters to insert, delete or replace to make one of the other.

    Source: Levenshtein, 1965.
    """
    distances = list(range(len(written) + 1))
    for row, one in enumerate(read, start=1):
        diagonal, distances[0] = distances[0], row
        for column, other in enumerate(written, start=1):
            best = min(diagonal + (one != other), distances[column] + 1, distances[column - 1] + 1)
            diagonal, distances[column] = distances[column], best
    return distances[-1]


_FONT = "DejaVu Sans Mono"
"""A face in which I, l and 1 differ."""
_WRONG = "#d55e00"
_COLUMNS = 6
_INCHES_PER_PIXEL = 1 / 40
_GAP, _CAPTION, _TITLE = 0.16, 0.34, 0.42
"""Heights and distances in inches."""


def draw_reading(words: Sequence[ReadWord], path: str | os.PathLike[str], *, title: str) -> None:
    """Draws words in rows of six to a ``.png`` file: the picture, and below it the word that the model reads.

    A word that is read wrongly is followed by the word that the picture shows. The same words always give the same
    bytes with one version of matplotlib. Raises ValueError, before anything is written, for a name with another suffix,
    and if there are no words.
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
    """Returns the figure that :func:`draw_reading` writes."""
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
        axes.imshow(word.picture, cmap="gray", vmin=0, vmax=255, interpolation="nearest", aspect="auto")
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(color=GRID, linewidth=0.8)
        _caption(figure, word, left / width, (top - tallest - 0.05) / height, (top - tallest - 0.2) / height)
    return figure


def _caption(figure: Figure, word: ReadWord, left: float, first: float, second: float) -> None:
    """Writes the word that is read, and below it, if that is wrong, the word that the picture shows."""
    is_right = word.read == word.written
    read = "".join(letter if letter.isprintable() else "\ufffd" for letter in word.read) or "(nothing)"
    figure.text(left, first, read, color=INK if is_right else _WRONG, fontsize=10, va="top", parse_math=False)
    if not is_right:
        figure.text(left, second, f"not: {word.written}", color=FAINT_INK, fontsize=7, va="top", parse_math=False)
