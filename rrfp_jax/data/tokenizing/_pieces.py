"""Cuts all sources into pieces of some megabytes, and keeps the tokens of those that are done in a work folder.

Where pieces begin depends on the sources alone, and the tokens of a token set do not depend on the pieces: they only
decide which text one process takes at a time, and which work is kept when all are killed.

Each piece that is done is a file that is there whole or not at all. The file is named by a digest of its text and of
the way to tokenise it, so a piece of the same text is found again after a restart, and one of another text, tokenizer
or option never is. Its checksums are compared before it is used again.
"""

import hashlib
import json
import os
import secrets
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data._files import try_lock
from rrfp_jax.data.tokenizing._file_readers import count_rows, decompressed_blocks, unreadable
from rrfp_jax.data.tokenizing._text_parts import SEGMENT_BYTES, TextSpan
from rrfp_jax.data.tokenizing.inputs import ROWS, Source
from rrfp_jax.data.tokens.header import FileDigest

PIECE_BYTES = 4 * SEGMENT_BYTES
_MOST_ROWS = 1 << 14  # of a piece: a column that repeats itself is larger than its file says
_MARK, _PIECES = "work.json", "pieces"
_MARK_TEXT = '{"format": "unfinished rrfp-jax token set", "version": 1}\n'
_VERSION = 3  # part of the names of pieces, so that those of another version are made anew
# Head of a block in a file: number of tokens, number of ends, span, and CRC-32 of the data behind it. A head without
# tokens ends the file.
_HEAD = struct.Struct("<QQQI")


class SurveyedSource(NamedTuple):
    """A source that was read once for its digest."""

    source: Source
    digest: FileDigest
    length: int
    """Bytes of text, decompressed, or rows."""
    num_bytes: int
    """Approximate bytes of text."""
    stamp: tuple[int, int]
    """The stamp of the file before it was read."""


class TextPiece(NamedTuple):
    """The text that one process tokenises at a time: spans of one or more sources."""

    spans: tuple[TextSpan, ...]
    numbers: tuple[int, ...]
    """Numbers of the sources, one for each span."""
    num_bytes: int
    """Approximate bytes of text."""
    key: str
    """Digest of the text: equal keys are equal texts."""


class TokenBlock(NamedTuple):
    """Some tokens of a span of a piece; a piece is a sequence of blocks, so that no process holds all of it."""

    tokens: NDArray[Any]
    """Tokens ``[tokens]``, those that close documents included."""
    ends: NDArray[np.int64]
    """Places ``[documents]`` where documents end; the beginning of another may come behind the last."""
    span: int
    """The number of the piece's span that the tokens belong to."""


# ------------------------------------------------------------------------------------------------------------- cutting


def survey(
    sources: Sequence[Source], column: str, num_threads: int, add_bytes: Callable[[int], None]
) -> list[SurveyedSource]:
    """Reads all sources, calling ``add_bytes`` with the bytes that were read.

    Raises ValueError, with the remedy, for the first source that cannot be read or has no such column.
    """

    def survey_one(source: Source) -> SurveyedSource:
        stamp = stamp_of(source.path)
        try:
            digest = FileDigest.of_file(Path(source.path), add_bytes)
        except OSError as error:
            raise unreadable(source.path, error) from error
        length = num_bytes = digest.num_bytes
        if source.kind == ROWS:
            length, num_bytes = count_rows(source.path, column)
        elif source.compression is not None:
            length = num_bytes = sum(map(len, decompressed_blocks(source.path, source.compression)))
        return SurveyedSource(source, digest, length, num_bytes, stamp)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="survey") as executor:
        results = executor.map(survey_one, sources)
        try:
            return list(results)
        except BaseException:
            executor.shutdown(wait=True, cancel_futures=True)
            raise


