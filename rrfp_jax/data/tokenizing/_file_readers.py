"""Reads the files that hold documents: bytes by position, decompressed if need be, and the texts of Parquet rows.

A compressed file, or a Parquet file, is best read forward. So the bytes or rows that were read last are kept for a
while, and a worker whose pieces come in ascending order decodes a file once.
"""

import gzip
import os
import weakref
import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from rrfp_jax.data.dataset import BrokenData

LONGEST_DOCUMENT_BYTES = 1 << 25
"""Largest size of a document that is one line or one row of a file, which is held as a whole; plain text has no such
bound."""
BLOCK_BYTES = 1 << 20
_KEPT_BYTES = 8 << 20  # as far back a compressed file can be read without a new beginning
_BATCH_ROWS, _FEW_ROWS = 1024, 16
# Bytes of a column in a row group that may be decoded at once, however long its rows are.
_SMALL_CHUNK_BYTES = 64 << 20
# Encodings that store equal values once, and encodings that store only the difference of a value from the one before.
_OF_DICTIONARIES, _FOLDED = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}, {"DELTA_BYTE_ARRAY"}
# Largest ratio of the text in repeated rows to the text that the file says they have.
_MOST_UNFOLDED = 100


def unreadable(path: str, error: Exception) -> BrokenData:
    """Returns the error for a file that cannot be read."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error).split("\n", maxsplit=1)[0]
    return BrokenData(f"{path} cannot be read ({reason}): mend it, or leave it out")


# --------------------------------------------------------------------------------------------------------------- bytes


class _PlainBytes:
    """The bytes of a file."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(path, error) from error
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, start: int, num_bytes: int) -> bytes:
        """Returns ``num_bytes`` bytes from ``start``, or fewer at the end of the file."""
        blocks = []
        while num_bytes > 0:
            try:
                block = os.pread(self._descriptor, num_bytes, start)
            except OSError as error:
                raise unreadable(self._path, error) from error
            if not block:
                break
            blocks.append(block)
            start, num_bytes = start + len(block), num_bytes - len(block)
        return b"".join(blocks)


class _CompressedBytes:
    """The decompressed bytes of a compressed file."""

    def __init__(self, path: str, compression: str) -> None:
        self._path, self._compression = path, compression
        self._begin()

    def _begin(self) -> None:
        self._stream = _open_compressed(self._path, self._compression)
        self._kept, self._offset = bytearray(), 0

    def read(self, start: int, num_bytes: int) -> bytes:
        """Returns ``num_bytes`` decompressed bytes from ``start``, or fewer at the end."""
        if start < self._offset:
            self._begin()
        while self._offset + len(self._kept) < start + num_bytes:
            block = _read_block(self._stream, self._path)
            if not block:
                break
            self._kept += block
            surplus = min(start - _KEPT_BYTES - self._offset, len(self._kept))
            if surplus > 0:
                del self._kept[:surplus]
                self._offset += surplus
        return bytes(self._kept[start - self._offset : start - self._offset + num_bytes])


@lru_cache(maxsize=1)
def bytes_of(path: str, compression: str | None) -> _PlainBytes | _CompressedBytes:
    """Returns the bytes of a file; the file of the last call stays open."""
    return _PlainBytes(path) if compression is None else _CompressedBytes(path, compression)


def decompressed_blocks(path: str, compression: str) -> Iterator[bytes]:
    """Yields the decompressed bytes of a file; raises BrokenData, with the remedy, if it is damaged."""
    stream = _open_compressed(path, compression)
    while block := _read_block(stream, path):
        yield block


def _open_compressed(path: str, compression: str) -> Any:
    import pyarrow as pa

    try:
        if os.stat(path).st_size == 0:
            raise BrokenData(f"{path} is damaged (it is empty): mend it, or leave it out")
        stream = pa.CompressedInputStream(pa.OSFile(path), compression)
        return _PaddedGzip(path, stream) if compression == "gzip" else stream
    except OSError as error:
        raise unreadable(path, error) from error


def _read_block(stream: Any, path: str) -> bytes:
    try:
        return stream.read(BLOCK_BYTES)
    except (OSError, ValueError) as error:  # pyarrow's errors are of both kinds
        raise BrokenData(f"{path} is damaged ({error}): mend it, or leave it out") from error


class _PaddedGzip:
    """Reads a gzip file that may be padded with zeros, as on tapes; pyarrow accepts no zeros after the last member."""

    def __init__(self, path: str, stream: Any) -> None:
        self._path, self._stream, self._position = path, stream, 0

    def read(self, num_bytes: int) -> bytes:
        try:
            block = self._stream.read(num_bytes)
        except OSError as error:
            # Python's own reader is slower, so it reads only from here on; if it finds damage as well, there is some.
            try:
                other = gzip.open(self._path)  # noqa: SIM115 - later reads go on with it
                for start in range(0, self._position, BLOCK_BYTES):
                    other.read(min(BLOCK_BYTES, self._position - start))
                block = other.read(num_bytes)
            except (OSError, EOFError, zlib.error):
                raise error from None
            self._stream = other
        self._position += len(block)
        return block


# ---------------------------------------------------------------------------------------------------------------- rows


class _RowCounts(NamedTuple):
    """The number of rows of a file, and about how many bytes of text they have."""

    num_rows: int
    num_bytes: int


