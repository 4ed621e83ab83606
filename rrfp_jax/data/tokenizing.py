"""Makes a token set of files of text: survey, tokenizer, pieces, and all of them as one.

The result depends on the files and the options alone; the number of processes changes no byte of it. A process that is
killed leaves a work folder beside the result, ``NAME.unfinished``, with the pieces that were done; the same call again
goes on with them.

``_sources.py`` finds and reads the files; ``_documents.py`` makes documents of them, in parts; ``_pieces.py`` cuts all
files into pieces and keeps those that are done.
"""

import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data._documents import TextPart, TextSpan, counted_tokens, document_name, holds_chats, parts_in
from rrfp_jax.data._pieces import (
    DamagedPiece,
    PieceFiles,
    SurveyedSource,
    TextPiece,
    TokenBlock,
    cut_into_pieces,
    stamp_of,
    survey,
    work_folder,
)
from rrfp_jax.data._sources import TEXT, TEXT_SUFFIXES, Source, files_forgotten, find_sources
from rrfp_jax.data.dataset import BrokenData
from rrfp_jax.data.tokenizer_files import (
    BYTE_TOKENIZER_FILE,
    TokenizerFile,
    library_reason,
    load,
    lost_part,
    may_lose,
    read_tokenizer,
    size_of,
    threads_of_tokenizers,
)
from rrfp_jax.data.tokens import HEADER, TokenSetHeader, TokenSetWriter, token_dtype
from rrfp_jax.field_rules import AT_LEAST_1, check_fields
from rrfp_jax.flows import Pipe, flow
from rrfp_jax.observe.output_files import check_file, check_folder, replacing
from rrfp_jax.storage import BucketPath, check_bucket, local_copy, located, move_up, working_folder
from rrfp_jax.waiting import end_with_parent, spawning

if TYPE_CHECKING:
    from rrfp_jax.data._chats import ChatTemplate

_LOG = logging.getLogger(__name__)
_TRAINED, PLAIN_BYTES = "train", "bytes"
"""Words in place of a tokenizer's file: a tokenizer that is made of the texts, and none."""
_VOCAB_SIZE = 8192
_LEAST_VOCAB_SIZE = 257  # all bytes, and the end of a document
_END = "<|endoftext|>"  # closes documents; the only special token of a tokenizer that is made
_AHEAD = 3  # pieces that wait for each process, so that none waits for its next
# Limits of the texts that the tokenizer is given at once.
_BATCH_CHARACTERS, _BATCH_TEXTS = 1 << 20, 1024
_BLOCK_TOKENS = 1 << 20  # about as many tokens are held before they are written
_READING, _TRAINING, _TOKENIZING, _WRITING = "reading", "training", "tokenizing", "writing"
TokenizeProgress = Callable[[str, int, int], None]
"""Gets the step of the work (``reading``, ``training``, ``tokenizing``, ``writing``), how much of it is done, and how
much there is: bytes, but pieces in the last step."""


