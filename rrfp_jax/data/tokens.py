"""Token sets: the tokens of many documents in files, written once and read where they are needed.

A token set is a folder::

    header.json      a :class:`TokenSetHeader`; written last, so a folder that has one is whole
    tokens.bin       the tokens of all documents, one after the other, little-endian uint16 or uint32; each document is
                     closed by the end-of-document token
    documents.bin    the end of each document in tokens.bin, counted in tokens, behind its closing token: little-endian
                     uint64, in ascending order
    counted.bin      of chats: a bit for each token, the lowest of a byte first, set where the token is the assistant's
                     and counts in the loss; missing if all tokens count
    tokenizer.json   the tokenizer, as the ``tokenizers`` library reads it; missing if tokens are plain bytes
    sources.jsonl    the files that the set was made of, a line for each: name, bytes, SHA-256, number of documents

Nothing in it depends on the machine, the time or the number of processes that made it.

Ranges are read when they are asked for, not mapped: pages of a mapped file count as the process's memory once they are
touched, and a file that somebody cuts short meanwhile would end the process instead of raising an error.
"""

import hashlib
import json
import os
import secrets
import shutil
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.dataset import BrokenData
from rrfp_jax.readable import shown
from rrfp_jax.record_files import TEXT_BYTES, parse_json
from rrfp_jax.records import MalformedRecord, from_plain, to_plain
from rrfp_jax.storage import BucketPath, located, read_stored, temporary_folder

_FORMAT = "rrfp-jax token set"
_VERSION, _CHAT_VERSION = 1, 2  # a program that does not know which tokens count must not read those of chats
HEADER, TOKENIZER = "header.json", "tokenizer.json"
_TOKENS, _DOCUMENTS, _SOURCES, _COUNTED = "tokens.bin", "documents.bin", "sources.jsonl", "counted.bin"
_LATER_FIELDS = ("num_unknown", "counted", "num_counted")  # of the header; those that are None are left out
_END_BYTES = 8  # of one entry of documents.bin
_DTYPES = {"uint16": 2**16, "uint32": 2**32}  # dtypes of stored tokens, with the largest vocabulary of each
_BLOCK_BYTES = 1 << 22
_ANEW = "write the token set anew with rrfp tokenize"


@dataclass(frozen=True)
class FileDigest:
    """Size and SHA-256 of one file of the set, or of a source."""

    num_bytes: int
    sha256: str

    @staticmethod
    def of_file(path: Path, add_bytes: Callable[[int], None] = lambda _: None) -> "FileDigest":
        """Returns the digest of a file, read in blocks; ``add_bytes`` gets the size of each. Raises OSError."""
        digest, num_bytes = hashlib.sha256(), 0
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                num_bytes += len(block)
                add_bytes(len(block))
        return FileDigest(num_bytes, digest.hexdigest())


@dataclass(frozen=True, kw_only=True)
class TokenizerName:
    """The tokenizer that made the tokens."""

    name: str
    """A name for people; ``bytes`` if tokens are the bytes of the text."""
    sha256: str | None
    """The digest of tokenizer.json. None: there is none, tokens are bytes."""


BYTE_TOKENIZER = TokenizerName(name="bytes", sha256=None)
"""Tokens are the bytes of UTF-8 text, and the zero byte ends a document."""


