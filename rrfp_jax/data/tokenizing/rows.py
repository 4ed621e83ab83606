"""The texts of Parquet rows, read forward: a worker whose pieces come in ascending order decodes a file once."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from rrfp_jax.data.dataset import BrokenData
from rrfp_jax.data.tokenizing.streams import unreadable

_BATCH_ROWS = 1024


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
        return RowCounts(metadata.num_rows, _text_bytes(metadata, column))


def _text_bytes(metadata: Any, column: str) -> int:
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    chunks = (group.column(number) for group in groups for number in range(group.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)


def texts_of_rows(path: str, column: str, start: int, stop: int) -> Iterator[str]:
    """The texts of rows ``start`` to ``stop - 1``; raises BrokenData, with file and row, for what is no text."""
    for number, text in rows_of(path, column).between(start, stop):
        if not isinstance(text, str):
            raise BrokenData(
                f"{path}, row {number} (from 0) has null in column {column!r} where text is expected: fill or remove it"
            )
        yield text


class _ForwardRows:
    """The values of one column; the batch that was read last is kept."""

    def __init__(self, path: str, column: str) -> None:
        self._path, self._column = path, column
        self._begin()

    def _begin(self) -> None:
        self._file = _opened(self._path)
        self._batches = self._file.iter_batches(_BATCH_ROWS, columns=[self._column], use_threads=False)
        self._first = 0
        self._values: list[Any] = []

    def between(self, start: int, stop: int) -> Iterator[tuple[int, Any]]:
        """Numbers and values of some rows."""
        if start < self._first:
            self._begin()
        while start < stop:
            ahead = start - self._first
            if ahead < len(self._values):
                some = self._values[ahead : stop - self._first]
                yield from enumerate(some, start)
                start += len(some)
            else:
                self._next()

    def _next(self) -> None:
        self._first += len(self._values)
        try:
            self._values = next(self._batches).column(0).to_pylist()
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


def _opened(path: str) -> Any:
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