class WorkerLost(RuntimeError):
    """Raised if a process has ended before its piece; the message has the remedy."""


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """How texts become tokens; raises ValueError, with the remedy, for options that do not fit each other."""

    tokenizer: str = PLAIN_BYTES
    """A tokenizer.json or a folder that has one; ``train`` makes a byte-level BPE of the texts; ``bytes``: none."""
    vocab_size: int | None = None
    """Tokens of a tokenizer that is made of the texts. None: 8192."""
    end_of_document: str | None = None
    """The token of the tokenizer's file that closes documents. None: the one in its folder's tokenizer_config.json, or
    a usual one."""
    column: str = "text"
    """The field of JSON lines and Parquet rows that holds the text, or the list of messages of a chat."""
    suffixes: tuple[str, ...] = TEXT_SUFFIXES
    """Endings of files of plain text."""
    reads_special: bool = False
    """Whether words of a text that look like a special token are one."""
    train_bytes: int = 512 * 2**20
    """Bytes of text, at most, of which a tokenizer is made, spread evenly over all texts."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "train_bytes")
        if not self.suffixes:
            raise ValueError("suffixes is empty: give at least one, for example .txt")
        if self.tokenizer != _TRAINED and self.vocab_size is not None:
            raise ValueError("vocab_size is that of a tokenizer that is made: leave it out, or take tokenizer train")
        if self.vocab_size is not None and self.vocab_size < _LEAST_VOCAB_SIZE:
            raise ValueError(
                f"vocab_size is {self.vocab_size}: give at least {_LEAST_VOCAB_SIZE}, all bytes and one more"
            )
        if self.tokenizer in (_TRAINED, PLAIN_BYTES):
            if self.end_of_document is not None:
                raise ValueError(f"end_of_document is a token of a file: leave it out with tokenizer {self.tokenizer}")
            if self.reads_special:
                raise ValueError(f"tokenizer {self.tokenizer} reads no special tokens: name a tokenizer's file")


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
    target = located(out).expanduser()
    _check_target(target)
    with work_folder(working_folder(target) if isinstance(target, BucketPath) else target) as folder, files_forgotten():
        surveyed, pieces, is_chat = _read_corpus(inputs, options, num_workers, progress)
        chats = None
        if is_chat:
            from rrfp_jax.data._chats import read_chat_template

            chats = read_chat_template(options.tokenizer)
        if options.tokenizer == PLAIN_BYTES:
            tokenizer = BYTE_TOKENIZER_FILE
        elif options.tokenizer != _TRAINED:
            tokenizer = read_tokenizer(options.tokenizer, options.end_of_document)
        else:
            # Training takes long, so a tokenizer is kept beside the pieces, by the name of all that decides it.
            keys = [piece.key for piece in _training_pieces(pieces, options.train_bytes)]
            made_of = json.dumps([keys, options.column, options.vocab_size or _VOCAB_SIZE]).encode()
            kept = folder / f"tokenizer-{hashlib.sha256(made_of).hexdigest()[:32]}.json"
            if not kept.exists():
                with replacing(kept) as temporary:
                    temporary.write_bytes(_train_tokenizer(pieces, options, progress))
            data = kept.read_bytes()
            made = load(data, "the tokenizer that was made")
            tokenizer = TokenizerFile("byte-level BPE", data, made.token_to_id(_END), size_of(made))
        worker = Worker(folder, tokenizer, options.reads_special, options.column, chats)
        _make_pieces(worker, pieces, num_workers, progress)
        header = _assemble(folder / "set", worker, surveyed, pieces, progress=progress)
        _check_target(target)  # which may have been made meanwhile
        if isinstance(target, BucketPath):
            move_up(folder / "set", target, last=(HEADER,))
        else:
            os.rename(folder / "set", target)
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
        _, pieces, _ = _read_corpus(inputs, options, _num_workers(workers), progress)
        data = _train_tokenizer(pieces, options, progress)
    with replacing(target) as temporary:
        temporary.write_bytes(data)
    return size_of(load(data, str(target)))


def _counter(progress: TokenizeProgress | None, step: str, total: int) -> Callable[[int], None]:
    """Returns a function that adds to the part of a step that is done; safe to call from any thread."""
    lock, done = threading.Lock(), 0

    def add(more: int) -> None:
        nonlocal done
        with lock:
            done += more
            if progress is not None:
                progress(step, done, total)

    add(0)
    return add


def _num_workers(workers: int | None) -> int:
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise ValueError(f"workers is {workers}: give at least 1")
    return workers


def _check_target(target: Path) -> None:
    if isinstance(target, BucketPath):
        check_bucket(target, "out")
        if target.exists():
            raise ValueError(f"{target} exists: name another --out, or remove it")
        return
    check_folder(target.parent, "the folder of out")
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target} exists: name another --out, or remove it")


def _read_corpus(
    inputs: Sequence[str | os.PathLike[str]],
    options: TokenizeOptions,
    num_workers: int,
    progress: TokenizeProgress | None,
) -> tuple[list[SurveyedSource], list[TextPiece], bool]:
    """Returns all files with their digests, their pieces, and whether they hold chats.

    Raises ValueError if there is no text, or if these options cannot read chats.
    """

    def some(paths: Sequence[Path | str]) -> str:
        others = f" and {len(paths) - 3} others" if len(paths) > 3 else ""
        return ", ".join(map(str, paths[:3])) + others

    sources, left_out = find_sources([local_copy(located(each)) for each in inputs], options.suffixes)
    if left_out:
        _LOG.info("left out, for their suffixes or as no files: %s", some(left_out))
    add_bytes = _counter(progress, _READING, sum(os.stat(source.path).st_size for source in sources))
    first, is_chat = _first_row(sources, options.column)
    if is_chat:
        if options.tokenizer in (_TRAINED, PLAIN_BYTES):
            raise ValueError(
                f"{first} has chats in column {options.column!r}, and tokenizer {options.tokenizer} has no chat "
                "template to write them: begin with an import (init_from), or name the folder of a tokenizer with one"
            )
        if (plain := next((source.path for source in sources if source.kind == TEXT), None)) is not None:
            raise ValueError(
                f"{first} has chats, and {plain} is plain text: make token sets of their own, and mix these"
            )
    surveyed = survey(sources, options.column, num_workers, add_bytes, is_chat=is_chat)
    if not any(each.length for each in surveyed):
        raise ValueError(f"the input holds no text ({some([source.path for source in sources])}): name other files")
    return surveyed, cut_into_pieces(surveyed), is_chat


def _first_row(sources: Sequence[Source], column: str) -> tuple[str, bool]:
    """Returns the first file that has a row, and whether this is a chat; so are all others then."""
    for source in sources:
        if (is_chat := holds_chats(source, column)) is not None:
            return source.path, is_chat
    return "", False


def _train_tokenizer(pieces: Sequence[TextPiece], options: TokenizeOptions, progress: TokenizeProgress | None) -> bytes:
    """Returns the tokenizer.json of a byte-level BPE made of pieces spread evenly over all.

    The same texts give the same file, whatever the number of threads. It has fewer tokens than the options ask for if
    the texts do not give as many.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    chosen = _training_pieces(pieces, options.train_bytes)
    add_bytes = _counter(progress, _TRAINING, sum(piece.num_bytes for piece in chosen))

    def texts() -> Iterator[str]:
        for piece in chosen:
            for span in piece.spans:
                yield from (part.text for part in parts_in(span, options.column) if part.text)
            add_bytes(piece.num_bytes)

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size or _VOCAB_SIZE,
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


