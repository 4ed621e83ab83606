"""The work folder of an unfinished token set: pieces that are done, each a file that is there whole or not at all.

A file is named by what it was made of and how, so a piece of the same text is found again by whoever needs it, and one
of another text, tokenizer or option never is. Its checksum is compared before it is used again.
"""

import hashlib
import json
import os
import secrets
import shutil
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.file_locks import try_lock

_MARK, _PIECES = "work.json", "pieces"
_MARK_TEXT = '{"format": "unfinished rrfp-jax token set", "version": 1}\n'
_VERSION = 3
"""Of the pieces: part of their names, so that those of another version are made anew."""


class Damaged(ValueError):
    """A piece that is missing, or not as it was written."""


class TokenBlock(NamedTuple):
    """Some tokens of a span of a piece; a piece is a sequence of blocks, so that no process holds all of it."""

    tokens: NDArray[Any]
    """``[tokens]``, those that close documents included."""
    ends: NDArray[np.int64]
    """Where documents end in them, ``[documents]``; behind the last may come the beginning of another."""
    span: int
    """The number of the piece's span that the tokens belong to."""


_HEAD = struct.Struct("<QQQI")
"""Head of a block in a file: number of tokens, number of ends, span, and CRC-32 of the data behind it. A head without
tokens ends the file."""


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

    def write(self, key: str, blocks: Iterable[TokenBlock]) -> int:
        """Keep a piece, whose blocks are written as they come; returns the number of its tokens."""
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
        """Yields the blocks of a kept piece; raises Damaged, at any of them, if the piece is missing or not whole."""
        try:
            with self.path_of(key).open("rb") as file:
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
            raise Damaged(f"{self.path_of(key)} is not whole")

    def holds(self, key: str) -> bool:
        """Returns whether a piece is kept, and whole."""
        try:
            for _ in self.read(key):
                pass
        except Damaged:
            return False
        return True
