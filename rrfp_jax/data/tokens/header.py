"""The format of a token set, and its header: the files, the tokenizer that made the tokens, and the sources.

A token set is a folder::

    header.json      this record; written last, so a folder that has one is whole
    tokens.bin       the tokens of all documents, one after the other, little-endian uint16 or uint32; each document is
                     closed by the end-of-document token
    documents.bin    the end of each document in tokens.bin, counted in tokens, behind its closing token: little-endian
                     uint64, in ascending order
    tokenizer.json   the tokenizer, as the ``tokenizers`` library reads it; missing if tokens are plain bytes
    sources.jsonl    the files that the set was made of, a line for each: name, bytes, SHA-256, number of documents

Nothing in it depends on the machine, the time or the number of processes that made it.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rrfp_jax.bounded_text import shown
from rrfp_jax.record_files import TEXT_BYTES, parse_json, read_record
from rrfp_jax.records import MalformedRecord, from_plain, to_plain

_FORMAT, _VERSION = "rrfp-jax token set", 1
HEADER, TOKENS, DOCUMENTS = "header.json", "tokens.bin", "documents.bin"
TOKENIZER, SOURCES = "tokenizer.json", "sources.jsonl"
END_BYTES = 8
"""Bytes of one entry of documents.bin."""
_DTYPES = {"uint16": 2**16, "uint32": 2**32}  # dtypes of stored tokens, with the largest vocabulary of each
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class FileDigest:
    """Size and SHA-256 of one file of the set, or of a source."""

    num_bytes: int
    sha256: str

    @staticmethod
    def of(data: bytes) -> "FileDigest":
        """Returns the digest of a file with these bytes."""
        return FileDigest(len(data), hashlib.sha256(data).hexdigest())

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
    """The field of JSON lines and Parquet rows that held the text; None: the sources were plain text."""
    num_unknown: int | None = None
    """Number of tokens that stand for text that the tokenizer does not know. None: the set does not say, mostly because
    there are none."""

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
        if self.vocab_size > _DTYPES[self.dtype]:
            raise ValueError(f"vocab_size is {self.vocab_size}, more than {self.dtype} can hold")
        if not 0 <= self.end_of_document < self.vocab_size:
            raise ValueError(f"end_of_document is {self.end_of_document}, outside the vocabulary of {self.vocab_size}")
        for name, digest, num_bytes in (
            (TOKENS, self.tokens, self.num_tokens * self.token_bytes),
            (DOCUMENTS, self.documents, self.num_documents * END_BYTES),
        ):
            if digest.num_bytes != num_bytes:
                raise ValueError(f"{name} has {digest.num_bytes} bytes where {num_bytes} are expected")

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

    @property
    def token_bytes(self) -> int:
        """Bytes of a stored token."""
        return np.dtype(self.dtype).itemsize

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The dtype of tokens in the file."""
        return np.dtype(self.dtype).newbyteorder("<")


def dtype_for(vocab_size: int) -> str:
    """Returns the smallest dtype that holds a vocabulary of this size; raises ValueError if none does."""
    if vocab_size > _DTYPES["uint32"]:
        raise ValueError(f"a vocabulary of {vocab_size} tokens is more than a token set can hold")
    return "uint16" if vocab_size <= _DTYPES["uint16"] else "uint32"


def header_bytes(header: TokenSetHeader) -> bytes:
    """Returns header.json, the same bytes for the same header."""
    plain = {"format": _FORMAT, "version": _VERSION, **to_plain(header)}
    if header.num_unknown is None:  # as in earlier versions, so that equal tokens have equal digests
        del plain["num_unknown"]
    return (json.dumps(plain, indent=2) + "\n").encode()


def read_header(folder: Path) -> tuple[TokenSetHeader, str]:
    """Returns the header of the set in ``folder`` and the SHA-256 of header.json.

    Raises ValueError, in one sentence with the file and the remedy, if there is none or it cannot be understood.
    """
    path = folder / HEADER
    if not folder.is_dir():
        raise ValueError(f"token set {folder} does not exist: write it with rrfp tokenize, or name another folder")
    try:
        data, _ = read_record(path, TEXT_BYTES)
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
        version = plain.pop("version", None)
        if version != _VERSION:
            raise _OtherVersion(
                f"{path} is of version {shown(version)}, and this program reads version {_VERSION}: write the token "
                "set anew with rrfp tokenize, or take the version of the program that wrote it"
            )
        return from_plain(TokenSetHeader, {"num_unknown": None} | plain), hashlib.sha256(data).hexdigest()
    except _OtherVersion as error:
        raise ValueError(str(error)) from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): write the token set anew with rrfp tokenize") from None


class _OtherVersion(ValueError):
    """Raised for a header that another version of this program wrote."""


IS_LITTLE_ENDIAN = sys.byteorder == "little"
"""Whether tokens lie in the file as this machine holds them."""
