"""Makes a token set of files of text: survey, tokenizer, pieces, and all of them as one.

The result depends on the files and the options alone. A process that is killed leaves a work folder beside the result,
``NAME.unfinished``, with the pieces that were done; the same call again goes on with them.
"""

import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rrfp_jax.data.tokenizer_files import (
    BYTE_TOKENIZER_FILE,
    TokenizerFile,
    load,
    read_tokenizer,
    size_of,
    threads_of_tokenizers,
)
from rrfp_jax.data.tokenizing._pieces import (
    DamagedPiece,
    PieceFiles,
    SurveyedSource,
    TextPiece,
    cut_into_pieces,
    remove_work_folder,
    stamp_of,
    survey,
    work_folder,
)
from rrfp_jax.data.tokenizing._text_parts import files_forgotten, parts_in
from rrfp_jax.data.tokenizing._workers import TokenizeTask, tokenize_pieces
from rrfp_jax.data.tokenizing.inputs import PLAIN_BYTES, TEXT, TRAIN, TokenizeOptions, find_sources
from rrfp_jax.data.tokens.header import TokenSetHeader
from rrfp_jax.data.tokens.writer import TokenSetWriter
from rrfp_jax.observe.output_files import check_file, check_folder, replacing

_LOG = logging.getLogger(__name__)
_READING, _TRAINING, _TOKENIZING, _WRITING = "reading", "training", "tokenizing", "writing"
TokenizeProgress = Callable[[str, int, int], None]
"""Gets the step of the work (``reading``, ``training``, ``tokenizing``, ``writing``), how much of it is done, and how
much there is: bytes, but pieces in the last step."""
_END = "<|endoftext|>"  # closes documents; the only special token of a tokenizer that is made


class _Corpus(NamedTuple):
    surveyed: list[SurveyedSource]
    pieces: list[TextPiece]


def tokenize(
    inputs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    options: TokenizeOptions | None = None,
    *,
    workers: int | None = None,
    progress: TokenizeProgress | None = None,
) -> TokenSetHeader:
    """Makes the token set ``out`` of files and folders, with ``workers`` processes (None: one for each core).

    Returns its header. Raises ValueError, in one sentence with file, row and remedy, if the input does not fit or
    something stands at ``out`` already; WorkerLost if a process was killed.
    """
    options = options or TokenizeOptions()
    num_workers = _num_workers(workers)
    target = Path(out).expanduser()
    _check_target(target)
    with work_folder(target) as folder, files_forgotten():
        corpus = _read_corpus(inputs, options, num_workers, progress)
        if options.tokenizer == PLAIN_BYTES:
            tokenizer = BYTE_TOKENIZER_FILE
        elif options.tokenizer != TRAIN:
            tokenizer = read_tokenizer(options.tokenizer, options.end_of_document)
        else:
            data = _kept_tokenizer(corpus.pieces, options, folder, progress)
            made = load(data, "the tokenizer that was made")
            tokenizer = TokenizerFile("byte-level BPE", data, made.token_to_id(_END), size_of(made))
        task = TokenizeTask(
            folder=folder, tokenizer=tokenizer, reads_special=options.reads_special, column=options.column
        )
        _make_pieces(task, corpus.pieces, num_workers, progress)
        header = _assemble(folder / "set", task, corpus, progress)
        _check_target(target)  # which may have been made meanwhile
        os.rename(folder / "set", target)
        remove_work_folder(folder)
    return header


def train_tokenizer_file(
    inputs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    options: TokenizeOptions,
    *,
    workers: int | None = None,
    progress: TokenizeProgress | None = None,
) -> int:
    """Makes a tokenizer of the texts alone, as the file ``out``; returns its number of tokens.

    Raises errors as :func:`tokenize` does.
    """
    target = Path(out).expanduser()
    check_file(target, "out")
    if os.path.lexists(target):
        raise ValueError(f"{target} exists: name another --out, or remove it")
    with files_forgotten():
        corpus = _read_corpus(inputs, options, _num_workers(workers), progress)
        data = _train_tokenizer(corpus.pieces, options, progress)
    with replacing(target) as temporary:
        temporary.write_bytes(data)
    return size_of(load(data, str(target)))


class _Counter:
    """Adds up how much of a step of the work is done; safe to use from any thread."""

    def __init__(self, progress: TokenizeProgress | None, step: str, total: int) -> None:
        self._progress, self._step, self._total, self._done = progress, step, total, 0
        self._lock = threading.Lock()
        self.add(0)

    def add(self, more: int) -> None:
        with self._lock:
            self._done += more
            if self._progress is not None:
                self._progress(self._step, self._done, self._total)


def _num_workers(workers: int | None) -> int:
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise ValueError(f"workers is {workers}: give at least 1")
    return workers


def _check_target(target: Path) -> None:
    check_folder(target.parent, "the folder of out")
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target} exists: name another --out, or remove it")


