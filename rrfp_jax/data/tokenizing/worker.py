"""What one process does: pieces of text in, files of tokens out."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.tokenizing.documents import Part, parts_in
from rrfp_jax.data.tokenizing.piece_files import PieceFiles, TokenPiece
from rrfp_jax.data.tokenizing.pieces import Piece
from rrfp_jax.data.tokenizing.tokenizer import ByteEncoder, Encoder, FileEncoder
from rrfp_jax.data.tokens.header import dtype_for

_BATCH_CHARACTERS, _BATCH_TEXTS = 1 << 20, 1024
"""Of the texts that the tokenizer is given at once."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """How to tokenise, for every process the same."""

    folder: Path
    """The work folder."""
    name: str
    """Of the tokenizer, for people."""
    tokenizer: bytes | None
    """tokenizer.json; None: tokens are bytes."""
    end_of_document: int
    reads_special: bool
    column: str
    settings: tuple[Any, ...]
    """What decides the tokens of a text."""

    def encoder(self) -> Encoder:
        """What makes the tokens."""
        if self.tokenizer is None:
            return ByteEncoder()
        return FileEncoder(self.tokenizer, end_of_document=self.end_of_document, reads_special=self.reads_special)


class Worker:
    """Tokenises pieces."""

    def __init__(self, task: Task) -> None:
        self._column, self._encoder = task.column, task.encoder()
        self._files = PieceFiles(task.folder, task.settings, dtype_for(self._encoder.vocab_size))

    def do(self, piece: Piece) -> int:
        """Tokenise a piece into its file; the number of its tokens."""
        made = tokens_of(piece, self._column, self._encoder)
        self._files.write(piece.key, made)
        return len(made.tokens)


def tokens_of(piece: Piece, column: str, encoder: Encoder) -> TokenPiece:
    """The tokens of a piece; raises BrokenData, with file and row, for what is no text."""
    close = np.array([encoder.end_of_document], np.uint32)
    made: list[NDArray[Any]] = []
    ends: list[int] = []
    documents: list[int] = []
    num_tokens = 0
    for span in piece.spans:
        before = len(ends)
        for batch in _batches(parts_in(span, column)):
            for part, tokens in zip(batch, encoder.encode([part.text for part in batch]), strict=True):
                made.append(tokens)
                num_tokens += len(tokens)
                if part.is_last:
                    made.append(close)
                    num_tokens += 1
                    ends.append(num_tokens)
        documents.append(len(ends) - before)
    tokens = np.concatenate(made) if made else np.zeros(0, np.uint32)
    return TokenPiece(tokens, np.array(ends, np.int64), tuple(documents))


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
