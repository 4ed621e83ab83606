"""The documents of a span of one source, as text.

A span counts in bytes of text, decompressed, or in rows; every document belongs to the span in which it begins, but a
file of plain text is one document that may go on over several.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from rrfp_jax.data.dataset import BrokenData
from rrfp_jax.data.tokenizing.cutting import parts_of, segments
from rrfp_jax.data.tokenizing.rows import rows_of, texts_of_rows
from rrfp_jax.data.tokenizing.sources import LINES, TEXT, Source
from rrfp_jax.data.tokenizing.streams import BLOCK_BYTES, bytes_of

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


def parts_in(span: Span, column: str) -> Iterator[Part]:
    """The texts of a span, in order; raises BrokenData, with file and row, for what is no text."""
    if span.source.kind == TEXT:
        yield from _of_file(span)
        return
    source, start, stop, _ = span
    texts = _of_lines(span, column) if source.kind == LINES else texts_of_rows(source.path, column, start, stop)
    for text in texts:
        *parts, last = parts_of(text)
        yield from (Part(part, False) for part in parts)
        yield Part(last, True)


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


def _of_lines(span: Span, column: str) -> Iterator[str]:
    """The texts of all lines that begin in the span."""
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
        data += _rest_of_line(stream.read, begin + len(data))
    for line in data.split(b"\n"):
        if line and not line.isspace():
            yield _text(line, column, source, begin)
        begin += len(line) + 1


def _rest_of_line(read: Any, position: int) -> bytes:
    blocks = []
    while block := read(position, BLOCK_BYTES):
        line, found, _ = block.partition(b"\n")
        blocks.append(line)
        if found:
            break
        position += len(block)
    return b"".join(blocks)


def _text(line: bytes, column: str, source: Source, position: int) -> str:
    try:
        row = json.loads(line.decode("utf-8-sig"))  # of bytes json takes UTF-16, too
    except (ValueError, RecursionError) as error:
        remedy = _ONE_PER_LINE if line.strip() in (b"[", b"{") else "mend or remove it"
        raise _refused(source, position, f"is no JSON ({_reason(error)}): {remedy}") from None
    if not isinstance(row, dict):
        remedy = _ONE_PER_LINE if isinstance(row, list) else "mend or remove it"
        raise _refused(source, position, f"is {_kind(row)} where an object is expected: {remedy}")
    if column not in row:
        listed = ", ".join(list(row)[:8]) or "none"
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
    """The line's number is looked up only now."""
    read, number, offset = bytes_of(source.path, source.compression).read, 1, 0
    while offset < position:
        block = read(offset, min(BLOCK_BYTES, position - offset))
        number, offset = number + block.count(b"\n"), offset + len(block)
    return BrokenData(f"{source.path}, line {number} {words}")
