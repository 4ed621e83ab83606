"""How well words were read: exact match and character error rate."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def edit_distance(read: str, written: str) -> int:
    """The least number of characters to insert, delete or replace to make one of the other (Levenshtein 1965)."""
    distances = list(range(len(written) + 1))
    for row, one in enumerate(read, start=1):
        diagonal, distances[0] = distances[0], row
        for column, other in enumerate(written, start=1):
            best = min(diagonal + (one != other), distances[column] + 1, distances[column - 1] + 1)
            diagonal, distances[column] = distances[column], best
    return distances[-1]


def character_error_rate(read: Sequence[str], written: Sequence[str]) -> float:
    """Edits per character that was written, over all words together; above 1 where more was read than written."""
    num_edits = sum(edit_distance(*pair) for pair in zip(read, written, strict=True))
    return num_edits / _positive(sum(map(len, written)))


def exact_match(read: Sequence[str], written: Sequence[str]) -> float:
    """The fraction of words that were read without a fault."""
    return sum(one == other for one, other in zip(read, written, strict=True)) / _positive(len(written))


def lines_of(tokens: NDArray[Any], num_lines: int) -> list[str]:
    """The first lines of generated ``tokens`` ``[length]``, bytes, as text; empty ones where there are fewer."""
    text = np.asarray(tokens).astype(np.uint8).tobytes().decode("latin-1")
    lines = text.split("\n")[:num_lines]
    return lines + [""] * (num_lines - len(lines))


def _positive(number: int) -> int:
    if not number:
        raise ValueError("there is nothing to score: give at least one word")
    return number