def _assemble(
    folder: Path,
    worker: "Worker",
    surveyed: Sequence[SurveyedSource],
    pieces: Sequence[TextPiece],
    *,
    progress: TokenizeProgress | None,
) -> TokenSetHeader:
    """Writes the token set into ``folder``, in place of the one that a killed process may have left there.

    Raises ValueError if the files hold no document, or if one has changed since its digest was taken.
    """
    shutil.rmtree(folder, ignore_errors=True)
    num_documents = [0] * len(surveyed)
    add_pieces = _counter(progress, _WRITING, len(pieces))
    name, data, end_of_document, vocab_size, unknown = worker.tokenizer
    num_unknown = 0

    def forget(damaged: Sequence[TextPiece]) -> None:
        for piece in damaged:
            worker.files.path_of(piece.key).unlink(missing_ok=True)

    is_chat = worker.chats is not None
    with TokenSetWriter(folder, vocab_size=vocab_size, end_of_document=end_of_document, is_chat=is_chat) as writer:
        for piece in pieces:
            try:
                for tokens, ends, span, counted in worker.files.read(piece.key):
                    writer.append(tokens, ends, counted)
                    num_documents[piece.numbers[span]] += len(ends)
                    if unknown is not None:
                        num_unknown += int(np.count_nonzero(tokens == unknown))
            except DamagedPiece as error:
                raise ValueError(f"{error}: somebody has changed it while it was in use: start again") from None
            add_pieces(1)
        if not any(num_documents):
            forget(pieces)
            raise ValueError(f"{surveyed[0].source.path} and what else was named hold no document: name others")
        if writer.num_counted == 0:
            forget(pieces)
            raise ValueError(
                f"no chat in {surveyed[0].source.path} and what else was named has a turn of the role assistant, so "
                "nothing would be trained on: give other chats"
            )
        for number, each in enumerate(surveyed):
            # A file that was changed since its digest was taken may have given any tokens: its pieces are not kept.
            if stamp_of(each.source.path) != each.stamp:
                forget([piece for piece in pieces if number in piece.numbers])
                raise ValueError(f"{each.source.path} was changed while it was read: start again once nobody writes it")
        lines = [
            {
                "name": each.source.name,
                "num_bytes": each.digest.num_bytes,
                "sha256": each.digest.sha256,
                "num_documents": documents,
            }
            for each, documents in zip(surveyed, num_documents, strict=True)
        ]
        return writer.finish(
            tokenizer=data,
            name=name,
            num_unknown=num_unknown,
            sources="".join(json.dumps(line) + "\n" for line in lines).encode(),
            text_column=None if all(each.source.kind == TEXT for each in surveyed) else worker.column,
        )


