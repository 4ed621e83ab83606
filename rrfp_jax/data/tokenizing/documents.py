"""The documents of a span of one source, as text.

A span counts in bytes of text, decompressed, or in rows; every document belongs to the span in which it begins, but a
file of plain text is one document that may go on over several.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from rrfp_jax.bounded_text import shown
from rrfp_jax.data.dataset import BrokenData
from rrfp_jax.data.tokenizing.cutting import LONGEST_DOCUMENT_BYTES, parts_of, segments
from rrfp_jax.data.tokenizing.rows import rows_of, texts_of_rows
from rrfp_jax.data.tokenizing.sources import LINES, ROWS, TEXT, Source
from rrfp_jax.data.tokenizing.streams import BLOCK_BYTES, bytes_of
from rrfp_jax.record_files import parse_json

_BYTE_ORDER = "\ufeff"
"""What some programs put at the head of a file; it is no text."""


class Span(NamedTuple):
    """A stretch of a source that is ``length`` long in all."""

    source: Source
    start: int
    stop: int
    length: int


class Part(NamedTuple):
    """A stretch of a document's text; ``is_last`` closes it."""

    text: str
    is_last: bool
    place: int = 0
    """The place in its source where the document begins: a number of bytes for lines, or the number of a row."""


def parts_in(span: Span, column: str) -> Iterator[Part]:
    """The texts of a span, in order; raises BrokenData, with file and row, for what is no text."""
    if span.source.kind == TEXT:
        yield from _of_file(span)
        return
    source, start, stop, _ = span
    texts = _of_lines(span, column) if source.kind == LINES else texts_of_rows(source.path, column, start, stop)
    for place, text in texts:
        *parts, last = parts_of(text)
        yield from (Part(part, False, place) for part in parts)
        yield Part(last, True, place)


def name_of(source: Source, place: int) -> str:
    """Returns the name of a document for messages, by the place where it begins; only here is the number of a line
    looked up."""
    if source.kind == TEXT:
        return source.path
    if source.kind == ROWS:
        return f"{source.path}, row {place} (from 0)"
    read, number, offset = bytes_of(source.path, source.compression).read, 1, 0
    while offset < place:
        block = read(offset, min(BLOCK_BYTES, place - offset))
        number, offset = number + block.count(b"\n"), offset + len(block)
    return f"{source.path}, line {number}"


@contextmanager
def files_forgotten() -> Iterator[None]:
    """Before and after the block no file is open that was read before; it may be another one by now."""
    forgetful = (bytes_of, rows_of)
    for each in forgetful:
        each.cache_clear()
    try:
        yield
    finally:
        for each in forgetful:
            each.cache_clear()


def _of_file(span: Span) -> Iterator[Part]:
    source, start, stop, length = span
    stream = bytes_of(source.path, source.compression)
    if length == 0:
        yield Part("", True)
    for begin, data in segments(stream.read, start, stop, length):
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise BrokenData(
                f"{source.path} is no text in UTF-8 (byte 0x{data[error.start]:02x} at {begin + error.start}): convert "
                "it, or leave it out"
            ) from None
        yield Part(text if begin else text.removeprefix(_BYTE_ORDER), begin + len(data) == length)


def _of_lines(span: Span, column: str) -> Iterator[tuple[int, str]]:
    """Yields the place and the text of each line that begins in the span."""
    source, start, stop, _ = span
    stream = bytes_of(source.path, source.compression)
    begin = max(start - 1, 0)
    data = stream.read(begin, stop - begin)
    if start:
        first = data.find(b"\n", 0, stop - begin - 1) + 1
        if not first:  # a line that begins before goes on to behind
            return
        data, begin = data[first:], begin + first
    if not data.endswith(b"\n"):
        data += _rest_of_line(source, stream.read, begin + len(data), begin + data.rfind(b"\n") + 1)
    for line in data.split(b"\n"):
        if len(line) > LONGEST_DOCUMENT_BYTES:
            raise _too_long(source, begin)
        if line and not line.isspace():
            yield begin, _text(line, column, source, begin)
        begin += len(line) + 1


def _rest_of_line(source: Source, read: Any, position: int, begin: int) -> bytes:
    """Returns the bytes from ``position`` to the end of the line, which begins at ``begin``."""
    blocks = []
    while block := read(position, BLOCK_BYTES):
        if position - begin > LONGEST_DOCUMENT_BYTES:
            raise _too_long(source, begin)
        line, found, _ = block.partition(b"\n")
        blocks.append(line)
        if found:
            break
        position += len(block)
    return b"".join(blocks)


def _too_long(source: Source, position: int) -> BrokenData:
    most = f"more than {LONGEST_DOCUMENT_BYTES:,} bytes"
    return _refused(source, position, f"has {most}: split it, or write its text into a file of plain text")


def _text(line: bytes, column: str, source: Source, position: int) -> str:
    try:
        row = parse_json(line)
    except ValueError as error:
        remedy = _ONE_PER_LINE if line.strip() in (b"[", b"{") else "mend or remove it"
        raise _refused(source, position, f"is no JSON ({_reason(error)}): {remedy}") from None
    if not isinstance(row, dict):
        remedy = _ONE_PER_LINE if isinstance(row, list) else "mend or remove it"
        raise _refused(source, position, f"is {_kind(row)} where an object is expected: {remedy}")
    if column not in row:
        listed = ", ".join(name if len(name) < 50 else shown(name) for name in list(row)[:8]) or "none"
        raise _refused(source, position, f"has no column {column!r} (it has {listed}): name one with --column")
    text = row[column]
    if not isinstance(text, str):
        words = f"has {_kind(text)} in column {column!r} where text is expected: mend or remove it, or name another"
        raise _refused(source, position, words)
    if b"\\u" in line or not line.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            words = f"has half a character in column {column!r} (a lone surrogate): mend or remove it"
            raise _refused(source, position, words) from None
    return text


_ONE_PER_LINE = "a line holds one object, so write those of a list, or of several lines, on a line each"


def _reason(error: Exception) -> str:
    return "its bytes are not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "null")


def _refused(source: Source, position: int, words: str) -> BrokenData:
    return BrokenData(f"{name_of(source, position)} {words}")
