"""Reads a token set: any range of its tokens, and the documents in it, without holding either file.

Ranges are read when they are asked for, not mapped: pages of a mapped file count as the process's memory once they are
touched, and a file that somebody cuts short meanwhile would end the process instead of raising an error.
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.dataset import BrokenData
from rrfp_jax.data.tokens.header import (
    DOCUMENTS,
    END_BYTES,
    IS_LITTLE_ENDIAN,
    SOURCES,
    TOKENIZER,
    TOKENS,
    FileDigest,
    read_header,
)

_ANEW = "write the token set anew with rrfp tokenize"
_NUM_KEPT = 4096  # ends, evenly apart, that are read at first use and kept
_BLOCK_ENDS = 4096  # ends that one read brings; a longer stretch is halved first


class TokenSet:
    """The tokens of many documents, in files; safe to use from any thread.

    Attributes: ``path``; ``header`` (see :class:`TokenSetHeader`); ``fingerprint``, the whole set in a few words, the
    same wherever it lies. Files are open until :meth:`close`, or the end of the object.

    Raises ValueError, in one sentence with the file and the remedy, if there is no token set at ``path``, or if a file
    is missing, cut short, of another version, or not the one that the header describes. Damage that only reading can
    show, such as a token outside the vocabulary, is raised as :class:`BrokenData` when it is read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()
        self.header, digest = read_header(self.path)
        self.fingerprint = f"{self.num_tokens} tokens, SHA-256 {digest[:16]}"
        self._check_tokenizer()
        self._tokens = _SizedFile(self.path / TOKENS, self.header.tokens.num_bytes)
        self._ends = _SizedFile(self.path / DOCUMENTS, self.header.documents.num_bytes)
        self._index = _DocumentIndex(self._ends.read, self.num_documents)
        self._check_last_end()

    def close(self) -> None:
        """Closes the files; further reads fail."""
        self._tokens.close()
        self._ends.close()

    def __enter__(self) -> "TokenSet":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_tokens(self) -> int:
        """The number of all tokens, with those that close documents."""
        return self.header.num_tokens

    @property
    def num_documents(self) -> int:
        """The number of all documents."""
        return self.header.num_documents

    @property
    def vocab_size(self) -> int:
        """Every token is less than this."""
        return self.header.vocab_size

    @property
    def end_of_document(self) -> int:
        """The token that closes every document."""
        return self.header.end_of_document

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Returns tokens ``start`` to ``stop - 1``, uint16 or uint32; raises IndexError outside the set."""
        return self.windows(np.array([start]), stop - start)[0]

    def windows(self, starts: NDArray[np.integer], length: int) -> NDArray[Any]:
        """Returns ``length`` tokens from each start, uint16 or uint32 ``[starts, length]``.

        Raises IndexError outside the set, and BrokenData for tokens outside the vocabulary.
        """
        if length < 0 or (len(starts) and not 0 <= int(starts.min()) <= int(starts.max()) <= self.num_tokens - length):
            raise IndexError(f"{self.path} has {self.num_tokens} tokens, not all of which were asked for")
        rows = np.empty((len(starts), length), self.header.stored_dtype)
        for row, start in zip(rows.view(np.uint8), starts.tolist(), strict=True):
            self._tokens.read_into(memoryview(row), start * self.header.token_bytes)
        if rows.size and int(rows.max()) >= self.vocab_size:
            row, column = (int(numbers[0]) for numbers in np.nonzero(rows >= self.vocab_size))
            raise BrokenData(
                f"{self.path / TOKENS} is damaged (token {rows[row, column]} at {int(starts[row]) + column}, in a "
                f"vocabulary of {self.vocab_size}): {_ANEW}"
            )
        return rows if IS_LITTLE_ENDIAN else rows.astype(self.header.dtype)

    def document(self, number: int) -> tuple[int, int]:
        """Returns begin and end of document ``number`` (0, 1, ...) in tokens, with the one that closes it."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"{self.path} has {self.num_documents} documents, and no number {number}")
        ends = self._index.ends(max(number - 1, 0), number + 1)
        self._check_ascending(ends)
        start, *rest = ends.tolist()
        return (start, rest[0]) if rest else (0, start)

    def document_ends(self, first: int, stop: int) -> NDArray[np.int64]:
        """Returns the ends of documents ``first`` to ``stop - 1``, behind the tokens that close them, int64.

        Raises IndexError for documents outside the set, BrokenData if ends do not ascend.
        """
        if not 0 <= first <= stop <= self.num_documents:
            raise IndexError(f"{self.path} has {self.num_documents} documents, and not {first} to {stop}")
        ends = self._index.ends(first, stop)
        self._check_ascending(ends)
        return ends

    def _check_ascending(self, ends: NDArray[np.int64]) -> None:
        if not (ends[1:] > ends[:-1]).all() or (len(ends) and not 0 < ends[0] <= ends[-1] <= self.num_tokens):
            raise BrokenData(f"{self.path / DOCUMENTS} is damaged (ends that do not ascend): {_ANEW}")

    def document_at(self, position: int) -> int:
        """Returns the number of the document that holds the token at ``position``."""
        if not 0 <= position < self.num_tokens:
            raise IndexError(f"{self.path} has {self.num_tokens} tokens, and none at {position}")
        return self._index.at(position)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Returns the text of some tokens, for people: special tokens are shown, broken characters replaced."""
        if self._tokenizer is None:
            return bytes(np.asarray(ids, np.uint8)).decode("utf-8", errors="replace")
        return self._tokenizer.decode([int(each) for each in ids], skip_special_tokens=False)

    @cached_property
    def _tokenizer(self) -> Any:
        if self.header.tokenizer.sha256 is None:
            return None
        from rrfp_jax.data.tokenizer_files import load

        return load((self.path / TOKENIZER).read_bytes(), str(self.path / TOKENIZER))

    def check(self) -> None:
        """Reads all files and compares them with the header's digests; raises BrokenData for the first that differs."""
        expected = {TOKENS: self.header.tokens, DOCUMENTS: self.header.documents, SOURCES: self.header.sources}
        for name, digest in expected.items():
            if digest is not None and _digest(self.path / name) != digest:
                raise BrokenData(f"{self.path / name} is damaged (its SHA-256 is not the header's): {_ANEW}")

    def _check_tokenizer(self) -> None:
        path, expected = self.path / TOKENIZER, self.header.tokenizer.sha256
        if expected is None:
            if path.exists():
                raise ValueError(f"{path} is not of this token set, whose tokens are bytes: remove it, or {_ANEW}")
            return
        if not path.is_file():
            raise ValueError(f"{path} is missing: put the tokenizer of this token set there, or {_ANEW}")
        if _digest(path).sha256 != expected:
            raise ValueError(
                f"{path} is another tokenizer than the one that made the tokens: put that one there (SHA-256 "
                f"{expected[:16]}...), or {_ANEW}"
            )

    def _check_last_end(self) -> None:
        last = int(self._index.ends(self.num_documents - 1, self.num_documents)[0]) if self.num_documents else 0
        if last != self.num_tokens:
            raise ValueError(
                f"{self.path / DOCUMENTS} is damaged (the last document ends at {last} of {self.num_tokens} tokens): "
                f"{_ANEW}"
            )


