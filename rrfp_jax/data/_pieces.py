"""Cuts all sources into pieces of some megabytes, and keeps the tokens of those that are done in a work folder.

Where pieces begin depends on the sources alone, and the tokens of a token set do not depend on the pieces: they only
decide which text one process takes at a time, and which work is kept when all are killed.

Each piece that is done is a file that is there whole or not at all. The file is named by a digest of its text and of
the way to tokenise it, so a piece of the same text is found again after a restart, and one of another text, tokenizer
or option never is. Its checksums are compared before it is used again.
"""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data._documents import SEGMENT_BYTES, TextSpan
from rrfp_jax.data._sources import ROWS, Source, count_rows, decompressed_size, unreadable
from rrfp_jax.data.tokens import FileDigest

PIECE_BYTES = 4 * SEGMENT_BYTES
_MOST_ROWS = 1 << 14  # of a piece: a column that repeats itself is larger than its file says
_MARK, _PIECES = "work.json", "pieces"
_MARK_TEXT = '{"format": "unfinished rrfp-jax token set", "version": 1}\n'
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""Errors of file systems without locks: Lustre that is mounted without ``flock``, and some of FUSE."""
_VERSION = 4  # part of the names of pieces, so that those of another version are made anew


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
    counted: NDArray[np.bool_] | None = None
    """Whether each token of a chat counts in the loss. None: all do."""


# ------------------------------------------------------------------------------------------------------------- cutting


def survey(
    sources: Sequence[Source], column: str, num_threads: int, add_bytes: Callable[[int], None], *, is_chat: bool = False
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
            length, num_bytes = count_rows(source.path, column, is_chat=is_chat)
        elif source.compression is not None:
            length = num_bytes = decompressed_size(source.path, source.compression)
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
    groups: list[list[tuple[TextSpan, int, int]]] = []  # spans, the numbers of their sources, and their bytes
    num_group_bytes = 0
    for number, (source, _, length, num_source_bytes, _) in enumerate(surveyed):
        size = PIECE_BYTES
        if source.kind == ROWS:
            size = max(1, min(_MOST_ROWS, PIECE_BYTES * length // max(num_source_bytes, 1)))
        for start in range(0, max(length, 1), size):
            stop = min(start + size, length)
            num_bytes = num_source_bytes * (stop - start) // max(length, 1)
            if not groups or num_group_bytes + num_bytes > PIECE_BYTES:
                groups.append([])
                num_group_bytes = 0
            groups[-1].append((TextSpan(source, start, stop, length), number, num_bytes))
            num_group_bytes += num_bytes
    pieces = []
    for group in groups:
        content = [
            (surveyed[number].digest.sha256, span.source.kind, span.source.compression, span.start, span.stop)
            for span, number, _ in group
        ]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
        spans, numbers, sizes = zip(*group, strict=True)
        pieces.append(TextPiece(spans, numbers, sum(sizes), key))
    return pieces


# ------------------------------------------------------------------------------------------------------------- keeping


@contextmanager
def work_folder(out: Path) -> Iterator[Path]:
    """Makes and locks the work folder of the token set ``out`` for the block, which gets its path; removes it after
    the block, but after an error only if it keeps nothing.

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
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def try_lock(file: IO[str], remedy: str) -> bool:
    """Lock an open file unless another process holds the lock; returns whether this process has locked it.

    Raises ValueError, ending with the remedy, if the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise ValueError(
            f"the file system of {file.name} has no file locks ({error.strerror}), which keep two processes from "
            f"writing there at once: {remedy}"
        ) from None
    return True


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

    def write(self, key: str, blocks: Iterable[TokenBlock]) -> None:
        """Keeps a piece, whose blocks are written as they come."""
        target = self.path_of(key)
        temporary = target.with_suffix(f".{secrets.token_hex(4)}.part")
        try:
            with ZipFile(temporary, "w") as file:
                for number, (tokens, ends, span, counted) in enumerate(blocks):
                    file.writestr(f"{number}/{span}/tokens", tokens.astype(self._dtype).tobytes())
                    file.writestr(f"{number}/{span}/ends", ends.astype("<i8").tobytes())
                    if counted is not None:
                        file.writestr(f"{number}/{span}/counted", counted.tobytes())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def read(self, key: str) -> Iterator[TokenBlock]:
        """Yields the blocks of a kept piece; raises DamagedPiece, at any of them, if the piece is not whole."""
        try:
            with ZipFile(self.path_of(key)) as file:  # which compares checksums
                names = file.namelist()
                for block in (name.removesuffix("tokens") for name in names if name.endswith("tokens")):
                    tokens = np.frombuffer(file.read(f"{block}tokens"), self._dtype)
                    ends = np.frombuffer(file.read(f"{block}ends"), "<i8")
                    has_counted = f"{block}counted" in names
                    counted = np.frombuffer(file.read(f"{block}counted"), bool) if has_counted else None
                    yield TokenBlock(tokens, ends, int(block.split("/")[1]), counted)
        except (OSError, EOFError, ValueError, KeyError, RuntimeError, BadZipFile):
            raise DamagedPiece(f"{self.path_of(key)} is not whole") from None

    def holds(self, key: str) -> bool:
        """Returns whether a piece is kept, and whole."""
        try:
            for _ in self.read(key):
                pass
        except DamagedPiece:
            return False
        return True
