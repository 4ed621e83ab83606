"""The words of a text, and which of them are never trained on."""

import re
from collections.abc import Iterable

from rrfp_jax.data.parts import is_held_out


def words_of(text: bytes, min_letters: int, max_letters: int) -> list[str]:
    """The different words of so many ASCII letters, sorted; capitals count, and digits and underscores end a word."""
    pattern = rb"(?<![A-Za-z])[A-Za-z]{%d,%d}(?![A-Za-z])" % (min_letters, max_letters)
    return sorted({word.decode("ascii") for word in re.findall(pattern, text)})


def divided(words: Iterable[str], fraction: float) -> tuple[list[str], list[str]]:
    """(words to train on, words held out)."""
    parts: tuple[list[str], list[str]] = ([], [])
    for word in words:
        parts[is_held_out(word, fraction)].append(word)
    return parts
