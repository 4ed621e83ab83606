"""Writes a token set: documents one after the other into files, their digests on the way, and the header last."""

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.tokens.header import (
    BYTE_TOKENIZER,
    DOCUMENTS,
    HEADER,
    SOURCES,
    TOKENIZER,
    TOKENS,
    FileDigest,
    TokenizerName,
    TokenSetHeader,
    dtype_for,
    header_bytes,
)


class TokenSetWriter:
    """Writes the files of a token set into a folder, which it makes; :meth:`finish` writes the header.

    Until then the folder is no token set. A caller that wants all or nothing renames it afterwards. An error in
    the ``with`` block removes the folder.
    """

    def __init__(self, folder: Path, *, vocab_size: int, end_of_document: int) -> None:
        self.vocab_size, self.end_of_document = vocab_size, end_of_document
        self.dtype = dtype_for(vocab_size)
        folder.mkdir(parents=True)
        self._folder, self._num_tokens, self._num_documents = folder, 0, 0
        self._tokens, self._ends = _DigestedFile(folder / TOKENS), _DigestedFile(folder / DOCUMENTS)

    def add(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Appends a document, given without the token that closes it; raises ValueError outside the vocabulary."""
        ids = np.append(np.asarray(tokens, np.int64), self.end_of_document)
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ValueError(f"document {self._num_documents} has tokens outside the vocabulary of {self.vocab_size}")
        self.append(ids, np.array([len(ids)]))

    def append(self, tokens: NDArray[Any], ends: NDArray[np.integer]) -> None:
        """Appends tokens ``[tokens]``, closing ones included, and the ends of documents among them, ``[documents]``.

        The last document may go on in the next call.
        """
        self._ends.write((ends.astype(np.int64) + self._num_tokens).astype("<u8").tobytes())
        self._tokens.write(tokens.astype(np.dtype(self.dtype).newbyteorder("<"), copy=False).tobytes())
        self._num_tokens += len(tokens)
        self._num_documents += len(ends)

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
        header = TokenSetHeader(
            dtype=self.dtype,
            num_tokens=self._num_tokens,
            num_documents=self._num_documents,
            vocab_size=self.vocab_size,
            end_of_document=self.end_of_document,
            tokenizer=made_by,
            tokens=self._tokens.close(),
            documents=self._ends.close(),
            sources=None if sources is None else FileDigest.of(sources),
            text_column=text_column,
            num_unknown=num_unknown or None,
        )
        extra = {TOKENIZER: tokenizer, SOURCES: sources, HEADER: header_bytes(header)}
        for file, data in extra.items():
            if data is not None:
                (self._folder / file).write_bytes(data)
        return header

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._tokens.close()
        self._ends.close()
        if kind is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


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
        for document in documents:
            writer.add(document)
        header = writer.finish(tokenizer=tokenizer)
        os.rename(temporary, target)
    return header


class _DigestedFile:
    """A file that is written from front to back, and its digest."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest, self._num_bytes = hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._num_bytes += len(data)

    def close(self) -> FileDigest:
        self._file.close()
        return FileDigest(self._num_bytes, self._digest.hexdigest())
