"""Which files are tokenised, in which order, under which names, and what kind each is by its suffix.

Files of a folder come in the order of their relative paths and are named by them, so that the same folder gives the
same token set on every machine.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rrfp_jax.data.links import check_inside

TEXT, LINES, ROWS = "text", "lines", "rows"
"""A document per file; a JSON object with a document per line; a Parquet row with a document each."""
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
_LINES = (".jsonl", ".ndjson", ".json")
_ROWS = (".parquet", ".pq")
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}


@dataclass(frozen=True)
class Source:
    """One file that holds documents."""

    name: str
    """Relative to the input that it was found in."""
    path: str
    kind: str
    """``text``, ``lines`` or ``rows``."""
    compression: str | None
    """As pyarrow calls it; None: the file is not compressed as a whole."""


def find_sources(inputs: Sequence[str | os.PathLike[str]], suffixes: Sequence[str]) -> tuple[list[Source], list[Path]]:
    """Returns the sources in files and folders, and the files of folders that were left out for their suffixes.

    ``suffixes`` are those of plain text. Hidden files and folders are skipped, links to folders not followed. Of
    several folders, names begin with that of the folder. Raises ValueError, with the remedy, if an input is missing, of
    no known kind, or holds nothing, and for a link in a folder to a file outside of it. The files that were left out
    include links to folders, and anything that is no file.
    """
    if not inputs:
        raise ValueError("there is no input: name files or folders of text, JSON lines or Parquet")
    found: list[Source] = []
    left_out: list[Path] = []
    for root in map(_root, inputs):
        if root.is_dir():
            prefix = "" if len(inputs) == 1 else f"{root.absolute().name}/"
            sources, others = _in_folder(root, prefix, suffixes)
            found += sources
            left_out += others
        else:
            source = _source(root, root.name, suffixes)
            if source is None:
                raise ValueError(f"{root} is of no known kind: {_known(suffixes)}")
            found.append(source)
    return found, left_out


def _root(given: str | os.PathLike[str]) -> Path:
    root = Path(given).expanduser()
    if not root.exists():
        raise ValueError(f"input {root} does not exist: name an existing file or folder")
    if not root.is_dir() and not root.is_file():
        raise ValueError(f"input {root} is no file, and is read several times: write what it gives into one")
    return root


def _in_folder(root: Path, prefix: str, suffixes: Sequence[str]) -> tuple[list[Source], list[Path]]:
    found: list[Source] = []
    files, left_out = _files(root)
    for path in files:
        source = _source(path, prefix + path.relative_to(root).as_posix(), suffixes)
        if source is None:
            left_out.append(path)
        else:
            found.append(source)
    if not found:
        raise ValueError(f"folder {root} holds no file of a known kind: {_known(suffixes)}")
    return found, left_out


def _files(root: Path) -> tuple[list[Path], list[Path]]:
    """All files, in order, and what else there is: links to folders or to nothing, pipes."""
    files: list[Path] = []
    others: list[Path] = []
    for folder, subfolders, names in os.walk(root, onerror=_refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        others += [path for name in subfolders if (path := Path(folder, name)).is_symlink()]
        for name in names:
            if not name.startswith("."):
                path = Path(folder, name)
                if path.is_symlink() and path.is_file():
                    check_inside(path, root)
                (files if path.is_file() else others).append(path)
    return sorted(files, key=lambda file: file.relative_to(root).as_posix()), others


def _refuse(error: OSError) -> None:
    raise ValueError(f"cannot read {error.filename} ({error.strerror}): make it readable, or move it away") from error


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
