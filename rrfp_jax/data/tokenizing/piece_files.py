"""The work folder of an unfinished token set: pieces that are done, each a file that is there whole or not at all.

A file is named by what it was made of and how, so a piece of the same text is found again by whoever needs it, and one
of another text, tokenizer or option never is. Its checksum is compared before it is used again.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_MARK, _PIECES = "work.json", "pieces"
_MARK_TEXT = '{"format": "unfinished rrfp-jax token set", "version": 1}\n'
_VERSION = 2
"""Of the pieces: part of their names, so that those of another version are made anew."""


class TokenPiece(NamedTuple):
    """The tokens of a piece."""

    tokens: NDArray[Any]
    """``[tokens]``, those that close documents included."""
    ends: NDArray[np.int64]
    """Where documents end in them, ``[documents]``; behind the last may come the beginning of another."""
    documents: tuple[int, ...]
    """How many documents end in each span of the piece."""


@contextmanager
def work_folder(out: Path) -> Iterator[Path]:
    """The work folder of the token set ``out``, made if missing, locked against others until the block is left.

    Raises ValueError, with the remedy, where something else stands there, or another process works in it.
    """
    folder = out.with_name(f"{out.name}.unfinished")
    mark = folder / _MARK
    folder.mkdir(parents=True, exist_ok=True)
    if not mark.is_file():
        if any(folder.iterdir()):
            raise ValueError(f"{folder} is no unfinished token set: move it away, or name another --out")
        mark.write_text(_MARK_TEXT)
    with mark.open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is writing {out}: wait for it, or name another --out") from None
        (folder / _PIECES).mkdir(exist_ok=True)
        try:
            yield folder
        except BaseException:
            kept = {path.name for path in folder.rglob("*")} - {_MARK, _PIECES}
            if not kept:  # there is nothing to go on with
                remove_work_folder(folder)
            raise


def remove_work_folder(folder: Path) -> None:
    """Take away all that was kept."""
    shutil.rmtree(folder, ignore_errors=True)


class PieceFiles:
    """The pieces of one way to tokenise, ``settings``, in a work folder."""

    def __init__(self, folder: Path, settings: Any, dtype: str) -> None:
        self._folder = folder / _PIECES
        self._settings = json.dumps([_VERSION, settings, dtype])
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def path_of(self, key: str) -> Path:
        """The file of a piece."""
        digest = hashlib.sha256(f"{self._settings}\n{key}".encode()).hexdigest()[:32]
        return self._folder / f"{digest}.piece"

    def write(self, key: str, piece: TokenPiece) -> None:
        """Keep a piece."""
        payload = piece.tokens.astype(self._dtype).tobytes() + piece.ends.astype("<i8").tobytes()
        head = [len(piece.tokens), len(piece.ends), list(piece.documents), zlib.crc32(payload)]
        target = self.path_of(key)
        temporary = target.with_suffix(f".{secrets.token_hex(4)}.part")
        try:
            temporary.write_bytes(json.dumps(head).encode() + b"\n" + payload)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def read(self, key: str) -> TokenPiece | None:
        """A piece that is kept; None where it is not, or is damaged."""
        with suppress(OSError, ValueError, TypeError):
            head, _, payload = self.path_of(key).read_bytes().partition(b"\n")
            num_tokens, num_ends, documents, checksum = json.loads(head)
            num_token_bytes = num_tokens * self._dtype.itemsize
            if zlib.crc32(payload) == checksum and len(payload) == num_token_bytes + 8 * num_ends:
                tokens = np.frombuffer(payload, self._dtype, num_tokens)
                ends = np.frombuffer(payload, "<i8", num_ends, num_token_bytes)
                return TokenPiece(tokens, ends, tuple(documents))
        return None