def count_rows(path: str, column: str) -> _RowCounts:
    """Returns the counts in the foot of a Parquet file; raises ValueError, with the remedy, unless it has such a column
    of text."""
    import pyarrow.types as kinds

    with _opened(path) as file:
        schema, metadata = file.schema_arrow, file.metadata
        if column not in schema.names:
            raise ValueError(
                f"{path} has no column {column!r} (it has {', '.join(schema.names[:8])}): name one with --column"
            )
        if schema.names.count(column) > 1:
            raise ValueError(f"{path} has several columns {column!r}: rename them, or name another --column")
        kind = schema.field(column).type
        value = kind.value_type if kinds.is_dictionary(kind) else kind
        if not (kinds.is_string(value) or kinds.is_large_string(value) or kinds.is_string_view(value)):
            raise ValueError(f"{path} has {kind} in column {column!r} where text is expected: name another --column")
        num_bytes = sum(chunk.total_uncompressed_size for chunk in _column_chunks(metadata, column))
        return _RowCounts(metadata.num_rows, num_bytes)


def row_texts(path: str, column: str, start: int, stop: int) -> Iterator[tuple[int, str]]:
    """Yields the numbers and texts of rows ``start`` to ``stop - 1``.

    Raises BrokenData, with file and row, for a row that is no text, or for text without bounds.
    """
    rows = forward_rows(path, column)
    left = rows.most_bytes(start, stop)
    for number, value in rows.between(start, stop):
        if value is None:
            raise BrokenData(
                f"{path}, row {number} (from 0) has null in column {column!r} where text is expected: fill or remove it"
            )
        # A small file may repeat a long text millions of times, so the sum of all rows is bounded too.
        num_bytes = value.size
        left -= num_bytes
        if num_bytes > LONGEST_DOCUMENT_BYTES or left < 0:
            fault = (
                f"has {num_bytes:,} bytes of text" if left >= 0 else "and those before repeat themselves without end"
            )
            raise BrokenData(
                f"{path}, row {number} (from 0) {fault}, more than a document, or a file of this size, may have: split "
                "or remove it"
            )
        try:
            yield number, value.to_pybytes().decode()
        except UnicodeDecodeError:
            raise BrokenData(
                f"{path}, row {number} (from 0) has bytes in column {column!r} that are not UTF-8: mend or remove it"
            ) from None


class _ForwardRows:
    """Reads the values of one column, and keeps the batch that was read last.

    Equal texts are decoded once and kept once, as in the file. So the rows may be many times as large as the file, and
    a value becomes a string only when its turn has come.
    """

    def __init__(self, path: str, column: str) -> None:
        self._path, self._column = path, column
        self._begin()

    def _begin(self) -> None:
        self._file = _opened(self._path)
        chunks = list(_column_chunks(self._file.metadata, self._column))
        encodings = {encoding for chunk in chunks for encoding in chunk.encodings}
        if encodings & _OF_DICTIONARIES and not encodings & _FOLDED:
            self._file = _opened(self._path, read_dictionary=[self._column])
        self._num_bytes = sum(chunk.total_uncompressed_size for chunk in chunks)
        is_small = all(chunk.total_uncompressed_size <= _SMALL_CHUNK_BYTES for chunk in chunks)
        num_rows = _BATCH_ROWS if is_small and not encodings & _FOLDED else _FEW_ROWS
        self._batches = self._file.iter_batches(num_rows, columns=[self._column], use_threads=False)
        self._first = 0
        self._values: Any = ()

    def most_bytes(self, start: int, stop: int) -> int:
        """Returns the most bytes of text that some rows may have, by the file's foot."""
        stated = self._num_bytes * (stop - start) // max(self._file.metadata.num_rows, 1)
        return max(_SMALL_CHUNK_BYTES, _MOST_UNFOLDED * stated)

    def between(self, start: int, stop: int) -> Iterator[tuple[int, Any]]:
        """Yields the numbers and values of some rows, the values as buffers."""
        if start < self._first:
            self._begin()
        while start < stop:
            ahead = start - self._first
            if ahead < len(self._values):
                for number in range(start, min(stop, self._first + len(self._values))):
                    value = self._values[number - self._first]
                    yield number, (value if self._is_plain else value.value).as_buffer() if value.is_valid else None
                    start = number + 1
            else:
                self._next()

    def _next(self) -> None:
        self._first += len(self._values)
        try:
            self._values = next(self._batches).column(0)
            self._is_plain = not hasattr(self._values, "dictionary")
        except StopIteration:
            raise BrokenData(
                f"{self._path} is damaged (it has only {self._first} rows): mend it, or leave it out"
            ) from None
        except (OSError, ValueError) as error:  # pyarrow's errors are of both kinds
            raise BrokenData(
                f"{self._path} is damaged (at row {self._first} or behind, from 0: {str(error).splitlines()[0]}): mend "
                "it, or leave it out"
            ) from error


@lru_cache(maxsize=1)
def forward_rows(path: str, column: str) -> _ForwardRows:
    """Returns the rows of a file; the file of the last call stays open."""
    return _ForwardRows(path, column)


def _column_chunks(metadata: Any, column: str) -> Iterator[Any]:
    """Yields the foot's entry for a column, for each row group."""
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    chunks = (group.column(number) for group in groups for number in range(group.num_columns))
    return (chunk for chunk in chunks if chunk.path_in_schema == column)


def _opened(path: str, **options: Any) -> Any:
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path, page_checksum_verification=True, **options)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
