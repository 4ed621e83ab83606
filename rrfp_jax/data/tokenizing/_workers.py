"""Tokenises pieces, in this process or in several; none of them outlives the process that asked for them."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.dataset import BrokenData
from rrfp_jax.data.tokenizer_files import ByteEncoder, Encoder, FileEncoder, TokenizerFile, threads_of_tokenizers
from rrfp_jax.data.tokenizing._pieces import PieceFiles, TextPiece, TokenBlock
from rrfp_jax.data.tokenizing._text_parts import TextPart, TextSpan, document_name, parts_in
from rrfp_jax.data.tokens.header import dtype_for
from rrfp_jax.waiting import end_with_parent, spawning

_AHEAD = 3  # pieces that wait for each process, so that none waits for its next
# Limits of the texts that the tokenizer is given at once.
_BATCH_CHARACTERS, _BATCH_TEXTS = 1 << 20, 1024
_BLOCK_TOKENS = 1 << 20  # about as many tokens are held before they are written


class WorkerLost(RuntimeError):
    """Raised if a process has ended before its piece; the message has the remedy."""


@dataclass(frozen=True, kw_only=True)
class TokenizeTask:
    """How to tokenise, the same for every process."""

    folder: Path
    """The work folder."""
    tokenizer: TokenizerFile
    reads_special: bool
    column: str

    @property
    def files(self) -> PieceFiles:
        """The pieces that are made in this way, named by all settings that decide the tokens of a text."""
        data, end = self.tokenizer.data, self.tokenizer.end_of_document
        digest = None if data is None else hashlib.sha256(data).hexdigest()
        settings = (digest, end, self.reads_special, self.column)
        return PieceFiles(self.folder, settings, dtype_for(self.tokenizer.vocab_size))


def tokenize_pieces(
    task: TokenizeTask, pieces: Sequence[TextPiece], num_workers: int, add_bytes: Callable[[int], None]
) -> None:
    """Makes the files of all pieces, calling ``add_bytes`` with the bytes of text of each that is done.

    Raises BrokenData for data that is no text, and WorkerLost; pieces that were done by then are kept.
    """
    num_workers = min(num_workers, len(pieces))
    if num_workers > 1:
        _tokenize_in_pool(task, pieces, num_workers, add_bytes)
        return
    # Threads of the tokenizer's would warn of every later fork of this process.
    with threads_of_tokenizers(False):
        worker = Worker(task)
        for piece in pieces:
            worker.do(piece)
            add_bytes(piece.num_bytes)


def _tokenize_in_pool(
    task: TokenizeTask, pieces: Sequence[TextPiece], num_workers: int, add_bytes: Callable[[int], None]
) -> None:
    with spawning() as context:
        pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin, initargs=(task,))
        is_whole = False
        try:
            coming = iter(pieces)
            sizes: dict[Future[int], int] = {}
            while True:
                # A few pieces at a time, so that a list of millions is not sent to the pool at once.
                for piece in islice(coming, num_workers * _AHEAD - len(sizes)):
                    sizes[pool.submit(_do, piece)] = piece.num_bytes
                if not sizes:
                    break
                for future in wait(sizes, return_when=FIRST_COMPLETED).done:
                    future.result()
                    add_bytes(sizes.pop(future))
            is_whole = True
        except BrokenProcessPool as broken:
            raise WorkerLost(
                "a process that tokenised was killed, perhaps for want of memory, or could not start: give fewer "
                "--workers and start again, for what is done is kept; a program of one's own calls tokenize() under "
                'if __name__ == "__main__"'
            ) from broken
        finally:
            pool.shutdown(wait=is_whole, cancel_futures=True)


_worker: "Worker | None" = None


def _begin(task: TokenizeTask) -> None:
    """Prepares a new process of the pool."""
    global _worker  # noqa: PLW0603 - a process of the pool has no other place
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = Worker(task)


def _do(piece: TextPiece) -> int:
    assert _worker is not None
    return _worker.do(piece)


class Worker:
    """Tokenises pieces into their files."""

    def __init__(self, task: TokenizeTask) -> None:
        self._task, self._files = task, task.files
        data = task.tokenizer.data
        self._encoder = (
            ByteEncoder()
            if data is None
            else FileEncoder(data, reads_special=task.reads_special, name=task.tokenizer.name)
        )

    def do(self, piece: TextPiece) -> int:
        """Tokenises a piece into its file; returns the number of its tokens."""
        end_of_document = self._task.tokenizer.end_of_document
        return self._files.write(piece.key, _token_blocks(piece, self._task.column, self._encoder, end_of_document))


def _token_blocks(piece: TextPiece, column: str, encoder: Encoder, end_of_document: int) -> Iterator[TokenBlock]:
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


def _encoded(batch: list[TextPart], encoder: Encoder, span: TextSpan) -> list[NDArray[Any]]:
    try:
        return encoder.encode([part.text for part in batch])
    except BrokenData:
        for part in batch:  # one by one, to name the document that cannot be encoded
            try:
                encoder.encode([part.text])
            except BrokenData as error:
                raise BrokenData(f"{document_name(span.source, part.place)}: {error}") from error
        raise


def _batches(parts: Iterator[TextPart]) -> Iterator[list[TextPart]]:
    batch: list[TextPart] = []
    num_characters = 0
    for part in parts:
        batch.append(part)
        num_characters += len(part.text)
        if num_characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_TEXTS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch
