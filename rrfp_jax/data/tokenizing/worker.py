"""What one process does: pieces of text in, files of tokens out."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.dataset import BrokenData
from rrfp_jax.data.tokenizing.documents import Part, Span, name_of, parts_in
from rrfp_jax.data.tokenizing.piece_files import PieceFiles, TokenBlock
from rrfp_jax.data.tokenizing.pieces import Piece
from rrfp_jax.data.tokenizing.tokenizer import ByteEncoder, Encoder, FileEncoder, TokenizerFile
from rrfp_jax.data.tokens.header import dtype_for

_BATCH_CHARACTERS, _BATCH_TEXTS = 1 << 20, 1024
"""Of the texts that the tokenizer is given at once."""
_BLOCK_TOKENS = 1 << 20
"""Approximate number of tokens that are held before they are written."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """How to tokenise, for every process the same."""

    folder: Path
    """The work folder."""
    tokenizer: TokenizerFile
    reads_special: bool
    column: str

    @property
    def files(self) -> PieceFiles:
        """The pieces that are made in this way; part of their names is what decides the tokens of a text."""
        data, end = self.tokenizer.data, self.tokenizer.end_of_document
        digest = None if data is None else hashlib.sha256(data).hexdigest()
        settings = (digest, end, self.reads_special, self.column)
        return PieceFiles(self.folder, settings, dtype_for(self.tokenizer.vocab_size))


class Worker:
    """Tokenises pieces."""

    def __init__(self, task: Task) -> None:
        self._task, self._files = task, task.files
        data = task.tokenizer.data
        self._encoder = (
            ByteEncoder()
            if data is None
            else FileEncoder(data, reads_special=task.reads_special, name=task.tokenizer.name)
        )

    def do(self, piece: Piece) -> int:
        """Tokenise a piece into its file; the number of its tokens."""
        end_of_document = self._task.tokenizer.end_of_document
        return self._files.write(piece.key, blocks_of(piece, self._task.column, self._encoder, end_of_document))


def blocks_of(piece: Piece, column: str, encoder: Encoder, end_of_document: int) -> Iterator[TokenBlock]:
    """Yields the tokens of a piece, each document closed, some megabytes at a time.

    Raises BrokenData, with file and row, for data that is no text, or no text for this tokenizer.
    """
    close = np.array([end_of_document], np.uint32)
    for number, span in enumerate(piece.spans):
        made: list[NDArray[Any]] = []
        ends: list[int] = []
        num_tokens = 0
        for batch in _batches(parts_in(span, column)):
            for part, tokens in zip(batch, _encoded(batch, encoder, span), strict=True):
                made.append(tokens)
                num_tokens += len(tokens)
                if part.is_last:
                    made.append(close)
                    num_tokens += 1
                    ends.append(num_tokens)
            if num_tokens >= _BLOCK_TOKENS:
                yield TokenBlock(np.concatenate(made), np.array(ends, np.int64), number)
                made, ends, num_tokens = [], [], 0
        if num_tokens:
            yield TokenBlock(np.concatenate(made), np.array(ends, np.int64), number)


def _encoded(batch: list[Part], encoder: Encoder, span: Span) -> list[NDArray[Any]]:
    try:
        return encoder.encode([part.text for part in batch])
    except BrokenData:
        for part in batch:  # find the one to blame
            try:
                encoder.encode([part.text])
            except BrokenData as error:
                raise BrokenData(f"{name_of(span.source, part.place)}: {error}") from error
        raise


def _batches(parts: Iterator[Part]) -> Iterator[list[Part]]:
    batch: list[Part] = []
    num_characters = 0
    for part in parts:
        batch.append(part)
        num_characters += len(part.text)
        if num_characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_TEXTS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch
