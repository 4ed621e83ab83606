"""A cut as one line of text, in the manner of Megatron's pipeline layouts: ``Et*6|t*6|t*5L``.

A letter stands for a layer, ``*N`` repeats it, and ``|`` stands between two chunks: E is the embedding, t a decoder's
layer, L the head with the loss; of an encoder, P makes vectors of patches, v is a layer, p the projector. Other types
get letters of their own (:func:`letters_of`). With ``short``, ``(t*6|)*5`` stands for so many equal chunks, each with
the bar behind it.
"""

import string
from collections.abc import Collection, Sequence
from itertools import groupby

from rrfp_jax.planning.costs import CutModel

_KNOWN = {"embed": "E", "head": "L", "loss": "L", "patch": "P", "project": "p", "encod": "v", "vision": "v"}
"""Parts of a type's name, and its letter."""
_MAIN = "t"
_WORTH_IT = 3
"""From so many equal chunks on they are written once."""


def letters_of(layers: Sequence[str]) -> dict[str, str]:
    """A letter for each type of layer, in the order in which the types occur; the most common other one is t."""
    letters = {name: letter for name in dict.fromkeys(layers) if (letter := _known(name))}
    others = [name for name in dict.fromkeys(layers) if name not in letters]
    for name in sorted(others, key=lambda name: ("decod" not in name.lower(), -layers.count(name))):
        letters[name] = _free_letter(name, set(letters.values()))
    return {name: letters[name] for name in dict.fromkeys(layers)}


def cut_in_words(cut: CutModel, *, short: bool = False) -> str:
    """The line of a cut."""
    layers, letters = cut.costs.layers, letters_of(cut.costs.layers)
    chunks = [_chunk([letters[name] for name in layers[start:stop]]) for start, stop in cut.bounds]
    return _shortened(chunks) if short else "|".join(chunks)


def legend(cut: CutModel) -> str:
    """What the letters stand for."""
    return ", ".join(f"{letter}: {name}" for name, letter in letters_of(cut.costs.layers).items())


def _known(name: str) -> str | None:
    return next((letter for part, letter in _KNOWN.items() if part in name.lower()), None)


def _free_letter(name: str, taken: Collection[str]) -> str:
    wanted = [_MAIN, *(letter for letter in name.lower() if letter in string.ascii_lowercase), *string.ascii_letters]
    return next((letter for letter in wanted if letter not in taken), "?")


def _chunk(letters: Sequence[str]) -> str:
    runs = [(letter, len(list(run))) for letter, run in groupby(letters)]
    return "".join(letter if count == 1 else f"{letter}*{count}" for letter, count in runs)


def _shortened(chunks: Sequence[str]) -> str:
    """Equal chunks one after the other, but for the last chunk, which has no bar behind it."""
    parts = []
    for chunk, run in groupby(chunks[:-1]):
        count = len(list(run))
        parts.append(f"({chunk}|)*{count}" if count >= _WORTH_IT else f"{chunk}|" * count)
    return "".join([*parts, chunks[-1]])
