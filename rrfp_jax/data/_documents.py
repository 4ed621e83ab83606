"""Makes documents of the files, each in parts that can be tokenised apart.

A tokenizer takes memory for every token at once, and works on a text alone, so a text of gigabytes is cut into parts of
about a megabyte. The places depend on the text alone: at every full megabyte, behind the next line break between two
characters that are no white space. There the byte-level tokenizers in use (GPT-2's, Llama 3's, Qwen's) cut anyway, and
the tokens are those of the whole text. Where no such place is near, another line break, then a space, then the next
character is taken.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data._sources import (
    BLOCK_BYTES,
    LINES,
    LONGEST_DOCUMENT_BYTES,
    ROWS,
    TEXT,
    Source,
    bytes_of,
    has_lists,
    row_chats,
    row_texts,
)
from rrfp_jax.data.dataset import BrokenData
from rrfp_jax.readable import shown
from rrfp_jax.record_files import parse_json

SEGMENT_BYTES = 1 << 20
_NEAR_BYTES = 1 << 16
_PLACES = (re.compile(rb"(?<=\S)\n(?=\S)"), re.compile(rb"\n(?=\S)"), re.compile(rb"(?<=\S)(?=\s)"))
_CHARACTER = re.compile(rb"[^\x80-\xbf]")  # the first byte of a character in UTF-8
_BYTE_ORDER = "\ufeff"  # some programs put it at the head of a file; it is no text
_ONE_PER_LINE = "a line holds one object, so write those of a list, or of several lines, on a line each"
_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
_ReadBytes = Callable[[int, int], bytes]
"""Returns bytes of a text, given an offset and a number of bytes."""


class TextSpan(NamedTuple):
    """A stretch of a source that is ``length`` long in all.

    A span counts in bytes of text, decompressed, or in rows. Every document belongs to the span in which it begins, but
    a file of plain text is one document that may go on over several spans.
    """

    source: Source
    start: int
    stop: int
    length: int


class TextPart(NamedTuple):
    """A stretch of a document's text; ``is_last`` closes the document."""

    text: str
    is_last: bool
    place: int = 0
    """The place in its source where the document begins: a number of bytes for lines, or the number of a row."""
    turns: tuple[tuple[int, int], ...] | None = None
    """The assistant's turns in a chat, in characters. None: the document is no chat, and all of it counts."""


def parts_in(span: TextSpan, column: str) -> Iterator[TextPart]:
    """Yields the parts of a span's documents in order; raises BrokenData, with file and row, if there is no text."""
    source, start, stop, length = span
    if source.kind != TEXT:
        lines = ((place, _text_of_line(line, column, source, place)) for place, line in _lines(span))
        texts = lines if source.kind == LINES else row_texts(source.path, column, start, stop)
        for place, text in texts:
            *parts, last = cut_text(text)
            yield from (TextPart(part, False, place) for part in parts)
            yield TextPart(last, True, place)
        return
    if length == 0:
        yield TextPart("", True)
    for begin, data in segments(bytes_of(source.path, source.compression).read, start, stop, length):
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise BrokenData(
                f"{source.path} is no text in UTF-8 (byte 0x{data[error.start]:02x} at {begin + error.start}): convert "
                "it, or leave it out"
            ) from None
        yield TextPart(text if begin else text.removeprefix(_BYTE_ORDER), begin + len(data) == length)