@dataclass(frozen=True, kw_only=True)
class TokenSetHeader:
    """The content of header.json; raises ValueError if the numbers contradict each other."""

    dtype: str
    """``uint16`` or ``uint32``, little-endian."""
    num_tokens: int
    """Tokens of all documents, with those that close them."""
    num_documents: int
    vocab_size: int
    """Every token is less than this."""
    end_of_document: int
    """The token that closes every document."""
    tokenizer: TokenizerName
    tokens: FileDigest
    """Digest of tokens.bin."""
    documents: FileDigest
    """Digest of documents.bin."""
    sources: FileDigest | None
    """Digest of sources.jsonl. None: the tokens did not come from files."""
    text_column: str | None
    """The field of JSON lines and Parquet rows that held the text or the messages. None: the sources were plain
    text."""
    num_unknown: int | None = None
    """Number of tokens that stand for text that the tokenizer does not know. None: the set does not say, mostly because
    there are none."""
    counted: FileDigest | None = None
    """Digest of counted.bin. None: all tokens count in the loss."""
    num_counted: int | None = None
    """Number of tokens that count in the loss. None: all do."""

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.dtype!r} where one of {', '.join(_DTYPES)} is expected")
        for name, number, least in (
            ("num_tokens", self.num_tokens, self.num_documents),
            ("num_documents", self.num_documents, 0),
            ("vocab_size", self.vocab_size, 1),
        ):
            if number < least:
                raise ValueError(f"{name} is {number} where at least {least} is expected")
        if self.num_unknown is not None and not 0 < self.num_unknown <= self.num_tokens:
            raise ValueError(f"num_unknown is {self.num_unknown}, and there are {self.num_tokens} tokens")
        if (self.counted is None) != (self.num_counted is None) or (self.num_counted or 0) > self.num_tokens:
            raise ValueError(f"num_counted is {self.num_counted}, and there are {self.num_tokens} tokens")
        if self.vocab_size > _DTYPES[self.dtype]:
            raise ValueError(f"vocab_size is {self.vocab_size}, more than {self.dtype} can hold")
        if not 0 <= self.end_of_document < self.vocab_size:
            raise ValueError(f"end_of_document is {self.end_of_document}, outside the vocabulary of {self.vocab_size}")
        for name, digest, num_bytes in (
            (_TOKENS, self.tokens, self.num_tokens * np.dtype(self.dtype).itemsize),
            (_DOCUMENTS, self.documents, self.num_documents * _END_BYTES),
            (_COUNTED, self.counted, -(-self.num_tokens // 8)),
        ):
            if digest is not None and digest.num_bytes != num_bytes:
                raise ValueError(f"{name} has {digest.num_bytes} bytes where {num_bytes} are expected")

    @property
    def counted_note(self) -> str | None:
        """A sentence about how many tokens are the assistant's. None: all tokens count."""
        if self.num_counted is None:
            return None
        share = self.num_counted / max(self.num_tokens, 1)
        return (
            f"{self.num_counted:,} tokens ({share:.2%}) are of the assistant's turns, and these alone count in the loss"
        )

    @property
    def unknown_note(self) -> str | None:
        """A sentence about how much of the text the tokenizer does not know. None: it knows all of it."""
        if self.num_unknown is None:
            return None
        share = self.num_unknown / max(self.num_tokens - self.num_documents, 1)
        return (
            f"{self.num_unknown:,} tokens ({share:.2%}) stand for what the tokenizer does not know: take one for any "
            "character where that is too much"
        )


def megatron_prefix(path: str | os.PathLike[str]) -> Path | None:
    """Returns the path without ``.bin`` or ``.idx`` where it names the two token files of Megatron-LM; else None."""
    given = located(path).expanduser()
    if isinstance(given, BucketPath):
        return None
    if given.suffix in (".bin", ".idx") and not given.is_dir():
        return given.with_suffix("")
    return given if Path(f"{given}.idx").is_file() and not given.is_dir() else None


def read_header(folder: Path) -> tuple[TokenSetHeader, str]:
    """Returns the header of the set in ``folder`` and the SHA-256 of header.json.

    Raises ValueError, in one sentence with the file and the remedy, if there is none or it cannot be understood.
    """
    folder = located(folder)
    path = folder / HEADER
    if not folder.is_dir():
        raise ValueError(f"token set {folder} does not exist: write it with rrfp tokenize, or name another folder")
    try:
        data, _ = read_stored(path, TEXT_BYTES)
    except FileNotFoundError:
        raise ValueError(
            f"{folder} is no token set, for it has no {HEADER}: name a folder that rrfp tokenize has written"
        ) from None
    except OSError as error:
        raise ValueError(
            f"cannot read {path} ({error.strerror}): make it readable, or name another token set"
        ) from None
    try:
        plain = parse_json(data)
        if not isinstance(plain, dict) or plain.pop("format", None) != _FORMAT:
            raise MalformedRecord(f"it does not say {_FORMAT!r}")
        if (version := plain.pop("version", None)) in (_VERSION, _CHAT_VERSION):
            return from_plain(TokenSetHeader, dict.fromkeys(_LATER_FIELDS) | plain), hashlib.sha256(data).hexdigest()
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): {_ANEW}") from None
    raise ValueError(
        f"{path} is of version {shown(version)}, and this program reads {_VERSION} and {_CHAT_VERSION}: {_ANEW}, or "
        "take the version of the program that wrote it"
    )


# ------------------------------------------------------------------------------------------------------------- reading


class TokenSet(AbstractContextManager["TokenSet"]):
    """The tokens of many documents, in files; safe to use from any thread.

    Attributes: ``path``; ``header`` (see :class:`TokenSetHeader`); ``num_tokens``, those that close documents included;
    ``num_documents``; ``fingerprint``, the whole set in a few words, the same wherever it lies; ``notes``, sentences
    about its tokens. Files are open until :meth:`close`, or the end of the object.

    Raises ValueError, in one sentence with the file and the remedy, if there is no token set at ``path``, or if a file
    is missing, cut short, of another version, or not the one that the header describes. Damage that only reading can
    show, such as a token outside the vocabulary, is raised as :class:`BrokenData` when it is read.
    """

    remedy = "write the token set anew with rrfp tokenize"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = located(path).expanduser()
        self._tokenizer_file = self.path / TOKENIZER
        self.header, digest = read_header(self.path)
        self.num_tokens, self.num_documents = self.header.num_tokens, self.header.num_documents
        self.fingerprint = f"{self.num_tokens} tokens, SHA-256 {digest[:16]}"
        self.notes = [note for note in (self.header.unknown_note, self.header.counted_note) if note is not None]
        self._check_tokenizer()
        self._tokens = SizedFile(self.path / _TOKENS, self.header.tokens.num_bytes)
        self._ends = SizedFile(self.path / _DOCUMENTS, self.header.documents.num_bytes)
        counted = self.header.counted
        self._counted = None if counted is None else SizedFile(self.path / _COUNTED, counted.num_bytes)
        last = int(self.document_ends(self.num_documents - 1, self.num_documents)[0]) if self.num_documents else 0
        if last != self.num_tokens:
            raise ValueError(
                f"{self.path / _DOCUMENTS} is damaged (the last document ends at {last} of {self.num_tokens} tokens): "
                f"{_ANEW}"
            )

    def close(self) -> None:
        """Closes the files; further reads fail."""
        self._tokens.close()
        self._ends.close()
        if self._counted is not None:
            self._counted.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Returns tokens ``start`` to ``stop - 1``, uint16 or uint32; raises IndexError outside the set."""
        return self.windows(np.array([start]), stop - start)[0]

    def windows(self, starts: NDArray[np.integer], length: int) -> NDArray[Any]:
        """Returns ``length`` tokens from each start, uint16 or uint32 ``[starts, length]``.

        Raises IndexError outside the set, and BrokenData for tokens outside the vocabulary.
        """
        if length < 0 or (len(starts) and not 0 <= int(starts.min()) <= int(starts.max()) <= self.num_tokens - length):
            raise IndexError(f"{self.path} has {self.num_tokens} tokens, not all of which were asked for")
        rows = np.empty((len(starts), length), np.dtype(self.header.dtype).newbyteorder("<"))
        for row, start in zip(rows.view(np.uint8), starts.tolist(), strict=True):
            self._tokens.read_into(memoryview(row), start * rows.itemsize)
        if rows.size and int(rows.max()) >= self.header.vocab_size:
            row, column = (int(numbers[0]) for numbers in np.nonzero(rows >= self.header.vocab_size))
            raise BrokenData(
                f"{self._tokens.path} is damaged (token {rows[row, column]} at {int(starts[row]) + column}, in a "
                f"vocabulary of {self.header.vocab_size}): {self.remedy}"
            )
        return rows.astype(self.header.dtype, copy=False)

    def counted(self, starts: NDArray[np.integer], length: int) -> NDArray[np.bool_]:
        """Returns whether each of ``length`` tokens from each start counts in the loss, ``[starts, length]``.

        Places behind the end of a set of chats do not. Raises IndexError for a start outside it.
        """
        if self._counted is None:
            return np.ones((len(starts), length), bool)
        if len(starts) and not 0 <= int(starts.min()) <= int(starts.max()) <= self.num_tokens:
            raise IndexError(f"{self.path} has {self.num_tokens} tokens, not all of which were asked for")
        num_bytes, found = -(-self.num_tokens // 8), np.zeros((len(starts), length), bool)
        for row, start in zip(found, starts.tolist(), strict=True):
            first = start // 8
            stored = bytearray(min(-(-(start + length) // 8), num_bytes) - first)
            self._counted.read_into(memoryview(stored), first)
            bits = np.unpackbits(np.frombuffer(stored, np.uint8), bitorder="little")[start - 8 * first :][:length]
            row[: len(bits)] = bits
        return found

    def document(self, number: int) -> tuple[int, int]:
        """Returns begin and end of document ``number`` (0, 1, ...) in tokens, with the one that closes it."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"{self.path} has {self.num_documents} documents, and no number {number}")
        start, *rest = self.document_ends(max(number - 1, 0), number + 1).tolist()
        return (start, rest[0]) if rest else (0, start)

    def document_ends(self, first: int, stop: int) -> NDArray[np.int64]:
        """Returns the ends of documents ``first`` to ``stop - 1``, behind the tokens that close them, int64.

        Raises IndexError for documents outside the set, BrokenData if ends do not ascend.
        """
        if not 0 <= first <= stop <= self.num_documents:
            raise IndexError(f"{self.path} has {self.num_documents} documents, and not {first} to {stop}")
        stored = bytearray((stop - first) * _END_BYTES)
        self._ends.read_into(memoryview(stored), first * _END_BYTES)
        ends = np.frombuffer(stored, "<u8").astype(np.int64)
        if not (ends[1:] > ends[:-1]).all() or (len(ends) and not 0 < ends[0] <= ends[-1] <= self.num_tokens):
            raise BrokenData(f"{self.path / _DOCUMENTS} is damaged (ends that do not ascend): {_ANEW}")
        return ends

    def document_at(self, position: int) -> int:
        """Returns the number of the document that holds the token at ``position``."""
        if not 0 <= position < self.num_tokens:
            raise IndexError(f"{self.path} has {self.num_tokens} tokens, and none at {position}")
        # One read for each halving of the documents: the file is never read whole.
        numbers = range(self.num_documents)
        return bisect_right(numbers, position, key=lambda number: self.document_ends(number, number + 1)[0])

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

        return load(self._tokenizer_file.read_bytes(), str(self._tokenizer_file))

    def check(self) -> None:
        """Reads all files and compares them with the header's digests; raises BrokenData for the first that differs."""
        header = self.header
        expected = {_TOKENS: header.tokens, _DOCUMENTS: header.documents, _SOURCES: header.sources}
        expected[_COUNTED] = header.counted
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


class SizedFile:
    """A file of known size, read at any place by any thread. ``path`` is where it lies.

    Of one in an object store, blocks are copied to a file of this object, each when it is first read.
    """

    _remote: BucketPath | None = None

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        try:
            if isinstance(path, BucketPath):
                self._remote, found = path, path.stat().st_size
                self._descriptor = os.open(temporary_folder(self) / path.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            else:
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                found = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise ValueError(f"cannot read {path} ({error.strerror}): {_ANEW}") from None
        self.close = weakref.finalize(self, os.close, self._descriptor)
        if found != num_bytes:
            raise ValueError(f"{path} is damaged ({found} bytes where its header says {num_bytes}): {_ANEW}")
        self._num_bytes, self._blocks = num_bytes, set[int]()

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fills ``target``, a view of bytes."""
        if not self.close.alive:
            raise ValueError(f"{self.path} was closed: open the token set anew")
        while target:
            try:
                if self._remote is not None:
                    self._copy_blocks(self._remote, offset, offset + len(target))
                num_read = os.preadv(self._descriptor, [target], offset)
            except OSError as error:
                raise BrokenData(f"cannot read {self.path} ({error.strerror}): mend its file system") from error
            if num_read == 0:
                raise BrokenData(f"{self.path} has become shorter while it was read: {_ANEW}")
            target, offset = target[num_read:], offset + num_read

    def _copy_blocks(self, path: BucketPath, start: int, stop: int) -> None:
        for block in range(start // _BLOCK_BYTES, -(-min(stop, self._num_bytes) // _BLOCK_BYTES)):
            if block in self._blocks:
                continue
            # Two threads may both copy a block, which does no harm; none waits for another one's request.
            first = block * _BLOCK_BYTES
            data = path.read_range(first, min(first + _BLOCK_BYTES, self._num_bytes))
            while data:
                num_written = os.pwrite(self._descriptor, data, first)
                data, first = data[num_written:], first + num_written
            self._blocks.add(block)


def _digest(path: Path) -> FileDigest:
    try:
        return FileDigest.of_file(path)
    except OSError as error:
        raise BrokenData(f"cannot read {path} ({error.strerror}): {_ANEW}") from None


# ------------------------------------------------------------------------------------------------------------- writing


class TokenSetWriter(AbstractContextManager["TokenSetWriter"]):
    """Writes the files of a token set into a folder, which it makes; :meth:`finish` writes the header.

    Until then the folder is no token set. A caller that wants all or nothing renames it afterwards. An error in
    the ``with`` block removes the folder. ``is_chat``: not all tokens count in the loss.
    """

    def __init__(self, folder: Path, *, vocab_size: int, end_of_document: int, is_chat: bool = False) -> None:
        self._vocab_size, self._end_of_document = vocab_size, end_of_document
        self._dtype = token_dtype(vocab_size)
        folder.mkdir(parents=True)
        self._folder, self._num_tokens, self._num_documents = folder, 0, 0
        self.num_counted = 0 if is_chat else None
        self._left = np.zeros(0, bool)  # whether the last tokens count, which do not fill a byte yet
        # Digests are taken on the way, so that no file is read again.
        names = (_TOKENS, _DOCUMENTS, *([_COUNTED] if is_chat else []))
        self._files = {name: ((folder / name).open("wb"), hashlib.sha256()) for name in names}

    def append(self, tokens: NDArray[Any], ends: NDArray[np.integer], counted: NDArray[np.bool_] | None = None) -> None:
        """Appends tokens ``[tokens]``, closing ones included, and the ends of documents among them, ``[documents]``;
        of chats also whether each token counts in the loss.

        The last document may go on in the next call.
        """
        stored_ends = (ends.astype(np.int64) + self._num_tokens).astype("<u8")
        stored = tokens.astype(np.dtype(self._dtype).newbyteorder("<"), copy=False)
        self._write(_TOKENS, stored.tobytes())
        self._write(_DOCUMENTS, stored_ends.tobytes())
        self._num_tokens += len(tokens)
        self._num_documents += len(ends)
        if self.num_counted is not None:
            assert counted is not None, "tokens of a chat say whether they count"
            self.num_counted += int(np.count_nonzero(counted))
            bits = np.concatenate([self._left, counted])
            num_whole = len(bits) // 8 * 8
            self._write(_COUNTED, np.packbits(bits[:num_whole], bitorder="little").tobytes())
            self._left = bits[num_whole:]

    def _write(self, name: str, data: bytes) -> None:
        file, digest = self._files[name]
        file.write(data)
        digest.update(data)

    def finish(
        self,
        *,
        tokenizer: bytes | None = None,
        name: str | None = None,
        sources: bytes | None = None,
        text_column: str | None = None,
        num_unknown: int = 0,
    ) -> TokenSetHeader:
        """Closes the files, writes the header and returns it.

        ``tokenizer`` is tokenizer.json (None: tokens are bytes) and ``name`` its usual name; ``sources`` is
        sources.jsonl, ``text_column`` the field that held the text, ``num_unknown`` the number of tokens that stand for
        text that the tokenizer does not know.
        """
        made_by = BYTE_TOKENIZER
        if tokenizer is not None:
            made_by = TokenizerName(name=name or TOKENIZER, sha256=hashlib.sha256(tokenizer).hexdigest())
        if self.num_counted is not None:
            self._write(_COUNTED, np.packbits(self._left, bitorder="little").tobytes())
        digests = {each: FileDigest(file.tell(), digest.hexdigest()) for each, (file, digest) in self._files.items()}
        self._close()
        header = TokenSetHeader(
            dtype=self._dtype,
            num_tokens=self._num_tokens,
            num_documents=self._num_documents,
            vocab_size=self._vocab_size,
            end_of_document=self._end_of_document,
            tokenizer=made_by,
            tokens=digests[_TOKENS],
            documents=digests[_DOCUMENTS],
            sources=None if sources is None else FileDigest(len(sources), hashlib.sha256(sources).hexdigest()),
            text_column=text_column,
            num_unknown=num_unknown or None,
            counted=digests.get(_COUNTED),
            num_counted=self.num_counted,
        )
        for file_name, data in ((TOKENIZER, tokenizer), (_SOURCES, sources), (HEADER, _header_bytes(header))):
            if data is not None:
                (self._folder / file_name).write_bytes(data)
        return header

    def _close(self) -> None:
        for file, _ in self._files.values():
            file.close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close()
        if kind is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def token_dtype(vocab_size: int) -> str:
    """Returns the smallest dtype that holds a vocabulary of this size; raises ValueError if none does."""
    if vocab_size > _DTYPES["uint32"]:
        raise ValueError(f"a vocabulary of {vocab_size} tokens is more than a token set can hold")
    return "uint16" if vocab_size <= _DTYPES["uint16"] else "uint32"


def _header_bytes(header: TokenSetHeader) -> bytes:
    """Returns header.json, the same bytes for the same header."""
    plain = {"format": _FORMAT, "version": _VERSION if header.counted is None else _CHAT_VERSION, **to_plain(header)}
    for name in _LATER_FIELDS:  # as in earlier versions, so that equal tokens have equal digests
        if plain[name] is None:
            del plain[name]
    return (json.dumps(plain, indent=2) + "\n").encode()


def write_token_set(
    path: str | os.PathLike[str],
    documents: Iterable[Sequence[int] | NDArray[Any]],
    *,
    vocab_size: int = 256,
    end_of_document: int = 0,
    tokenizer: bytes | None = None,
) -> TokenSetHeader:
    """Writes documents, each given without its closing token, as a token set that is there whole or not at all.

    ``tokenizer`` is the tokenizer.json that they were made with (None: tokens are bytes). Raises ValueError if
    something stands at ``path``, or a token is outside the vocabulary.
    """
    target = Path(path)
    if os.path.lexists(target):
        raise ValueError(f"{target} exists: name another folder, or remove it")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    with TokenSetWriter(temporary, vocab_size=vocab_size, end_of_document=end_of_document) as writer:
        for number, document in enumerate(documents):
            ids = np.append(np.asarray(document, np.int64), end_of_document)
            if ids.min() < 0 or ids.max() >= vocab_size:
                raise ValueError(f"document {number} has tokens outside the vocabulary of {vocab_size}")
            writer.append(ids, np.array([len(ids)]))
        header = writer.finish(tokenizer=tokenizer)
        os.rename(temporary, target)
    return header