def stamp_of(path: str) -> tuple[int, int]:
    """Returns size and time of change of a file."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from error
    return status.st_size, status.st_mtime_ns


def cut_into_pieces(surveyed: Sequence[SurveyedSource]) -> list[TextPiece]:
    """Returns the pieces of all sources, in order; small sources share a piece."""
    pieces: list[TextPiece] = []
    waiting: list[tuple[TextSpan, int, int]] = []
    num_waiting_bytes = 0
    for number, each in enumerate(surveyed):
        for span, num_bytes in _spans(each):
            if waiting and num_waiting_bytes + num_bytes > PIECE_BYTES:
                pieces.append(_piece(waiting, surveyed))
                waiting, num_waiting_bytes = [], 0
            waiting.append((span, number, num_bytes))
            num_waiting_bytes += num_bytes
    return [*pieces, _piece(waiting, surveyed)] if waiting else pieces


def _spans(surveyed: SurveyedSource) -> Iterator[tuple[TextSpan, int]]:
    """Yields the spans of a source, each with its approximate bytes of text."""
    source, _, length, num_bytes, _ = surveyed
    size = PIECE_BYTES
    if source.kind == ROWS:
        size = max(1, min(_MOST_ROWS, PIECE_BYTES * length // max(num_bytes, 1)))
    for start in range(0, max(length, 1), size):
        stop = min(start + size, length)
        yield TextSpan(source, start, stop, length), num_bytes * (stop - start) // max(length, 1)


def _piece(spans: Sequence[tuple[TextSpan, int, int]], surveyed: Sequence[SurveyedSource]) -> TextPiece:
    content = [
        (surveyed[number].digest.sha256, span.source.kind, span.source.compression, span.start, span.stop)
        for span, number, _ in spans
    ]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
    every_span, numbers, sizes = zip(*spans, strict=True)
    return TextPiece(every_span, numbers, sum(sizes), key)


# ------------------------------------------------------------------------------------------------------------- keeping


@contextmanager
def work_folder(out: Path) -> Iterator[Path]:
    """Makes and locks the work folder of the token set ``out`` for the block, which gets its path.

    Raises ValueError, with the remedy, if something else stands there, or if another process works in it.
    """
    folder = out.with_name(f"{out.name}.unfinished")
    mark = folder / _MARK
    folder.mkdir(parents=True, exist_ok=True)
    if not mark.is_file():
        if any(folder.iterdir()):
            raise ValueError(f"{folder} is no unfinished token set: move it away, or name another --out")
        mark.write_text(_MARK_TEXT)
    with mark.open("r+") as lock:
        if not try_lock(lock, "name an --out on another one, such as a local disk, and copy the token set then"):
            raise ValueError(f"another process is writing {out}: wait for it, or name another --out")
        (folder / _PIECES).mkdir(exist_ok=True)
        try:
            yield folder
        except BaseException:
            kept = {path.name for path in folder.rglob("*")} - {_MARK, _PIECES}
            if not kept:  # there is nothing to go on with
                remove_work_folder(folder)
            raise


def remove_work_folder(folder: Path) -> None:
    """Removes the work folder with all that it keeps."""
    shutil.rmtree(folder, ignore_errors=True)


class DamagedPiece(ValueError):
    """Raised for a piece that is missing, or not as it was written."""


class PieceFiles:
    """The pieces of one way to tokenise, ``settings``, in a work folder."""

    def __init__(self, folder: Path, settings: Any, dtype: str) -> None:
        self._folder = folder / _PIECES
        self._settings = json.dumps([_VERSION, settings, dtype])
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def path_of(self, key: str) -> Path:
        """Returns the file of a piece."""
        digest = hashlib.sha256(f"{self._settings}\n{key}".encode()).hexdigest()[:32]
        return self._folder / f"{digest}.piece"

    def write(self, key: str, blocks: Iterable[TokenBlock]) -> int:
        """Keeps a piece, whose blocks are written as they come; returns the number of its tokens."""
        num_tokens = 0
        target = self.path_of(key)
        temporary = target.with_suffix(f".{secrets.token_hex(4)}.part")
        try:
            with temporary.open("wb") as file:
                for tokens, ends, span in blocks:
                    payload = tokens.astype(self._dtype).tobytes() + ends.astype("<i8").tobytes()
                    file.write(_HEAD.pack(len(tokens), len(ends), span, zlib.crc32(payload)) + payload)
                    num_tokens += len(tokens)
                file.write(_HEAD.pack(0, 0, 0, 0))
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        return num_tokens

    def read(self, key: str) -> Iterator[TokenBlock]:
        """Yields the blocks of a kept piece; raises DamagedPiece, at any of them, if the piece is not whole."""
        try:
            with self.path_of(key).open("rb") as file:
                # The sizes in a head are compared with the rest of the file before memory is asked for by them.
                left = os.fstat(file.fileno()).st_size
                while True:
                    num_tokens, num_ends, span, checksum = _HEAD.unpack(file.read(_HEAD.size))
                    num_token_bytes = num_tokens * self._dtype.itemsize
                    left -= _HEAD.size + num_token_bytes + 8 * num_ends
                    if left < 0 or not num_tokens:
                        break
                    payload = file.read(num_token_bytes + 8 * num_ends)
                    if zlib.crc32(payload) != checksum:
                        break
                    tokens = np.frombuffer(payload, self._dtype, num_tokens)
                    yield TokenBlock(tokens, np.frombuffer(payload, "<i8", num_ends, num_token_bytes), span)
        except (OSError, struct.error):
            left = -1
        if left or num_tokens:
            raise DamagedPiece(f"{self.path_of(key)} is not whole")

    def holds(self, key: str) -> bool:
        """Returns whether a piece is kept, and whole."""
        try:
            for _ in self.read(key):
                pass
        except DamagedPiece:
            return False
        return True