def rows_in(span: TextSpan, column: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the places and rows of a span of lines or Parquet, with what each has in ``column`` and as tools.

    Raises BrokenData, with file and row, for a line that is no object or has no such column.
    """
    source, start, stop, _ = span
    if source.kind == ROWS:
        yield from row_chats(source.path, column, start, stop)
        return
    for place, line in _lines(span):
        row = _row_of_line(line, source, place)
        _check_column(row, column, source, place)
        yield place, row


def holds_chats(source: Source, column: str) -> bool | None:
    """Returns whether the first row of a source has a list of objects in the column; None if there is no row."""
    if source.kind != LINES:
        return source.kind == ROWS and has_lists(source.path, column)
    place, line = next(_lines(TextSpan(source, 0, SEGMENT_BYTES, SEGMENT_BYTES)), (0, None))
    if line is None:
        return None
    value = _row_of_line(line, source, place).get(column)
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def document_name(source: Source, place: int) -> str:
    """Returns the name of a document for messages, by the place where it begins.

    The number of a line is looked up only here, since counting lines takes time.
    """
    if source.kind == TEXT:
        return source.path
    if source.kind == ROWS:
        return f"{source.path}, row {place} (from 0)"
    read, number, offset = bytes_of(source.path, source.compression).read, 1, 0
    while offset < place:
        block = read(offset, min(BLOCK_BYTES, place - offset))
        number, offset = number + block.count(b"\n"), offset + len(block)
    return f"{source.path}, line {number}"


# ------------------------------------------------------------------------------------------------------------- cutting


def cut_near(read: _ReadBytes, position: int, length: int) -> int:
    """Returns the place to cut at or behind ``position`` in a text of ``length`` bytes."""
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


def segments(read: _ReadBytes, start: int, stop: int, length: int) -> Iterator[tuple[int, bytes]]:
    """Yields the parts of a text of ``length`` bytes that belong to ``start`` to ``stop``, each with its beginning.

    ``start`` is a multiple of ``SEGMENT_BYTES``; so is ``stop``, or it is ``length``.
    """
    begin = cut_near(read, start, length)
    for position in range(start + SEGMENT_BYTES, stop + SEGMENT_BYTES, SEGMENT_BYTES):
        end = cut_near(read, min(position, stop), length)
        if end > begin:
            yield begin, read(begin, end - begin)
        begin = end


def cut_text(text: str) -> list[str]:
    """Returns a text in memory as the parts in which it is tokenised."""
    if len(text) <= SEGMENT_BYTES // 4:  # no character takes more than four bytes
        return [text]
    data = text.encode()
    parts = segments(lambda start, size: data[start : start + size], 0, len(data), len(data))
    return [part.decode() for _, part in parts]


# ---------------------------------------------------------------------------------------------------------- JSON lines


def _lines(span: TextSpan) -> Iterator[tuple[int, bytes]]:
    """Yields the place and the bytes of each line that begins in the span and is not blank."""
    source, start, stop, _ = span
    read = bytes_of(source.path, source.compression).read
    # The byte before the span tells whether a line begins with the span.
    begin = max(start - 1, 0)
    data = read(begin, stop - begin)
    if start:
        first = data.find(b"\n", 0, stop - begin - 1) + 1
        if not first:  # one line covers the whole span, and belongs to a span before
            return
        data, begin = data[first:], begin + first
    last = begin + data.rfind(b"\n") + 1
    # The last line may go on behind the span.
    while not data.endswith(b"\n") and (block := read(begin + len(data), BLOCK_BYTES)):
        if begin + len(data) - last > LONGEST_DOCUMENT_BYTES:  # no more of it is read
            raise _too_long(source, last)
        data += block[: block.find(b"\n") + 1] or block
    for line in data.split(b"\n"):
        if len(line) > LONGEST_DOCUMENT_BYTES:
            raise _too_long(source, begin)
        if line and not line.isspace():
            yield begin, line
        begin += len(line) + 1


def _too_long(source: Source, position: int) -> BrokenData:
    most = f"more than {LONGEST_DOCUMENT_BYTES:,} bytes"
    return _refusal(source, position, f"has {most}: split it, or write its text into a file of plain text")


def _row_of_line(line: bytes, source: Source, position: int) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        reason = "its bytes are not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        remedy = _ONE_PER_LINE if line.strip() in (b"[", b"{") else "mend or remove it"
        raise _refusal(source, position, f"is no JSON ({reason}): {remedy}") from None
    if not isinstance(row, dict):
        kind, remedy = _KINDS.get(type(row), "null"), _ONE_PER_LINE if isinstance(row, list) else "mend or remove it"
        raise _refusal(source, position, f"is {kind} where an object is expected: {remedy}")
    return row


def _check_column(row: dict[str, Any], column: str, source: Source, position: int) -> None:
    if column not in row:
        listed = ", ".join(name if len(name) < 50 else shown(name) for name in list(row)[:8]) or "none"
        raise _refusal(source, position, f"has no column {column!r} (it has {listed}): name one with --column")


def _text_of_line(line: bytes, column: str, source: Source, position: int) -> str:
    row = _row_of_line(line, source, position)
    _check_column(row, column, source, position)
    text = row[column]
    if not isinstance(text, str):
        kind = _KINDS.get(type(text), "null")
        words = f"has {kind} in column {column!r} where text is expected: mend or remove it, or name another"
        raise _refusal(source, position, words)
    # JSON can name half a character, which no tokenizer can take; only an escape can, so most lines are not encoded.
    if b"\\u" in line or not line.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            words = f"has half a character in column {column!r} (a lone surrogate): mend or remove it"
            raise _refusal(source, position, words) from None
    return text


def _refusal(source: Source, position: int, words: str) -> BrokenData:
    return BrokenData(f"{document_name(source, position)} {words}")


def counted_tokens(offsets: Sequence[tuple[int, int]], turns: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Returns whether each token, by its place in the text, has a part in a turn of the assistant."""
    if not turns or not offsets:
        return np.zeros(len(offsets), bool)
    starts, ends = np.array(offsets).T
    first, last = np.array(turns).T
    turn = np.searchsorted(last, starts, side="right")  # the first turn that ends behind the token's beginning
    return (turn < len(turns)) & (ends > first[np.minimum(turn, len(turns) - 1)])