# ------------------------------------------------------------------------------------------------------------- workers


def _make_pieces(
    worker: "Worker", pieces: Sequence[TextPiece], num_workers: int, progress: TokenizeProgress | None
) -> None:
    """Makes all pieces that are not there yet, equal ones once.

    Raises BrokenData for data that is no text, and WorkerLost; pieces that were done by then are kept.
    """
    of_key = {piece.key: piece for piece in pieces}
    missing = {key: piece for key, piece in of_key.items() if not worker.files.holds(key)}
    if len(missing) < len(of_key):
        _LOG.info("%d of %d pieces were there already", len(of_key) - len(missing), len(of_key))
    add_bytes = _counter(progress, _TOKENIZING, sum(piece.num_bytes for piece in of_key.values()))
    add_bytes(sum(piece.num_bytes for key, piece in of_key.items() if key not in missing))
    num_workers = min(num_workers, len(missing))
    if num_workers > 1:
        _tokenize_in_pool(worker, list(missing.values()), num_workers, add_bytes)
        return
    # Threads of the tokenizer's would warn of every later fork of this process.
    with threads_of_tokenizers(False):
        for piece in missing.values():
            worker.do(piece)
            add_bytes(piece.num_bytes)


def _tokenize_in_pool(
    worker: "Worker", pieces: Sequence[TextPiece], num_workers: int, add_bytes: Callable[[int], None]
) -> None:
    with spawning() as context:
        pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin, initargs=(worker,))
        is_whole = False

        def tokenized(piece: TextPiece) -> int:
            pool.submit(_do, piece).result()
            return piece.num_bytes

        try:
            ahead = num_workers * _AHEAD
            flow(pieces, Pipe(tokenized, workers=ahead), add_bytes, lines=ahead)
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


def _begin(worker: "Worker") -> None:
    """Prepares a new process of the pool."""
    global _worker  # noqa: PLW0603 - a process of the pool has no other place
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = worker


def _do(piece: TextPiece) -> None:
    assert _worker is not None
    _worker.do(piece)


