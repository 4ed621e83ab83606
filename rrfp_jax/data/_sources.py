"""Files of documents: which ones, in which order, and their bytes by position or the texts of their rows.

Rows are those of Parquet, and of Arrow as ``datasets`` of Hugging Face keeps them on disk.

Files of a folder come in the order of their relative paths and are named by them, so that the same folder gives the
same token set on every machine.

A compressed file, or a Parquet file, is best read forward. So the bytes or rows that were read last are kept for a
while, and a worker whose pieces come in ascending order decodes a file once.
"""

import gzip
import os
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Never

from rrfp_jax.data.dataset import BrokenData
from rrfp_jax.record_files import parse_json, read_bounded

TEXT, LINES, ROWS = "text", "lines", "rows"
"""Kinds of files: one document; a JSON object with a document in each line; a row for each document."""
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
TOOLS = "tools"
"""The field of a row that has the tools of a chat."""
_LINES = (".jsonl", ".ndjson", ".json")
_ARROW = ".arrow"
_ROWS = (".parquet", ".pq", _ARROW)
_SAVED_FILES, _SAVED_PARTS = "state.json", "dataset_dict.json"
SAVED = "dataset_info.json"
"""A file in the folder of each data set that ``save_to_disk`` of Hugging Face's ``datasets`` has written."""
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
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


@dataclass(frozen=True)
class Source:
    """One file that holds documents."""

    name: str
    """The path relative to the input that it was found in."""
    path: str
    kind: str
    """``text``, ``lines`` or ``rows``."""
    compression: str | None
    """pyarrow's name for the compression. None: the file is not compressed as a whole."""


def find_sources(inputs: Sequence[str | os.PathLike[str]], suffixes: Sequence[str]) -> tuple[list[Source], list[Path]]:
    """Returns the sources in files and folders, and the files of folders that were left out for their suffixes.

    ``suffixes`` are the endings of plain text. Hidden files and folders are skipped, links to folders not followed. Of
    several folders, names begin with that of the folder. Raises ValueError, with the remedy, if an input is missing, of
    no known kind, or holds nothing, and for a link in a folder to a file outside of it. The files that were left out
    include links to folders, and anything that is no file.
    """
    if not inputs:
        raise ValueError("there is no input: name files or folders of text, JSON lines or Parquet")
    known = (
        f"plain text ends in {', '.join(suffixes)} (--suffixes names others), JSON lines in {', '.join(_LINES)}, both "
        f"also in {', '.join(_COMPRESSIONS)} behind it, and Parquet and Arrow in {', '.join(_ROWS)}"
    )
    found: list[Source] = []
    left_out: list[Path] = []
    for given in inputs:
        root = Path(given).expanduser()
        if not root.exists():
            raise ValueError(f"input {root} does not exist: name an existing file or folder")
        if not root.is_dir():
            if not root.is_file():
                raise ValueError(f"input {root} is no file, and is read several times: write what it gives into one")
            source = _source(root, root.name, suffixes)
            if source is None:
                raise ValueError(f"{root} is of no known kind: {known}")
            found.append(source)
            continue
        prefix = "" if len(inputs) == 1 else f"{root.absolute().name}/"
        num_before = len(found)
        saved = _saved_files(root)
        for path in paths_below(root):
            if path.name.startswith(".") or path.name == SAVED or (saved is not None and path not in saved):
                continue
            if path.is_file() and path.is_symlink():
                check_inside(path, root)
            source = _source(path, prefix + path.relative_to(root).as_posix(), suffixes) if path.is_file() else None
            if source is None:
                left_out.append(path)
            else:
                found.append(source)
        if len(found) == num_before:
            raise ValueError(f"folder {root} holds no file of a known kind: {known}")
    return found, left_out


