"""Text from disk as one array of bytes.

The order is that of the files' relative paths, so that the same folder gives the same array on every machine. Every
file is followed by one zero byte, the end of a document.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Never

import numpy as np
from numpy.typing import NDArray

from rrfp_jax.data.links import check_inside

_NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
"""Folders below the standard library that hold its tests or what was installed beside it."""


def read_corpus(path: str | None, *, suffixes: tuple[str, ...], max_bytes: int) -> NDArray[np.uint8]:
    """Read at most ``max_bytes`` bytes of text, uint8 ``[num_bytes]``; arguments as in ``TextConfig``.

    Raises ValueError, with the remedy, when there is nothing to read or a file cannot be read.
    """
    parts: list[bytes] = []
    num_bytes = 0
    for file in corpus_files(path, suffixes):
        part = _read(file, max_bytes - num_bytes) + b"\0"
        parts.append(part)
        num_bytes += len(part)
        if num_bytes >= max_bytes:
            break
    return np.frombuffer(b"".join(parts), dtype=np.uint8)[:max_bytes]


def corpus_files(path: str | None, suffixes: tuple[str, ...]) -> list[Path]:
    """Returns the files that make up a corpus, in order.

    A single file is taken whatever its suffix. Hidden folders are skipped, links to folders are not followed. Raises
    ValueError, with the remedy, if there is no file, or if one is a link out of the folder.
    """
    root = Path(sysconfig.get_path("stdlib")) if path is None else Path(path).expanduser()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ValueError(
            f"data folder {root} does not exist: give an existing file or folder, or none for the standard library"
        )
    skipped = _NOT_LIBRARY if path is None else frozenset()
    files = [file for file in _walk(root, skipped) if file.name.endswith(suffixes) and file.is_file()]
    for file in files if path is not None else ():
        if file.is_symlink():
            check_inside(file, root)
    if not files:
        raise ValueError(
            f"data folder {root} holds no file ending in {', '.join(suffixes)}: give another folder or other suffixes"
        )
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root, onerror=_refuse):
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
        yield from (Path(folder, name) for name in names)


def _read(file: Path, max_bytes: int) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(min(max_bytes, os.fstat(stream.fileno()).st_size))
    except OSError as error:
        _refuse(error)


def _refuse(error: OSError) -> Never:
    raise ValueError(
        f"cannot read {error.filename} ({error.strerror}): make it readable, or move it out of the data folder"
    ) from error
