"""From files of text to a token set: survey, tokenizer, pieces, and all of them as one.

The result depends on the files and the options alone. A process that is killed leaves a work folder beside the result,
``NAME.unfinished``, with the pieces that were done; the same call again goes on with them.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from rrfp_jax.data.tokenizing.assembly import assemble
from rrfp_jax.data.tokenizing.documents import files_forgotten
from rrfp_jax.data.tokenizing.options import PLAIN_BYTES, TRAIN, TokenizeOptions
from rrfp_jax.data.tokenizing.piece_files import remove_work_folder, work_folder
from rrfp_jax.data.tokenizing.pieces import Corpus, Piece, cut_into_pieces, survey
from rrfp_jax.data.tokenizing.processes import tokenize_pieces
from rrfp_jax.data.tokenizing.progress import READING, TOKENIZING, Counter, Progress, silent
from rrfp_jax.data.tokenizing.sources import find_sources
from rrfp_jax.data.tokenizing.tokenizer import PLAIN, TokenizerFile, load, read_tokenizer, size_of
from rrfp_jax.data.tokenizing.training import END, kept_tokenizer, train_tokenizer
from rrfp_jax.data.tokenizing.worker import Task
from rrfp_jax.data.tokens.header import TokenSetHeader
from rrfp_jax.observe.output_files import check_file, check_folder, replacing

_log = logging.getLogger(__name__)


def tokenize(
    inputs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    options: TokenizeOptions | None = None,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> TokenSetHeader:
    """Make the token set ``out`` of files and folders, with ``workers`` processes (None: one for each core).

    Returns its header. Raises ValueError, in one sentence with file, row and remedy, where the input does not fit or
    something stands at ``out`` already; WorkerLost where a process was killed.
    """
    options, tell = options or TokenizeOptions(), progress or silent
    num_workers = _checked_workers(workers)
    target = Path(out).expanduser()
    _check_target(target)
    with work_folder(target) as folder, files_forgotten():
        corpus = _corpus(inputs, options, num_workers, tell)
        tokenizer = _tokenizer(options, corpus, folder, tell)
        task = Task(folder=folder, tokenizer=tokenizer, reads_special=options.reads_special, column=options.column)
        _make_pieces(task, corpus.pieces, num_workers, tell)
        header = assemble(folder / "set", task, corpus, tell)
        _check_target(target)
        os.rename(folder / "set", target)
        remove_work_folder(folder)
    return header


def train_tokenizer_file(
    inputs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    options: TokenizeOptions,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Make a tokenizer of the texts alone, as the file ``out``; its number of tokens. Errors as in :func:`tokenize`."""
    tell, target = progress or silent, Path(out).expanduser()
    check_file(target, "out")
    if os.path.lexists(target):
        raise ValueError(f"{target} exists: name another --out, or remove it")
    with files_forgotten():
        corpus = _corpus(inputs, options, _checked_workers(workers), tell)
        data = train_tokenizer(corpus.pieces, options, tell)
    with replacing(target) as temporary:
        temporary.write_bytes(data)
    return size_of(load(data, str(target)))


def _checked_workers(workers: int | None) -> int:
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise ValueError(f"workers is {workers}: give at least 1")
    return workers


def _check_target(target: Path) -> None:
    check_folder(target.parent, "the folder of out")
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target} exists: name another --out, or remove it")


def _corpus(
    inputs: Sequence[str | os.PathLike[str]], options: TokenizeOptions, num_workers: int, tell: Progress
) -> Corpus:
    """All files with their digests, and the pieces that they make; raises ValueError where there is no text."""
    sources, left_out = find_sources(inputs, options.suffixes)
    if left_out:
        _log.info("left out, for their suffixes or as no files: %s", _some(left_out))
    counter = Counter(tell, READING, sum(os.stat(source.path).st_size for source in sources))
    surveyed = survey(sources, options.column, num_workers, counter.add)
    if not any(each.length for each in surveyed):
        paths = [Path(source.path) for source in sources]
        raise ValueError(f"the input holds no text ({_some(paths)}): name other files")
    return Corpus(surveyed, cut_into_pieces(surveyed))


def _some(paths: Sequence[Path]) -> str:
    others = f" and {len(paths) - 3} others" if len(paths) > 3 else ""
    return ", ".join(map(str, paths[:3])) + others


def _tokenizer(options: TokenizeOptions, corpus: Corpus, folder: Path, tell: Progress) -> TokenizerFile:
    if options.tokenizer == PLAIN_BYTES:
        return PLAIN
    if options.tokenizer != TRAIN:
        return read_tokenizer(options.tokenizer, options.end_of_document)
    data = kept_tokenizer(corpus.pieces, options, folder, tell)
    made = load(data, "the tokenizer that was made")
    return TokenizerFile("byte-level BPE", data, made.token_to_id(END), size_of(made))


def _make_pieces(task: Task, pieces: Sequence[Piece], num_workers: int, tell: Progress) -> None:
    """Have all that are not there yet made, each once."""
    files, of_key = task.files, {piece.key: piece for piece in pieces}
    missing = {key: piece for key, piece in of_key.items() if not files.holds(key)}
    if len(missing) < len(of_key):
        _log.info("%d of %d pieces were there already", len(of_key) - len(missing), len(of_key))
    counter = Counter(tell, TOKENIZING, sum(piece.num_bytes for piece in of_key.values()))
    counter.add(sum(piece.num_bytes for key, piece in of_key.items() if key not in missing))
    tokenize_pieces(task, [*missing.values()], num_workers, counter.add)