def _saved_files(folder: Path) -> list[Path] | None:
    """Returns the files of a data set that ``save_to_disk`` of Hugging Face's library has written, without those that
    it has cached beside them; None for another folder. Raises ValueError if the folder holds several data sets."""
    if (folder / _SAVED_PARTS).is_file():
        names = ", ".join(str(path.parent) for path in sorted(folder.glob(f"*/{SAVED}")))
        raise ValueError(f"{folder} holds several data sets: name one of {names}")
    # A folder of the library's cache has no list of files: all of them count there.
    if not all((folder / name).is_file() for name in (SAVED, _SAVED_FILES)):
        return None
    try:
        saved = parse_json(read_bounded(folder / _SAVED_FILES))
        files, chosen = [folder / each["filename"] for each in saved["_data_files"]], saved.get("_indices_data_files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / _SAVED_FILES} is damaged ({error}): save the data set anew") from None
    if chosen:
        raise ValueError(f"{folder} is a choice among rows: save it anew after flatten_indices()")
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is missing, which {_SAVED_FILES} beside it names: save the data set anew")
    return files


def _source(path: Path, name: str, suffixes: Sequence[str]) -> Source | None:
    compression = _COMPRESSIONS.get(path.suffix.lower())
    bare = path.name.lower() if compression is None else path.stem.lower()
    if bare.endswith(_LINES):
        kind = LINES
    elif bare.endswith(_ROWS) and compression is None:  # it is compressed inside
        kind = ROWS
    elif bare.endswith(tuple(suffix.lower() for suffix in suffixes)):
        kind = TEXT
    else:
        return None
    return Source(name, str(path), kind, compression)


def check_inside(path: Path, folder: Path) -> None:
    """Raise ValueError if ``path``, found in ``folder``, leads out of it by a link.

    In the cache of the hub, files are links into ``blobs``, beside the snapshots of their repository: these count as
    inside.
    """
    target, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    snapshots = [above.parent for above in (root, *root.parents) if above.parent.name == "snapshots"]
    if not any(target.is_relative_to(each) for each in (root, *(each.parent / "blobs" for each in snapshots))):
        raise ValueError(
            f"{path} is a link to {target}, which is not in {folder}: put the file itself there, or name the folder "
            "that it is in"
        )


