"""The options of tokenising, and the files that are tokenised: their order, their names and their kinds by suffix.

Files of a folder come in the order of their relative paths and are named by them, so that the same folder gives the
same token set on every machine.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rrfp_jax.data._files import check_inside
from rrfp_jax.field_rules import AT_LEAST_1, check_fields

TRAIN, PLAIN_BYTES = "train", "bytes"
"""Words in place of a tokenizer's file: a tokenizer that is made of the texts, and none."""
_VOCAB_SIZE = 8192
_LEAST_VOCAB_SIZE = 257  # all bytes, and the end of a document
TEXT, LINES, ROWS = "text", "lines", "rows"
"""Kinds of files: one document; a JSON object with a document in each line; a Parquet row for each document."""
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
_LINES = (".jsonl", ".ndjson", ".json")
_ROWS = (".parquet", ".pq")
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}


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
    """The field of JSON lines and Parquet rows that holds the text."""
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
        if self.tokenizer != TRAIN and self.vocab_size is not None:
            raise ValueError("vocab_size is that of a tokenizer that is made: leave it out, or take tokenizer train")
        if self.vocab_size is not None and self.vocab_size < _LEAST_VOCAB_SIZE:
            raise ValueError(
                f"vocab_size is {self.vocab_size}: give at least {_LEAST_VOCAB_SIZE}, all bytes and one more"
            )
        if self.tokenizer in (TRAIN, PLAIN_BYTES):
            if self.end_of_document is not None:
                raise ValueError(f"end_of_document is a token of a file: leave it out with tokenizer {self.tokenizer}")
            if self.reads_special:
                raise ValueError(f"tokenizer {self.tokenizer} reads no special tokens: name a tokenizer's file")

    @property
    def trained_vocab_size(self) -> int:
        """The number of tokens of a tokenizer that is made."""
        return self.vocab_size or _VOCAB_SIZE


@dataclass(frozen=True)
class Source:
    """One file that holds documents."""

    name: str
    """The path relative to the input that it was found in."""
    path: str
    kind: str
    """``text``, ``lines`` or ``rows``."""
    compression: str | None
    """pyarrow's name for the compression. None: the file is not compressed as a whole."""


def find_sources(inputs: Sequence[str | os.PathLike[str]], suffixes: Sequence[str]) -> tuple[list[Source], list[Path]]:
    """Returns the sources in files and folders, and the files of folders that were left out for their suffixes.

    ``suffixes`` are the endings of plain text. Hidden files and folders are skipped, links to folders not followed. Of
    several folders, names begin with that of the folder. Raises ValueError, with the remedy, if an input is missing, of
    no known kind, or holds nothing, and for a link in a folder to a file outside of it. The files that were left out
    include links to folders, and anything that is no file.
    """
    if not inputs:
        raise ValueError("there is no input: name files or folders of text, JSON lines or Parquet")
    found: list[Source] = []
    left_out: list[Path] = []
    for given in inputs:
        root = Path(given).expanduser()
        if not root.exists():
            raise ValueError(f"input {root} does not exist: name an existing file or folder")
        if not root.is_dir():
            if not root.is_file():
                raise ValueError(f"input {root} is no file, and is read several times: write what it gives into one")
            source = _source(root, root.name, suffixes)
            if source is None:
                raise ValueError(f"{root} is of no known kind: {_known(suffixes)}")
            found.append(source)
            continue
        prefix = "" if len(inputs) == 1 else f"{root.absolute().name}/"
        files, others = _files_in(root)
        in_folder = [(file, _source(file, prefix + file.relative_to(root).as_posix(), suffixes)) for file in files]
        own = [source for _, source in in_folder if source is not None]
        if not own:
            raise ValueError(f"folder {root} holds no file of a known kind: {_known(suffixes)}")
        found += own
        left_out += [*others, *(file for file, source in in_folder if source is None)]
    return found, left_out


def _files_in(root: Path) -> tuple[list[Path], list[Path]]:
    """Returns all files below a folder, in order, and the rest: links to folders or to nothing, pipes."""

    def refuse(error: OSError) -> None:
        raise ValueError(
            f"cannot read {error.filename} ({error.strerror}): make it readable, or move it away"
        ) from error

    files: list[Path] = []
    others: list[Path] = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        others += [path for name in subfolders if (path := Path(folder, name)).is_symlink()]
        for name in names:
            if not name.startswith("."):
                path = Path(folder, name)
                if path.is_symlink() and path.is_file():
                    check_inside(path, root)
                (files if path.is_file() else others).append(path)
    return sorted(files, key=lambda file: file.relative_to(root).as_posix()), others


def _source(path: Path, name: str, suffixes: Sequence[str]) -> Source | None:
    compression = _COMPRESSIONS.get(path.suffix.lower())
    bare = path.name.lower() if compression is None else path.stem.lower()
    if bare.endswith(_LINES):
        kind = LINES
    elif bare.endswith(_ROWS) and compression is None:  # it is compressed inside
        kind = ROWS
    elif bare.endswith(tuple(suffix.lower() for suffix in suffixes)):
        kind = TEXT
    else:
        return None
    return Source(name, str(path), kind, compression)


def _known(suffixes: Sequence[str]) -> str:
    return (
        f"plain text ends in {', '.join(suffixes)} (--suffixes names others), JSON lines in {', '.join(_LINES)}, both "
        f"also in {', '.join(_COMPRESSIONS)} behind it, and Parquet in {', '.join(_ROWS)}"
    )
