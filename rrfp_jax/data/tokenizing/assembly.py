"""All pieces as one token set."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rrfp_jax.data.tokenizing.piece_files import Damaged, PieceFiles
from rrfp_jax.data.tokenizing.pieces import Corpus, Piece, Surveyed, stamp_of
from rrfp_jax.data.tokenizing.progress import WRITING, Counter, Progress
from rrfp_jax.data.tokenizing.sources import TEXT
from rrfp_jax.data.tokenizing.worker import Task
from rrfp_jax.data.tokens.header import TokenSetHeader
from rrfp_jax.data.tokens.writer import TokenSetWriter


def assemble(folder: Path, task: Task, corpus: Corpus, tell: Progress) -> TokenSetHeader:
    """Write the token set into ``folder``, in place of what a killed process may have left there.

    Raises ValueError where the files hold no document, or one has changed since its digest was taken.
    """
    shutil.rmtree(folder, ignore_errors=True)
    num_documents = [0] * len(corpus.surveyed)
    counter = Counter(tell, WRITING, len(corpus.pieces))
    name, data, end_of_document, vocab_size, unknown = task.tokenizer
    num_unknown = 0
    files = task.files
    with TokenSetWriter(folder, vocab_size=vocab_size, end_of_document=end_of_document) as writer:
        for piece in corpus.pieces:
            try:
                for tokens, ends, span in files.read(piece.key):
                    writer.append(tokens, ends)
                    num_documents[piece.numbers[span]] += len(ends)
                    if unknown is not None:
                        num_unknown += int(np.count_nonzero(tokens == unknown))
            except Damaged as error:
                raise ValueError(f"{error}: somebody has changed it while it was in use: start again") from None
            counter.add(1)
        if not any(num_documents):
            _forget(files, corpus.pieces)
            raise ValueError(f"{corpus.surveyed[0].source.path} and what else was named hold no document: name others")
        _check_unchanged(corpus, files)
        return writer.finish(
            tokenizer=data,
            name=name,
            num_unknown=num_unknown,
            sources=_sources_file(corpus.surveyed, num_documents),
            text_column=None if all(each.source.kind == TEXT for each in corpus.surveyed) else task.column,
        )


def _check_unchanged(corpus: Corpus, files: PieceFiles) -> None:
    """Raise ValueError where a file is not the one whose digest was taken; its pieces are not kept."""
    for number, each in enumerate(corpus.surveyed):
        if stamp_of(each.source.path) != each.stamp:
            _forget(files, [piece for piece in corpus.pieces if number in piece.numbers])
            raise ValueError(f"{each.source.path} was changed while it was read: start again once nobody writes it")


def _forget(files: PieceFiles, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        files.path_of(piece.key).unlink(missing_ok=True)


def _sources_file(surveyed: Sequence[Surveyed], num_documents: Sequence[int]) -> bytes:
    lines = [
        {
            "name": each.source.name,
            "num_bytes": each.digest.num_bytes,
            "sha256": each.digest.sha256,
            "num_documents": documents,
        }
        for each, documents in zip(surveyed, num_documents, strict=True)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()
