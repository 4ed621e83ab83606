"""The bytes of a file by position, decompressed where it is compressed.

A compressed file can only be read forward. So what was read last is kept for a while, and a worker whose pieces come in
ascending order decompresses a file once.
"""

import gzip
import os
import weakref
import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from rrfp_jax.data.dataset import BrokenData

BLOCK_BYTES = 1 << 20
_KEPT_BYTES = 8 << 20
"""How far back one can go without beginning anew."""


class PlainBytes:
    """A file as it is."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = _open(path)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, start: int, num_bytes: int) -> bytes:
        """So many bytes from ``start``; fewer at the end of the file."""
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


class CompressedBytes:
    """A compressed file as if it were not."""

    def __init__(self, path: str, compression: str) -> None:
        self._path, self._compression = path, compression
        self._begin()

    def _begin(self) -> None:
        self._stream: Any = _decompressed(self._path, self._compression)
        self._kept, self._offset = bytearray(), 0

    def read(self, start: int, num_bytes: int) -> bytes:
        """So many bytes from ``start``, counted decompressed; fewer at the end."""
        if start < self._offset:
            self._begin()
        while self._offset + len(self._kept) < start + num_bytes:
            block = _block(self._stream, self._path)
            if not block:
                break
            self._kept += block
            surplus = min(start - _KEPT_BYTES - self._offset, len(self._kept))
            if surplus > 0:
                del self._kept[:surplus]
                self._offset += surplus
        return bytes(self._kept[start - self._offset : start - self._offset + num_bytes])


@lru_cache(maxsize=1)
def bytes_of(path: str, compression: str | None) -> PlainBytes | CompressedBytes:
    """The bytes of a file; the one that was asked for last stays open."""
    return PlainBytes(path) if compression is None else CompressedBytes(path, compression)


def decompressed_blocks(path: str, compression: str) -> Iterator[bytes]:
    """All of a compressed file, block by block; raises BrokenData, with the file's name, where it is damaged."""
    stream = _decompressed(path, compression)
    while block := _block(stream, path):
        yield block


def unreadable(path: str, error: Exception) -> BrokenData:
    """What to raise where a file cannot be read."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error).split("\n", maxsplit=1)[0]
    return BrokenData(f"{path} cannot be read ({reason}): mend it, or leave it out")


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(path, error) from error


def _decompressed(path: str, compression: str) -> Any:
    import pyarrow as pa

    try:
        if os.stat(path).st_size == 0:
            raise BrokenData(f"{path} is damaged (it is empty): mend it, or leave it out")
        stream = pa.CompressedInputStream(pa.OSFile(path), compression)
        return _Gzip(path, stream) if compression == "gzip" else stream
    except OSError as error:
        raise unreadable(path, error) from error


class _Gzip:
    """Reads a gzip file that may be padded with zeros, as on tapes; pyarrow accepts no zeros after the last member."""

    def __init__(self, path: str, stream: Any) -> None:
        self._path, self._stream, self._position = path, stream, 0

    def read(self, num_bytes: int) -> bytes:
        try:
            block = self._stream.read(num_bytes)
        except OSError as error:
            block = self._read_anew(num_bytes, error)
        self._position += len(block)
        return block

    def _read_anew(self, num_bytes: int, error: OSError) -> bytes:
        """Read with Python's own reader, which is slower; raises ``error`` if that reader finds damage as well."""
        try:
            other = gzip.open(self._path)  # noqa: SIM115 - later reads go on with it
            for start in range(0, self._position, BLOCK_BYTES):
                other.read(min(BLOCK_BYTES, self._position - start))
            block = other.read(num_bytes)
        except (OSError, EOFError, zlib.error):
            raise error from None
        self._stream = other
        return block


def _block(stream: Any, path: str) -> bytes:
    try:
        return stream.read(BLOCK_BYTES)
    except (OSError, ValueError) as error:  # pyarrow's errors are of both kinds
        raise BrokenData(f"{path} is damaged ({error}): mend it, or leave it out") from error
