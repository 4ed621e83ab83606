"""The texts of Parquet rows, read forward: a worker whose pieces come in ascending order decodes a file once."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from rrfp_jax.data.dataset import BrokenData
from rrfp_jax.data.tokenizing.cutting import LONGEST_DOCUMENT_BYTES
from rrfp_jax.data.tokenizing.streams import unreadable

_BATCH_ROWS, _FEW_ROWS = 1024, 16
_SMALL_CHUNK_BYTES = 64 << 20
"""Bytes of a column in a row group that may be decoded at once, however long its rows are."""
_OF_DICTIONARIES, _FOLDED = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}, {"DELTA_BYTE_ARRAY"}
"""Encodings that store equal values once, and encodings that store only the difference of a value from the one
before."""
_MOST_UNFOLDED = 100
"""Largest ratio of the text in repeated rows to the text that the file says they have."""


class RowCounts(NamedTuple):
    """How many rows a file has, and about how many bytes of text."""

    num_rows: int
    num_bytes: int


def count_rows(path: str, column: str) -> RowCounts:
    """What the foot of a Parquet file says; raises ValueError, with the remedy, unless it has such a column of text."""
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
        num_bytes = sum(chunk.total_uncompressed_size for chunk in _chunks(metadata, column))
        return RowCounts(metadata.num_rows, num_bytes)


def _chunks(metadata: Any, column: str) -> Iterator[Any]:
    """Yields the foot's entry for a column, for each row group."""
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    chunks = (group.column(number) for group in groups for number in range(group.num_columns))
    return (chunk for chunk in chunks if chunk.path_in_schema == column)


def texts_of_rows(path: str, column: str, start: int, stop: int) -> Iterator[tuple[int, str]]:
    """Yields the numbers and texts of rows ``start`` to ``stop - 1``.

    Raises BrokenData, with file and row, for a row that is no text, or for text without bounds.
    """
    rows = rows_of(path, column)
    left = rows.most_bytes(start, stop)
    for number, value in rows.between(start, stop):
        if value is None:
            raise BrokenData(
                f"{path}, row {number} (from 0) has null in column {column!r} where text is expected: fill or remove it"
            )
        num_bytes = value.size
        left -= num_bytes
        if num_bytes > LONGEST_DOCUMENT_BYTES or left < 0:
            what = f"has {num_bytes:,} bytes of text" if left >= 0 else "and those before repeat themselves without end"
            raise BrokenData(
                f"{path}, row {number} (from 0) {what}, more than a document, or a file of this size, may have: split "
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
        chunks = list(_chunks(self._file.metadata, self._column))
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
        told = self._num_bytes * (stop - start) // max(self._file.metadata.num_rows, 1)
        return max(_SMALL_CHUNK_BYTES, _MOST_UNFOLDED * told)

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
def rows_of(path: str, column: str) -> _ForwardRows:
    """The rows of a file; the one that was asked for last stays open."""
    return _ForwardRows(path, column)


def _opened(path: str, **options: Any) -> Any:
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path, page_checksum_verification=True, **options)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
