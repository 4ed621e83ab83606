"""Where a long text may be cut so that its parts can be tokenised apart.

A tokenizer takes memory for every token at once, and works on a text alone, so a text of gigabytes is cut into parts of
about a megabyte. The places depend on the text alone: at every full megabyte, behind the next line break between two
characters that are no white space. There the byte-level tokenizers in use (GPT-2's, Llama 3's, Qwen's) cut anyway, and
the tokens are those of the whole text. Where no such place is near, another line break, then a space, then the next
character is taken.
"""

import re
from collections.abc import Callable, Iterator

SEGMENT_BYTES = 1 << 20
LONGEST_DOCUMENT_BYTES = 1 << 25
"""Largest size of a document that is one line or one row of a file, which is held as a whole; plain text has no such
bound."""
_NEAR_BYTES = 1 << 16
_PLACES = (re.compile(rb"(?<=\S)\n(?=\S)"), re.compile(rb"\n(?=\S)"), re.compile(rb"(?<=\S)(?=\s)"))
_CHARACTER = re.compile(rb"[^\x80-\xbf]")
"""The first byte of a character in UTF-8."""

Read = Callable[[int, int], bytes]
"""So many bytes of the text from an offset."""


def cut_near(read: Read, position: int, length: int) -> int:
    """The place to cut at or behind ``position`` in a text of ``length`` bytes."""
    if position <= 0 or position >= length:
        return min(max(position, 0), length)
    before = min(position, 2)
    near = read(position - before, before + _NEAR_BYTES)
    for pattern in _PLACES:
        for place in pattern.finditer(near):
            if before <= place.end() < len(near):
                return position - before + place.end()
    character = _CHARACTER.search(near, before)
    return position - before + character.start() if character else length


def segments(read: Read, start: int, stop: int, length: int) -> Iterator[tuple[int, bytes]]:
    """The parts of a text of ``length`` bytes that belong to ``start`` to ``stop``, with where each begins.

    ``start`` is a multiple of ``SEGMENT_BYTES``; so is ``stop``, or it is ``length``.
    """
    begin = cut_near(read, start, length)
    for position in range(start + SEGMENT_BYTES, stop + SEGMENT_BYTES, SEGMENT_BYTES):
        end = cut_near(read, min(position, stop), length)
        if end > begin:
            yield begin, read(begin, end - begin)
        begin = end


def parts_of(text: str) -> list[str]:
    """A text in memory, in the parts in which it is tokenised."""
    if len(text) <= SEGMENT_BYTES // 4:  # no character takes more than four bytes
        return [text]
    data = text.encode()
    parts = segments(lambda start, size: data[start : start + size], 0, len(data), len(data))
    return [part.decode() for _, part in parts]
