"""Files written in one piece, so that no reader sees half of one, and checks that they can be written at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path in the same folder (created if missing), moved to ``path`` when the block succeeds.

    When the block raises, the temporary file is removed and whatever stood at ``path`` before is untouched. Protects
    from a killed process, not from a power cut: nothing is forced to the disk.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays, because libraries choose the format by it.
    temporary = target.with_name(f".{target.stem}.{secrets.token_hex(4)}.part{target.suffix}")
    try:
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(target)  # a full disk does not say which file it was
        raise
    finally:
        temporary.unlink(missing_ok=True)


def check_folder(path: Path, what: str) -> None:
    """Raises ValueError unless files can be written into ``path``, which may be missing. Nothing is left behind."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{what} {path} is a file: name a folder")
    nearest = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not nearest.is_dir():
        raise ValueError(f"{what} {path} cannot be made, because {nearest} is no folder: name another one")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{what} {path}: nothing can be written into {nearest}, so name another folder")
    probe = nearest / f".{secrets.token_hex(8)}.tmp"
    try:  # access rights tell too little: some file systems take nothing
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise ValueError(
            f"{what} {path}: nothing can be made in {nearest} ({error.strerror}), so name another folder"
        ) from None


def check_file(path: Path, what: str) -> None:
    """Raises ValueError unless ``path`` can be written. It and its folders may be missing."""
    if path.is_dir():
        raise ValueError(f"{what} {path} is a folder: name a file, or move the folder away")
    if path.exists() and not path.is_file():
        raise ValueError(f"{what} {path} is a pipe or a device: name a file, or move that away")
    check_folder(path.parent, f"the folder of {what}")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{what} {path} is write-protected: name another file, or make it writable")