def paths_below(root: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Returns the files below a folder, and its links to folders, which are not followed, by their relative paths.

    Folders that are hidden or named in ``skipped`` are left out. Raises ValueError for a folder that cannot be read.
    """
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root, onerror=refuse_unreadable):
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
        found += (Path(folder, name) for name in names)
        found += (path for name in subfolders if (path := Path(folder, name)).is_symlink())
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def refuse_unreadable(error: OSError) -> Never:
    """Raises the ValueError for a file or a folder that cannot be read."""
    raise ValueError(
        f"cannot read {error.filename} ({error.strerror}): make it readable, or move it out of the data folder"
    ) from error


# --------------------------------------------------------------------------------------------------------------- bytes


class _SourceBytes:
    """The bytes of a file, decompressed if need be."""

    def __init__(self, path: str, compression: str | None) -> None:
        self._path, self._compression = path, compression
        self._begin()

    def _begin(self) -> None:
        self._stream = _open_stream(self._path, self._compression)
        self._close = weakref.finalize(self, self._stream.close)
        self._kept, self._offset = bytearray(), 0

    def read(self, start: int, num_bytes: int) -> bytes:
        """Returns ``num_bytes`` bytes from ``start``, or fewer at the end of the file."""
        if self._compression is None:
            try:
                self._stream.seek(start)
                return self._stream.read(num_bytes)
            except OSError as error:
                raise unreadable(self._path, error) from error
        if start < self._offset:
            self._close()
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


bytes_of = lru_cache(maxsize=1)(_SourceBytes)
"""Returns the bytes of a file, by path and compression; the file of the last call stays open."""


def decompressed_size(path: str, compression: str) -> int:
    """Returns the number of decompressed bytes of a file; raises BrokenData, with the remedy, if it is damaged."""
    stream, size = _open_stream(path, compression), 0
    while block := _read_block(stream, path):
        size += len(block)
    stream.close()
    return size


def _open_stream(path: str, compression: str | None) -> Any:
    import pyarrow as pa

    try:
        if compression is None:
            return open(path, "rb")
        if os.stat(path).st_size == 0:
            raise BrokenData(f"{path} is damaged (it is empty): mend it, or leave it out")
        # Python's reader is as fast as pyarrow's, and takes files that are padded with zeros, as on tapes.
        return gzip.open(path) if compression == "gzip" else pa.CompressedInputStream(pa.OSFile(path), compression)
    except OSError as error:
        raise unreadable(path, error) from error


def _read_block(stream: Any, path: str) -> bytes:
    try:
        return stream.read(BLOCK_BYTES)
    except (OSError, ValueError, EOFError, zlib.error) as error:  # pyarrow's errors are of the first two kinds
        raise BrokenData(f"{path} is damaged ({error}): mend it, or leave it out") from error


def unreadable(path: str, error: Exception) -> BrokenData:
    """Returns the error for a file that cannot be read."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error).split("\n", maxsplit=1)[0]
    return BrokenData(f"{path} cannot be read ({reason}): mend it, or leave it out")


@contextmanager
def files_forgotten() -> Iterator[None]:
    """Closes files that were read before the block, and in it: a path may name another file by the next time."""
    try:
        bytes_of.cache_clear()
        _forward_rows.cache_clear()
        yield
    finally:
        bytes_of.cache_clear()
        _forward_rows.cache_clear()


# ---------------------------------------------------------------------------------------------------------------- rows


def has_lists(path: str, column: str) -> bool:
    """Returns whether a column of a Parquet file holds lists of objects, as chats are."""
    with _opened(path) as file:
        schema = file.schema_arrow
        return schema.names.count(column) == 1 and _is_chat(schema.field(column).type)


def _is_chat(kind: Any) -> bool:
    import pyarrow.types as kinds

    return (kinds.is_list(kind) or kinds.is_large_list(kind)) and kinds.is_struct(kind.value_type)


def count_rows(path: str, column: str, *, is_chat: bool) -> tuple[int, int]:
    """Returns the number of rows of a Parquet file, and about how many bytes of text they have, by the file's foot.

    Raises ValueError, with the remedy, unless it has such a column of text, or of messages.
    """
    import pyarrow.types as kinds

    with _opened(path) as file:
        schema = file.schema_arrow
        if column not in schema.names:
            raise ValueError(
                f"{path} has no column {column!r} (it has {', '.join(schema.names[:8])}): name one with --column"
            )
        if schema.names.count(column) > 1:
            raise ValueError(f"{path} has several columns {column!r}: rename them, or name another --column")
        kind = schema.field(column).type
        value = kind.value_type if kinds.is_dictionary(kind) else kind
        is_text = kinds.is_string(value) or kinds.is_large_string(value) or kinds.is_string_view(value)
        if not (_is_chat(kind) if is_chat else is_text):
            wanted = "a list of messages" if is_chat else "text"
            raise ValueError(
                f"{path} has {kind} in column {column!r} where {wanted} is expected: name another --column"
            )
        return _size(file, column)


def row_texts(path: str, column: str, start: int, stop: int) -> Iterator[tuple[int, str]]:
    """Yields the numbers and texts of rows ``start`` to ``stop - 1``.

    Raises BrokenData, with file and row, for a row that is no text, or for text without bounds.
    """
    rows = _forward_rows(path, column)
    stated = rows.num_bytes * (stop - start) // max(rows.num_rows, 1)
    left = max(_SMALL_CHUNK_BYTES, _MOST_UNFOLDED * stated)
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


def row_chats(path: str, column: str, start: int, stop: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the numbers of rows ``start`` to ``stop - 1``, and what each has in ``column`` and as tools."""
    return _forward_rows(path, column, TOOLS).between(start, stop)


class _ForwardRows:
    """Reads the values of one column, or whole rows of several, and keeps the batch that was read last.

    Equal texts are decoded once and kept once, as in the file. So the rows may be many times as large as the file, and
    a value becomes a string only when its turn has come.
    """

    def __init__(self, path: str, column: str, *others: str) -> None:
        self._path, self._column, self._others = path, column, others
        self._begin()

    def _begin(self) -> None:
        self._file = _opened(self._path)
        self.num_rows, self.num_bytes = _size(self._file, self._column)
        chunks = [] if isinstance(self._file, _ArrowFile) else list(_column_chunks(self._file.metadata, self._column))
        encodings = {encoding for chunk in chunks for encoding in chunk.encodings}
        if encodings & _OF_DICTIONARIES and not (encodings & _FOLDED or self._others):
            self._file = _opened(self._path, read_dictionary=[self._column])
        is_small = all(chunk.total_uncompressed_size <= _SMALL_CHUNK_BYTES for chunk in chunks)
        num_rows = _BATCH_ROWS if is_small and not (encodings & _FOLDED or self._others) else _FEW_ROWS
        others = [name for name in self._others if name in self._file.schema_arrow.names]
        self._batches = self._file.iter_batches(num_rows, columns=[self._column, *others], use_threads=False)
        self._first = 0
        self._values: Any = ()

    def between(self, start: int, stop: int) -> Iterator[tuple[int, Any]]:
        """Yields the numbers and values of some rows: buffers of one column, or whole rows."""
        if start < self._first:
            self._begin()
        while start < stop:
            ahead = start - self._first
            if ahead < len(self._values):
                for number in range(start, min(stop, self._first + len(self._values))):
                    value = self._values[number - self._first]
                    if self._others:
                        yield number, value.as_py()
                    else:
                        yield number, (value if self._is_plain else value.value).as_buffer() if value.is_valid else None
                    start = number + 1
            else:
                self._next()

    def _next(self) -> None:
        self._first += len(self._values)
        try:
            batch = next(self._batches)
            self._values = batch.to_struct_array() if self._others else batch.column(0)
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


_forward_rows = lru_cache(maxsize=1)(_ForwardRows)  # the file of the last call stays open


def _size(file: Any, column: str) -> tuple[int, int]:
    """Returns the rows of an open file, and about how many bytes a column of them has."""
    if isinstance(file, _ArrowFile):
        return file.size(column)
    return file.metadata.num_rows, sum(chunk.total_uncompressed_size for chunk in _column_chunks(file.metadata, column))


def _column_chunks(metadata: Any, column: str) -> Iterator[Any]:
    """Yields the foot's entry for a column, for each row group."""
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    chunks = (group.column(number) for group in groups for number in range(group.num_columns))
    return (chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(f"{column}."))


class _ArrowFile(AbstractContextManager["_ArrowFile"]):
    """A file of Arrow's record batches in a stream, with those parts of ParquetFile that are used here."""

    def __init__(self, path: str) -> None:
        import pyarrow as pa

        self._path, self._pa, self._file = path, pa, pa.OSFile(path)
        self.schema_arrow = pa.ipc.open_stream(self._file).schema

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def size(self, column: str) -> tuple[int, int]:
        """Returns the rows and the bytes of a column, for which all of the file is read."""
        num_rows = num_bytes = 0
        try:
            for batch in self.iter_batches(_BATCH_ROWS, columns=[column]):
                num_rows, num_bytes = num_rows + batch.num_rows, num_bytes + batch.nbytes
        except (OSError, ValueError) as error:
            raise unreadable(self._path, error) from error
        return num_rows, num_bytes

    def iter_batches(self, num_rows: int, *, columns: list[str], **_: object) -> Iterator[Any]:
        """Yields batches of at most ``num_rows`` rows, from the beginning of the file."""
        self._file.seek(0)
        for batch in self._pa.ipc.open_stream(self._file):
            for start in range(0, batch.num_rows, num_rows):
                yield batch.select(columns).slice(start, num_rows)


def _opened(path: str, **options: Any) -> Any:
    from pyarrow.parquet import ParquetFile

    try:
        if path.lower().endswith(_ARROW):
            return _ArrowFile(path)
        return ParquetFile(path, page_checksum_verification=True, **options)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
