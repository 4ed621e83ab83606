"""Text for people: numbers of bytes as they write them, and text from outside made safe to show.

Such text is bounded in its length, and characters that a terminal would obey are escaped.
"""

import re
import reprlib
from typing import Any

_MOST_QUOTED = 200
_MOST_WORD, _MOST_SENTENCE = 1_000, 4_000
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line break, marks that turn the direction of text, and lone surrogates, which
cannot be sent to a terminal."""
_LONG = re.compile(rf"\S{{{_MOST_WORD + 1},}}")

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxdict, _repr.maxlist, _repr.maxtuple = 4, 8, 8, 8
_repr.maxstring = _repr.maxother = _repr.maxlong = _MOST_QUOTED


def shown(value: Any) -> str:
    """Returns the ``repr`` of a value from a file, shortened if it is long or deeply nested."""
    try:
        text = _repr.repr(value)
    except ValueError:  # an integer of more digits than Python writes out
        text = "a number of thousands of digits"
    return text if len(text) <= _MOST_QUOTED else f"{text[: _MOST_QUOTED - 3]}..."


def printable(text: str) -> str:
    """Returns the text with characters that a terminal would obey, or cannot show, written as ``\\x1b``."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def sentence(text: str) -> str:
    """Returns a text on one line, printable, and shortened if it, or a word of it, is long."""
    words = _LONG.sub(_cut, " ".join(text.split()))
    return printable(words if len(words) <= _MOST_SENTENCE else _middle_out(words, _MOST_SENTENCE))


def _cut(found: re.Match[str]) -> str:
    return _middle_out(found[0], _MOST_WORD // 4)


def _middle_out(text: str, length: int) -> str:
    """Returns a text without its middle: the beginning names the place, and the end has the remedy."""
    return f"{text[: length * 2 // 3]}...{text[-(length // 3) :]}"


def parse_bytes(text: str, what: str) -> int:
    """Returns the bytes of a text such as ``512MiB``; raises ValueError, which names ``what``, on anything else."""
    for unit, factor in reversed((_UNITS | _DECIMAL).items()):
        number = text.strip().removesuffix(unit)
        if number != text.strip():
            try:
                num_bytes = float(number) * factor
                if 1 <= num_bytes < float("inf"):
                    return int(num_bytes)
            except ValueError:
                break
    raise ValueError(f"{what} is {text!r}, which is no size: write a number and a unit, for example 512MiB or 2GiB")


def format_bytes(num_bytes: int) -> str:
    """Returns a number of bytes in words, ``1536`` as ``1.5 KiB``."""
    for unit, factor in reversed(_UNITS.items()):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.4g} {unit}"
    return "0 B"