def _read_corpus(
    inputs: Sequence[str | os.PathLike[str]],
    options: TokenizeOptions,
    num_workers: int,
    progress: TokenizeProgress | None,
) -> _Corpus:
    """Returns all files with their digests, and their pieces; raises ValueError if there is no text."""

    def some(paths: Sequence[Path]) -> str:
        others = f" and {len(paths) - 3} others" if len(paths) > 3 else ""
        return ", ".join(map(str, paths[:3])) + others

    sources, left_out = find_sources(inputs, options.suffixes)
    if left_out:
        _LOG.info("left out, for their suffixes or as no files: %s", some(left_out))
    counter = _Counter(progress, _READING, sum(os.stat(source.path).st_size for source in sources))
    surveyed = survey(sources, options.column, num_workers, counter.add)
    if not any(each.length for each in surveyed):
        raise ValueError(
            f"the input holds no text ({some([Path(source.path) for source in sources])}): name other files"
        )
    return _Corpus(surveyed, cut_into_pieces(surveyed))


# ------------------------------------------------------------------------------------------------------ tokenizer


def _kept_tokenizer(
    pieces: Sequence[TextPiece], options: TokenizeOptions, folder: Path, progress: TokenizeProgress | None
) -> bytes:
    """Returns the tokenizer.json of these pieces, made now, or before and kept in ``folder``."""
    keys = [piece.key for piece in _training_pieces(pieces, options.train_bytes)]
    made_of = json.dumps([keys, options.column, options.trained_vocab_size]).encode()
    kept = folder / f"tokenizer-{hashlib.sha256(made_of).hexdigest()[:32]}.json"
    if not kept.exists():
        with replacing(kept) as temporary:
            temporary.write_bytes(_train_tokenizer(pieces, options, progress))
    return kept.read_bytes()


def _train_tokenizer(pieces: Sequence[TextPiece], options: TokenizeOptions, progress: TokenizeProgress | None) -> bytes:
    """Returns the tokenizer.json of a byte-level BPE made of pieces spread evenly over all.

    The same texts give the same file, whatever the number of threads. It has fewer tokens than the options ask for if
    the texts do not give as many.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    chosen = _training_pieces(pieces, options.train_bytes)
    counter = _Counter(progress, _TRAINING, sum(piece.num_bytes for piece in chosen))

    def texts() -> Iterator[str]:
        for piece in chosen:
            for span in piece.spans:
                yield from (part.text for part in parts_in(span, options.column) if part.text)
            counter.add(piece.num_bytes)

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.trained_vocab_size,
        special_tokens=[_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with threads_of_tokenizers(True):
        tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer.to_str(pretty=True).encode()


def _training_pieces(pieces: Sequence[TextPiece], num_bytes: int) -> list[TextPiece]:
    """Returns pieces of about ``num_bytes`` bytes of text; at least one."""
    total = sum(piece.num_bytes for piece in pieces)
    num = max(1, min(len(pieces), len(pieces) * num_bytes // max(total, 1)))
    return [pieces[number * len(pieces) // num] for number in range(num)]


# --------------------------------------------------------------------------------------------------------- pieces


def _make_pieces(
    task: TokenizeTask, pieces: Sequence[TextPiece], num_workers: int, progress: TokenizeProgress | None
) -> None:
    """Makes all pieces that are not there yet, equal ones once."""
    files, of_key = task.files, {piece.key: piece for piece in pieces}
    missing = {key: piece for key, piece in of_key.items() if not files.holds(key)}
    if len(missing) < len(of_key):
        _LOG.info("%d of %d pieces were there already", len(of_key) - len(missing), len(of_key))
    counter = _Counter(progress, _TOKENIZING, sum(piece.num_bytes for piece in of_key.values()))
    counter.add(sum(piece.num_bytes for key, piece in of_key.items() if key not in missing))
    tokenize_pieces(task, [*missing.values()], num_workers, counter.add)


def _assemble(folder: Path, task: TokenizeTask, corpus: _Corpus, progress: TokenizeProgress | None) -> TokenSetHeader:
    """Writes the token set into ``folder``, in place of the one that a killed process may have left there.

    Raises ValueError if the files hold no document, or if one has changed since its digest was taken.
    """
    shutil.rmtree(folder, ignore_errors=True)
    num_documents = [0] * len(corpus.surveyed)
    counter = _Counter(progress, _WRITING, len(corpus.pieces))
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
            except DamagedPiece as error:
                raise ValueError(f"{error}: somebody has changed it while it was in use: start again") from None
            counter.add(1)
        if not any(num_documents):
            _forget(files, corpus.pieces)
            raise ValueError(f"{corpus.surveyed[0].source.path} and what else was named hold no document: name others")
        for number, each in enumerate(corpus.surveyed):
            # A file that was changed since its digest was taken may have given any tokens: its pieces are not kept.
            if stamp_of(each.source.path) != each.stamp:
                _forget(files, [piece for piece in corpus.pieces if number in piece.numbers])
                raise ValueError(f"{each.source.path} was changed while it was read: start again once nobody writes it")
        return writer.finish(
            tokenizer=data,
            name=name,
            num_unknown=num_unknown,
            sources=_sources_file(corpus.surveyed, num_documents),
            text_column=None if all(each.source.kind == TEXT for each in corpus.surveyed) else task.column,
        )


def _forget(files: PieceFiles, pieces: Sequence[TextPiece]) -> None:
    for piece in pieces:
        files.path_of(piece.key).unlink(missing_ok=True)


def _sources_file(surveyed: Sequence[SurveyedSource], num_documents: Sequence[int]) -> bytes:
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