class _DocumentIndex:
    """The ends of ``num_documents`` documents, ascending, int64, in a file that is never read whole.

    Some thousand ends, evenly apart, are kept; they bound a binary search to one block of neighbours, which one read
    brings. Safe to use from any thread; ``read`` returns the bytes of the file from one offset to another.
    """

    def __init__(self, read: Callable[[int, int], bytes], num_documents: int) -> None:
        self._read, self._num_documents = read, num_documents
        self._stride = max(1, -(-num_documents // _NUM_KEPT))
        self._kept: NDArray[np.int64] | None = None
        self._lock = threading.Lock()

    def ends(self, first: int, stop: int) -> NDArray[np.int64]:
        """Returns the ends of documents ``first`` to ``stop - 1``."""
        return np.frombuffer(self._read(first * END_BYTES, stop * END_BYTES), "<u8").astype(np.int64)

    def at(self, position: int) -> int:
        """Returns the number of ends that are not behind ``position``: of the document that holds the token there."""
        kept = self._kept_ends()
        low = int(np.searchsorted(kept, position, side="right")) * self._stride
        # Entry low - 1 is kept and at most ``position``; entry low + stride - 1, if any, is larger.
        high = min(low + self._stride, self._num_documents)
        while high - low > _BLOCK_ENDS:
            middle = (low + high) // 2
            if self.ends(middle, middle + 1)[0] <= position:
                low = middle + 1
            else:
                high = middle
        return low + int(np.searchsorted(self.ends(low, high), position, side="right"))

    def _kept_ends(self) -> NDArray[np.int64]:
        """Returns the last end of every full stretch of ``stride``."""
        with self._lock:
            if self._kept is None:
                stride = self._stride
                if stride == 1:
                    self._kept = self.ends(0, self._num_documents)
                else:
                    numbers = range(stride - 1, self._num_documents, stride)
                    self._kept = np.array([self.ends(n, n + 1)[0] for n in numbers], np.int64)
            return self._kept


class _SizedFile:
    """A file of known size, read at any place by any thread."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(f"cannot read {path} ({error.strerror}): {_ANEW}") from None
        self.close = weakref.finalize(self, os.close, self._descriptor)
        found = os.fstat(self._descriptor).st_size
        if found != num_bytes:
            raise ValueError(f"{path} is damaged ({found} bytes where its header says {num_bytes}): {_ANEW}")

    def read(self, start: int, stop: int) -> bytes:
        data = bytearray(stop - start)
        self.read_into(memoryview(data), start)
        return bytes(data)

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fills ``target``, a view of bytes."""
        if not self.close.alive:
            raise ValueError(f"{self._path} was closed: open the token set anew")
        while target:
            try:
                num_read = os.preadv(self._descriptor, [target], offset)
            except OSError as error:
                raise BrokenData(f"cannot read {self._path} ({error.strerror}): mend its file system") from error
            if num_read == 0:
                raise BrokenData(f"{self._path} has become shorter while it was read: {_ANEW}")
            target, offset = target[num_read:], offset + num_read


def _digest(path: Path) -> FileDigest:
    try:
        return FileDigest.of_file(path)
    except OSError as error:
        raise BrokenData(f"cannot read {path} ({error.strerror}): {_ANEW}") from None