class Worker:
    """Tokenises pieces into their files, which are named by all settings that decide the tokens of a text.

    The same in every process; each loads the tokenizer at its first piece.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: TokenizerFile,
        reads_special: bool,
        column: str,
        chats: "ChatTemplate | None" = None,
    ) -> None:
        self.tokenizer, self.column, self.chats = tokenizer, column, chats
        self._reads_special = reads_special or chats is not None  # templates write special tokens as words
        digest = None if tokenizer.data is None else hashlib.sha256(tokenizer.data).hexdigest()
        settings = (digest, tokenizer.end_of_document, reads_special, column, *(chats.settings if chats else ()))
        self.files = PieceFiles(folder, settings, token_dtype(tokenizer.vocab_size))
        self._encoder: Any = None
        self._loses = False

    def do(self, piece: TextPiece) -> None:
        """Tokenises a piece into its file; raises BrokenData, with file and row, for data that is no text, or no text
        for this tokenizer."""
        if self._encoder is None and self.tokenizer.data is not None:
            self._encoder = load(self.tokenizer.data, self.tokenizer.name)
            self._encoder.encode_special_tokens = not self._reads_special
            self._loses = may_lose(self._encoder)
        self.files.write(piece.key, self._blocks(piece))

    def _blocks(self, piece: TextPiece) -> Iterator[TokenBlock]:
        """Yields the tokens of a piece, each document closed, some megabytes at a time.

        A chat whose template has closed it is not closed again.
        """
        end = self.tokenizer.end_of_document
        close, is_chat = np.array([end], np.uint32), self.chats is not None
        for number, span in enumerate(piece.spans):
            made: list[tuple[NDArray[Any], NDArray[np.bool_]]] = []
            ends: list[int] = []
            num_tokens = 0
            parts = parts_in(span, self.column) if self.chats is None else self.chats.parts_in(span, self.column)
            for batch in _batches(parts):
                for part, (tokens, counted) in zip(batch, self._encoded(batch, span), strict=True):
                    made.append((tokens, counted))
                    num_tokens += len(tokens)
                    if part.is_last:
                        if not (is_chat and len(tokens) and tokens[-1] == end):
                            made.append((close, np.zeros(1, bool)))
                            num_tokens += 1
                        ends.append(num_tokens)
                if num_tokens >= _BLOCK_TOKENS:
                    yield _block_of(made, ends, number, is_chat=is_chat)
                    made, ends, num_tokens = [], [], 0
            if num_tokens:
                yield _block_of(made, ends, number, is_chat=is_chat)

    def _encoded(self, batch: Sequence[TextPart], span: TextSpan) -> list[tuple[NDArray[Any], NDArray[np.bool_]]]:
        """Returns the tokens of every part, uint8 or uint32 ``[tokens]``, and of a chat whether each counts."""
        texts = [part.text for part in batch]
        none = np.zeros(0, bool)
        if self._encoder is None:
            return [(np.frombuffer(text.encode(), np.uint8), none) for text in texts]
        try:
            needs_places = self._loses or self.chats is not None
            encode = self._encoder.encode_batch if needs_places else self._encoder.encode_batch_fast
            encoded = encode(texts, add_special_tokens=False)
        except BaseException as error:
            reason = library_reason(error)
            for part in batch if len(batch) > 1 else ():  # one by one, to name the document that cannot be encoded
                self._encoded([part], span)
            raise BrokenData(
                f"{document_name(span.source, batch[0].place)}: the tokenizer {self.tokenizer.name} cannot encode the "
                f"text ({reason}): take one for any text, or leave this one out"
            ) from error
        for part, each in zip(batch, encoded, strict=True) if self._loses else ():
            if (lost := lost_part(self._encoder, part.text, each, None)) is not None:
                raise BrokenData(
                    f"{document_name(span.source, part.place)}: the tokenizer has no token for {lost!r}, which would "
                    "vanish: take a tokenizer for any character, one with a token for the unknown, or other texts"
                )
        if self.chats is None:
            return [(np.array(each.ids, np.uint32), none) for each in encoded]
        return [
            (np.array(each.ids, np.uint32), counted_tokens(each.offsets, part.turns or ()))
            for part, each in zip(batch, encoded, strict=True)
        ]


def _block_of(
    made: Sequence[tuple[NDArray[Any], NDArray[np.bool_]]], ends: Sequence[int], span: int, *, is_chat: bool
) -> TokenBlock:
    tokens, counted = map(np.concatenate, zip(*made, strict=True))
    return TokenBlock(tokens, np.array(ends, np.int64), span, counted if is_chat else None)


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
